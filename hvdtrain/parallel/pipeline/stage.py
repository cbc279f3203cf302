"""Build the layers of one stage of a full model."""

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.keras import layer_state
from hvdtrain.parallel.layer import InModelGroup
from hvdtrain.parallel.mesh import Mesh
from hvdtrain.parallel.pipeline import splitting
from hvdtrain.parallel.pipeline.full_model import FullModel, find_scope, in_scope
from hvdtrain.parallel.pipeline.splitting import Cut, Entry
from hvdtrain.parallel.recomputation import is_remat, remat
from hvdtrain.sharding import layer_checks
from hvdtrain.sharding.full_values import FullVariable
from hvdtrain.sharding.shards import is_sharded

# In training, these depend on all samples of a batch, or on the batches before.
_STATEFUL = (keras.layers.BatchNormalization, keras.layers.SpectralNormalization)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """The stage of a full model on a rank.

    Attributes:
        network: functional model of its layers, with the values of the full model.
        cuts: the `Cut` after each stage; the last one is the model's output.
        full_model: the `FullModel`.
        outputs: the result of `layer_checks.trace_outputs` for the full model.
    """

    network: keras.Model
    cuts: tuple[Cut, ...]
    full_model: FullModel
    outputs: list


def build(
    model: keras.Model, stages: Sequence[str] | Sequence[int] | None, mesh: Mesh
) -> Stage:
    """Return the `Stage` of a rank. The full model can be deleted afterwards.

    Every rank of the pipeline checks the full model: all raise the same error.

    Args:
        model: a built `keras.Sequential` or functional model.
        stages: as for `PipelineModel`.
        mesh: the `Mesh`; the rank gets the stage of its index on the axis pipeline.

    Raises:
        ValueError: the model cannot be split, or not into these stages.
    """
    index, size = mesh.pipeline.index, mesh.pipeline.size
    functional = _as_functional(model)
    outputs_of_model = layer_checks.trace_outputs(functional)
    config = functional.get_config()
    outputs = [tuple(history) for history in config["output_layers"]]
    if stages is None:
        sizes = list(map(_count_parameters, functional.operations[1:]))
        stages = splitting.balance(sizes, size)
    entries = splitting.split(config["layers"], stages)
    if len(entries) != size:
        raise ValueError(
            f"Received stages={list(stages)}, which are {len(entries)} stages, for a "
            f"mesh with pipeline={size}; expected as many stages as ranks."
        )
    (output,) = model.outputs
    cuts = splitting.find_cuts(entries, outputs)
    cuts.append(splitting.make_cut(outputs[0], output.shape, output.dtype))
    _check_model(functional, entries, cuts, mesh)
    cut_before = cuts[index - 1] if index else None
    makers = _make_makers(functional, mesh)
    stage_entries = [_register_maker(entry, makers) for entry in entries[index]]
    name = f"{model.name}_stage_{index}"
    config = splitting.make_config(stage_entries, cut_before, cuts[index].history, name)
    network = _build_network(config, functional, makers)
    _copy_values(network, functional)
    _copy_remat(network, functional)
    full_model = FullModel(
        model_class=type(model),
        config=model.get_config(),
        custom_objects=_classes(model),
        scope=find_scope(functional),
        layers=[layer.name for layer in functional.layers],
    )
    return Stage(
        network=network,
        cuts=tuple(cuts),
        full_model=full_model,
        outputs=outputs_of_model,
    )


def _check_model(
    functional: keras.Model,
    entries: Sequence[Sequence[Entry]],
    cuts: Sequence[Cut],
    mesh: Mesh,
) -> None:
    stage_of = {entry["name"]: s for s, stage in enumerate(entries) for entry in stage}
    owners = _find_stages(functional, stage_of)
    _check_trainable(functional, owners, len(entries))
    for layer in functional.layers:
        _check_sharding(layer, mesh)
        for inner in layer._flatten_layers():
            _check_layer(inner)
    for cut in cuts:
        _check_mask(functional, cut)


def _as_functional(model: keras.Model) -> keras.Model:
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


def _build_network(
    config: dict[str, Any], functional: keras.Model, makers: dict[str, "_Maker"]
) -> keras.Model:
    # Keras draws seeds from Python's generator, and stages draw different numbers of
    # them. Without its old state, the ranks of a pipeline would shuffle differently.
    state = random.getstate()
    try:
        # Variables, and their slots, get the paths that they have in the full model.
        with in_scope(find_scope(functional)):
            return keras.Model.from_config(config, {**_classes(functional), **makers})
    except TypeError as error:
        raise ValueError(
            "A pipeline makes layers from their config. Decorate functions and classes "
            "of your own with @keras.saving.register_keras_serializable(). Received: "
            f"{functional.name!r}, of which Keras cannot make a stage."
        ) from error
    finally:
        random.setstate(state)


