"""The dense model of a pipeline: its config, and its variables over all stages."""

import collections
import contextlib
import copy
import dataclasses
import itertools

import keras
import tensorflow as tf

from hvdtrain.collectives.objects import allgather_object, broadcast_object
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.job.agreement import fail_together, on_chief
from hvdtrain.job.backend import world
from hvdtrain.job.world import JobError
from hvdtrain.keras import variables
from hvdtrain.keras.variables import get_inner_optimizer
from hvdtrain.parallel.mesh import Axis
from hvdtrain.sharding.full_values import FullValues, FullVariable

_NOT_LOADED = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullModel:
    """The dense model without its values.

    Attributes:
        model_class: `keras.Sequential` or the class of functional models.
        config: its config.
        custom_objects: its layers' classes by name.
        scope: the first part of its variables' paths, which a Sequential has.
        layers: the names of its layers, in their order.
    """

    model_class: type
    config: dict
    custom_objects: dict
    scope: str
    layers: list

    def build(self, compiled=None):
        """Return the dense model with new initial values.

        Args:
            compiled: a model as which it is compiled, if that is.
        """
        # A GPU may have no room for all stages.
        with tf.device("CPU"):
            return self._build(compiled)

    def _build(self, compiled):
        with in_scope(self.scope):
            # Keras takes entries out of the config that it is given.
            model = self.model_class.from_config(
                copy.deepcopy(self.config), self.custom_objects
            )
        if compiled is not None and compiled.compiled:
            # Not from a config, which has only the names of a user's own functions.
            options = dict(compiled._compile_config.config)
            options["optimizer"] = _new(compiled.optimizer)
            model.compile(**options, auto_scale_loss=False)
            if compiled.optimizer.built:
                model.optimizer.build(model.trainable_variables)
        return model


def _new(optimizer):
    """Return an optimizer of the same class and config, without state."""
    inner = get_inner_optimizer(optimizer)
    classes = {type(inner), type(inner._learning_rate)}
    with keras.saving.custom_object_scope({each.__name__: each for each in classes}):
        return type(optimizer).from_config(optimizer.get_config())


def scope_of(model):
    """Return what the paths of a model's variables have before the layers' names."""
    for layer in model.layers:
        for variable in layer.variables:
            before, found, _ = variable.path.partition(f"{layer.name}/")
            if found:
                return before.removesuffix("/")
    return ""


@contextlib.contextmanager
def in_scope(scope):
    """Give variables that are made in the block paths that begin with `scope`."""
    with contextlib.ExitStack() as stack:
        for name in filter(None, scope.split("/")):
            stack.enter_context(keras.name_scope(name))
        yield


def describe(variables, common, pipeline):
    """Return the variables of all stages as `FullVariable`s. A collective.

    Args:
        variables: list of this rank's variables.
        common: list of those of the optimizer that all stages have, such as the number
            of iterations. Each is one.
        pipeline: the axis of the mesh.
    """
    number_of = {id(variable): number for number, variable in enumerate(common)}
    mine = [(FullVariable.of(v), number_of.get(id(v))) for v in variables]
    sent = [
        (dataclasses.replace(described, variable=None), number)
        for described, number in mine
    ]
    own = {number: each for each, number in mine if number is not None}
    stages = [mine]
    if needs_communication(pipeline.process_set):
        stages = allgather_object(
            sent, name="StageVariables", process_set=pipeline.process_set
        )
        stages[pipeline.index] = mine
    found = {}
    for stage, entries in enumerate(stages):
        for place, (described, number) in enumerate(entries):
            # Not by path: the states of random layers may have equal ones.
            key = (stage, place) if number is None else number
            found.setdefault(key, own.get(number, described))
    return list(found.values())


def common_state(model):
    """Return the variables of an optimizer that belong to no weight of the model."""
    optimizer = getattr(model, "optimizer", None)
    return variables.common_state(optimizer, model.weights) if optimizer else []


