"""The layers of one stage, built in place of the dense model's."""

import dataclasses
import math
import random

import keras
import tensorflow as tf

from hvdtrain.parallel.layer import InModelGroup
from hvdtrain.parallel.pipeline import splitting
from hvdtrain.parallel.pipeline.full_model import FullModel, in_scope, scope_of
from hvdtrain.sharding import layer_checks
from hvdtrain.sharding.full_values import FullVariable
from hvdtrain.sharding.shards import is_sharded


def check(layer, mesh):
    """Raise a ValueError for a layer that is divided, and that no stage can make."""
    if _is_made(layer, mesh) or not is_sharded(layer.variables):
        return
    raise ValueError(
        f"The {type(layer).__name__} {layer.name!r} cannot be part of a pipeline, "
        "which makes layers from their config: its weights are divided, and not over "
        "the axis model of the pipeline's mesh, or those of a layer inside of it are."
    )


def full_size(operation):
    """Return the number of parameters of a layer's dense twin: equal on all ranks.

    It is 0 for an operation of Keras, such as an addition, which is no layer.
    """
    variables = getattr(operation, "variables", [])
    return sum(math.prod(FullVariable.of(variable).shape) for variable in variables)


def makers(functional, mesh):
    """Return, by a registered name, what Keras calls as the class of a divided layer.

    Args:
        functional: the dense model, with divided layers.
        mesh: the `Mesh` of the pipeline.
    """
    made = [layer for layer in functional.layers if _is_made(layer, mesh)]
    return {_name(layer.name): _Maker(layer, mesh) for layer in made}


def with_maker(entry, makers):
    """Return an entry of a config, with the registered name if it has a maker."""
    name = _name(entry["name"])
    if name not in makers:
        return entry
    # It is built by its call: the shapes of its build are those of the dense twin.
    kept = {key: value for key, value in entry.items() if key != "build_config"}
    return kept | {"registered_name": name}


def _is_made(layer, mesh):
    return isinstance(layer, InModelGroup) and layer.is_on_mesh(mesh)


class _Maker:
    def __init__(self, layer, mesh):
        self._layer = layer
        self._mesh = mesh

    def from_config(self, _):
        return self._layer.clone_for_mesh(self._mesh)


def _name(layer_name):
    return f"divided>{layer_name}"


# They depend on the whole batch, or on the batches before.
_STATEFUL = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """What a rank has of a dense model.

    Attributes:
        network: functional model of its layers, with the dense model's values.
        cuts: the `Cut` after each stage; the last one is the model's output.
        dense: the `FullModel`.
        outputs: what `layer_checks.trace_outputs` returns of the full model.
    """

    network: keras.Model
    cuts: tuple
    dense: FullModel
    outputs: list


def build(model, stages, mesh):
    """Return the `Stage` of a rank. The dense model can be deleted afterwards.

    Every rank of the pipeline checks the whole model: all raise the same error.

    Args:
        model: a built `keras.Sequential` or functional model.
        stages: as for `PipelineModel`.
        mesh: the `Mesh`, of whose axis pipeline each rank has a stage.

    Raises:
        ValueError: the model cannot be split, or not so.
    """
    index, size = mesh.pipeline.index, mesh.pipeline.size
    functional = _as_functional(model)
    outputs_of_model = layer_checks.trace_outputs(functional)
    config = functional.get_config()
    outputs = [tuple(history) for history in config["output_layers"]]
    if stages is None:
        sizes = list(map(full_size, functional.operations[1:]))
        stages = splitting.balanced(sizes, size)
    entries = splitting.split(config["layers"], stages)
    if len(entries) != size:
        raise ValueError(
            f"Received stages={list(stages)}, which are {len(entries)} stages, for a "
            f"mesh with pipeline={size}; expected as many stages as ranks."
        )
    (output,) = model.outputs
    cuts = splitting.cuts(entries, outputs)
    cuts.append(splitting.checked(outputs[0], output.shape, output.dtype))
    stage_of = {each["name"]: s for s, stage in enumerate(entries) for each in stage}
    owners = _stages_of_variables(functional, stage_of)
    _check_trainable(functional, owners, size)
    for layer in functional.layers:
        check(layer, mesh)
        for each in layer._flatten_layers():
            _check_layer(each)
    for cut in cuts:
        _check_mask(functional, cut)
    before = cuts[index - 1] if index else None
    layer_makers = makers(functional, mesh)
    mine = [with_maker(entry, layer_makers) for entry in entries[index]]
    name = f"{model.name}_stage_{index}"
    network = _network(
        splitting.config_of(mine, before, cuts[index].history, name),
        functional,
        layer_makers,
    )
    _copy_values(network, functional)
    dense = FullModel(
        model_class=type(model),
        config=model.get_config(),
        custom_objects=_classes(model),
        scope=scope_of(functional),
        layers=[layer.name for layer in functional.layers],
    )
    return Stage(
        network=network, cuts=tuple(cuts), dense=dense, outputs=outputs_of_model
    )