def _classes(model: keras.Model) -> dict[str, type]:
    return {type(layer).__name__: type(layer) for layer in model._flatten_layers()}


def _find_stages(functional: keras.Model, stage_of: dict[str, int]) -> dict[int, int]:
    """Return the stage of each variable, by the identity of the variable."""
    owners: dict[int, keras.layers.Layer] = {}
    for layer in functional.layers:
        for variable in layer.variables:
            owner = owners.setdefault(id(variable), layer)
            if owner is not layer:
                raise ValueError(
                    f"The layers {owner.name!r} and {layer.name!r} share the variable "
                    f"{variable.path!r}. A pipeline makes each layer from its config, "
                    "with variables of its own."
                )
    return {key: stage_of[layer.name] for key, layer in owners.items()}


def _copy_values(network: keras.Model, functional: keras.Model) -> None:
    for layer in network.layers:
        if isinstance(layer, keras.layers.InputLayer):
            continue
        source = functional.get_layer(layer.name)
        for new, old in zip(layer.variables, source.variables, strict=True):
            new.assign(old)
    layer_state.refresh(network)


def _copy_remat(network: keras.Model, functional: keras.Model) -> None:
    for layer in network.layers:
        # An input of the stage is no layer of the full model.
        if not isinstance(layer, keras.layers.InputLayer):
            source = functional.get_layer(layer.name)
            layers = zip(layer._flatten_layers(), source._flatten_layers(), strict=True)
            for new, old in layers:
                if is_remat(old):
                    remat(new)


def _check_trainable(
    functional: keras.Model, owners: Mapping[int, int], size: int
) -> None:
    trained = {owners[id(weight)] for weight in functional.trainable_weights}
    if missing := set(range(size)) - trained:
        raise ValueError(
            f"Stage {min(missing)} has no trainable weights. Choose other stages."
        )


def _check_layer(layer: keras.layers.Layer) -> None:
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
        f"The {type(layer).__name__} {layer.name!r} cannot be part of a pipeline, "
        "which makes layers from their config and splits batches into micro-batches: "
        f"{reason}."
    )


def _check_mask(functional: keras.Model, cut: Cut) -> None:
    layer = next(op for op in functional.operations if op.name == cut.history[0])
    nodes = layer._inbound_nodes
    outputs = [tensor for node in nodes for tensor in node.output_tensors]
    if any(getattr(tensor, "_keras_mask", None) is not None for tensor in outputs):
        raise ValueError(
            f"The output of {layer.name!r} has a mask, which does not pass from stage "
            "to stage or to the loss. Choose other stages, or a model without masks."
        )


def _check_sharding(layer: keras.layers.Layer, mesh: Mesh) -> None:
    """Raise a ValueError for a sharded layer that no stage can make."""
    if _is_on_mesh(layer, mesh) or not is_sharded(layer.variables):
        return
    raise ValueError(
        f"The {type(layer).__name__} {layer.name!r} cannot be part of a pipeline, "
        "which makes layers from their config: its weights are sharded, and not over "
        "the axis model of the pipeline's mesh, or a layer inside of it is sharded."
    )


def _count_parameters(operation: keras.Operation) -> int:
    """Return the number of parameters of the full layer, which is equal on all ranks.

    It is 0 for an operation of Keras that is no layer, such as an addition.
    """
    variables = getattr(operation, "variables", [])
    return sum(math.prod(FullVariable.of(variable).shape) for variable in variables)


class _Maker:
    """Makes a sharded layer for a mesh, where Keras expects the class of the layer.

    A sharded layer has the config of the Keras layer: from the config alone, Keras
    would make an unsharded layer.
    """

    def __init__(self, layer: InModelGroup, mesh: Mesh) -> None:
        self._layer = layer
        self._mesh = mesh

    def from_config(self, _: dict[str, Any]) -> InModelGroup:
        return self._layer.clone_for_mesh(self._mesh)


def _make_makers(functional: keras.Model, mesh: Mesh) -> dict[str, _Maker]:
    """Return the makers of the sharded layers, by a registered name."""
    layers = [layer for layer in functional.layers if _is_on_mesh(layer, mesh)]
    return {_registered_name(layer.name): _Maker(layer, mesh) for layer in layers}


def _register_maker(entry: Entry, makers: Mapping[str, _Maker]) -> Entry:
    """Return the entry of a layer, with its registered name if it has a maker."""
    name = _registered_name(entry["name"])
    if name not in makers:
        return entry
    # Without the config of its build, which has full shapes, its call builds the layer.
    kept = {key: value for key, value in entry.items() if key != "build_config"}
    return kept | {"registered_name": name}


def _is_on_mesh(layer: keras.layers.Layer, mesh: Mesh) -> bool:
    return isinstance(layer, InModelGroup) and layer.is_on_mesh(mesh)


def _registered_name(layer_name: str) -> str:
    return f"sharded>{layer_name}"