def gather(pipeline, axis: Axis):
    """Return the dense model and its optimizer's state on rank 0, None elsewhere.

    A collective of all ranks of the job.

    Args:
        pipeline: the `PipelineModel`.
        axis: the axis of the mesh over which its stages are.

    Raises:
        SharedJobError: on all ranks, if rank 0 cannot make it.
    """
    described, keys = _described(pipeline, axis)
    model, targets = None, []
    with fail_together(world()):
        if global_process_set.rank() == 0:
            model = pipeline.dense.build(pipeline)
            targets = _ordered(model, keys, pipeline.dense.layers)
    values = FullValues(described)
    for number in range(len(described)):
        value = values.gather(number)
        if targets:
            targets[number].assign(value)
    return model


def load(pipeline, axis: Axis, filepath, options):
    """Assign what rank 0 reads from a file of the dense model. A collective.

    As Keras does, it leaves the optimizer as it is where the file has another number
    of its variables, or none.

    Args:
        pipeline: the `PipelineModel`.
        axis: the axis of the mesh over which its stages are.
        filepath: the file.
        options: further arguments of `keras.Model.load_weights`, as a dict.

    Raises:
        JobError: on all ranks, if it cannot be read.
    """
    described, keys = _described(pipeline, axis)

    def read():
        model = pipeline.dense.build(pipeline)
        optimizer = get_inner_optimizer(getattr(model, "optimizer", None))
        if optimizer:
            optimizer._iterations.assign(_NOT_LOADED)
        try:
            model.load_weights(filepath, **options)
        except (OSError, ValueError) as error:
            raise JobError(f"Cannot load {filepath}: {error}") from error
        sources = _ordered(model, keys, pipeline.dense.layers)
        if optimizer and int(optimizer._iterations) == _NOT_LOADED:
            # The weights are the first ones.
            return sources[: len(model.weights)]
        return sources

    sources = on_chief(world(), read)
    count = broadcast_object(sources and len(sources), name="LoadedVariables")
    values = FullValues(described)
    for number in range(count):
        values.scatter(number, sources and sources[number].numpy())


def _described(pipeline, axis):
    """Return the `FullVariable`s of the model and its optimizer, and their keys."""
    described = [
        *pipeline.full_variables(pipeline.weights),
        *pipeline.full_variables(_state(pipeline)),
    ]
    ranks = axis.process_set
    mine = _keys(pipeline, pipeline.network.layers, pipeline.dense.layers)
    stages = [mine]
    if needs_communication(ranks):
        stages = allgather_object(mine, name="StageKeys", process_set=ranks)
    # In the order of the variables. What all stages have is among them once, too.
    of_weights, of_state = zip(*stages, strict=True)
    keys = itertools.chain(*of_weights, *of_state)
    return described, list(dict.fromkeys(keys))


def _ordered(model: keras.Model, keys: list, names: list) -> list:
    """Return the variables of a dense model that have these keys."""
    of_weights, of_state = _keys(model, model.layers, names)
    variables = zip(of_weights, model.weights, strict=True)
    by_key = dict([*variables, *zip(of_state, _state(model), strict=True)])
    return [by_key[key] for key in keys]


def _state(model):
    optimizer = getattr(model, "optimizer", None)
    return optimizer.variables if optimizer else []


def _keys(model: keras.Model, layers: list, names: list) -> tuple[list, list]:
    """Return keys of the variables of the dense model or one of its stages.

    They do not depend on names: automatic names of layers differ between ranks of which
    one has made more layers before, and weights of nested models may have equal paths.
    The key of a weight has the number of its layer in the dense model, and its own in
    the layer; that of a slot the key of its weight, and that of other variables of the
    optimizer None. Then comes the number among the variables of this kind.

    Args:
        model: the model.
        layers: its layers, which are layers of the dense model.
        names: those of the layers of this rank's dense model.

    Returns:
        List of the keys of the weights, and list of those of the optimizer's variables.
    """
    number_of = {
        id(weight): (names.index(layer.name), number)
        for layer in layers
        for number, weight in enumerate(layer.weights)
    }
    owners = {}
    if _state(model):
        pairs = variables.owned_slots(model.optimizer, model.weights)
        owners = {id(slot): number_of[id(weight)] for slot, weight in pairs}
    counts = collections.Counter(number_of.values())
    of_state = []
    for variable in _state(model):
        owner = owners.get(id(variable))
        of_state.append((owner, counts[owner]))
        counts[owner] += 1
    return [(number_of[id(weight)], 0) for weight in model.weights], of_state