def _as_functional(model):
    name = type(model).__name__
    if not getattr(model, "built", False):
        raise ValueError(
            f"A pipeline needs a model that is built. Received: the {name} "
            f"{getattr(model, 'name', model)!r}. Give it a keras.Input."
        )
    inputs, outputs = (getattr(model, key, None) or [] for key in ("inputs", "outputs"))
    if len(inputs) == len(outputs) == 1:
        functional = keras.Model(inputs, outputs)
        if type(model) in (keras.Sequential, type(functional)):
            return functional
    raise ValueError(
        "A pipeline needs a keras.Sequential or a functional model with one input and "
        f"one output. Received: a {name} with {len(inputs)} inputs and "
        f"{len(outputs)} outputs."
    )


def _network(config, functional, makers):
    # Keras draws seeds from Python's generator. Stages draw different numbers of them,
    # and the ranks of a pipeline must read the same samples.
    state = random.getstate()
    try:
        # Variables, and the optimizer's slots, have the names of the dense model's.
        with in_scope(scope_of(functional)):
            return keras.Model.from_config(config, _classes(functional) | makers)
    except TypeError as error:
        raise ValueError(
            "A pipeline makes layers from their config. Decorate functions and classes "
            "of your own with @keras.saving.register_keras_serializable(). Received: "
            f"{functional.name!r}, of which Keras cannot make a stage."
        ) from error
    finally:
        random.setstate(state)


def _classes(model):
    return {type(layer).__name__: type(layer) for layer in model._flatten_layers()}


def _stages_of_variables(functional, stage_of):
    """Return the stage of each variable, by its identity."""
    owners = {}
    for layer in functional.layers:
        for variable in layer.variables:
            owner = owners.setdefault(id(variable), layer)
            if owner is not layer:
                raise ValueError(
                    f"The layers {owner.name!r} and {layer.name!r} share the variable "
                    f"{variable.path!r}. A pipeline makes each layer from its config, "
                    "after which they would not."
                )
    return {key: stage_of[layer.name] for key, layer in owners.items()}


def _copy_values(network, functional):
    """Assign the dense model's values."""
    for layer in network.layers:
        if isinstance(layer, keras.layers.InputLayer):
            continue
        dense = functional.get_layer(layer.name)
        for new, old in zip(layer.variables, dense.variables, strict=True):
            new.assign(old)


def _check_trainable(functional, owners, size):
    trained = {owners[id(weight)] for weight in functional.trainable_weights}
    if missing := set(range(size)) - trained:
        raise ValueError(
            f"Stage {min(missing)} has no trainable weights. Choose other stages."
        )


def _check_layer(layer):
    kind = type(layer).__name__
    is_custom = not type(layer).__module__.startswith("keras.")
    own = [v for v in vars(layer).values() if isinstance(v, tf.Variable)]
    has_state = isinstance(layer, _STATEFUL) or (
        is_custom and (layer._non_trainable_variables or own)
    )
    if has_state and layer.trainable:
        reason = "its state in training depends on the whole batch"
    elif getattr(layer, "stateful", False):
        reason = "its state depends on the batches before"
    elif layer.activity_regularizer is not None:
        reason = "its activity_regularizer depends on the whole batch"
    else:
        return
    raise ValueError(
        f"The {kind} {layer.name!r} cannot be part of a pipeline, which makes layers "
        f"from their config and divides batches into micro-batches: {reason}."
    )


def _check_mask(functional, cut):
    layer = next(op for op in functional.operations if op.name == cut.history[0])
    nodes = layer._inbound_nodes
    outputs = [tensor for node in nodes for tensor in node.output_tensors]
    if any(getattr(tensor, "_keras_mask", None) is not None for tensor in outputs):
        raise ValueError(
            f"The output of {layer.name!r} has a mask, which does not pass from stage "
            "to stage or to the loss. Choose other stages, or a model without masks."
        )
