"""The dense model of a pipeline: its config, and its variables over all stages."""

import collections
import contextlib
import copy
import dataclasses

import keras
import tensorflow as tf

from hvdtrain.collectives.objects import allgather_object, broadcast_object
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.job.agreement import fail_together, on_chief
from hvdtrain.job.backend import world
from hvdtrain.job.world import JobError
from hvdtrain.keras import optimizer_state
from hvdtrain.keras.dense_values import DenseValues, DenseVariable
from hvdtrain.keras.learning_rates import without_loss_scale

_NOT_LOADED = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseModel:
    """The dense model without its values.

    Attributes:
        model_class: `keras.Sequential` or the class of functional models.
        config: its config.
        custom_objects: its layers' classes by name.
        scope: the first part of its variables' paths, which a Sequential has.
    """

    model_class: type
    config: dict
    custom_objects: dict
    scope: str

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
    inner = without_loss_scale(optimizer)
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
    """Return the variables of all stages as `DenseVariable`s. A collective.

    Args:
        variables: list of this rank's variables.
        common: list of those of the optimizer that all stages have, such as the number
            of iterations. Each is one.
        pipeline: the axis of the mesh.
    """
    number_of = {id(variable): number for number, variable in enumerate(common)}
    mine = [(DenseVariable.of(v), number_of.get(id(v))) for v in variables]
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
    return optimizer_state.common_state(optimizer, model.weights) if optimizer else []


def gather(pipeline):
    """Return the dense model and its optimizer's state on rank 0, None elsewhere.

    A collective of all ranks of the job.

    Args:
        pipeline: the `PipelineModel`.

    Raises:
        SharedJobError: on all ranks, if rank 0 cannot make it.
    """
    described, keys = _described(pipeline)
    model, targets = None, []
    with fail_together(world()):
        if global_process_set.rank() == 0:
            model = pipeline.dense.build(pipeline)
            targets = _ordered(model, keys)
    values = DenseValues(described)
    for number in range(len(described)):
        value = values.gather(number)
        if targets:
            targets[number].assign(value)
    return model


def load(pipeline, filepath, options):
    """Assign what rank 0 reads from a file of the dense model. A collective.

    As Keras does, it leaves the optimizer as it is where the file has another number
    of its variables, or none.

    Args:
        pipeline: the `PipelineModel`.
        filepath: the file.
        options: further arguments of `keras.Model.load_weights`, as a dict.

    Raises:
        JobError: on all ranks, if it cannot be read.
    """
    described, keys = _described(pipeline)

    def read():
        model = pipeline.dense.build(pipeline)
        optimizer = without_loss_scale(getattr(model, "optimizer", None))
        if optimizer:
            optimizer._iterations.assign(_NOT_LOADED)
        try:
            model.load_weights(filepath, **options)
        except (OSError, ValueError) as error:
            raise JobError(f"Cannot load {filepath}: {error}") from error
        sources = _ordered(model, keys)
        if optimizer and int(optimizer._iterations) == _NOT_LOADED:
            # The weights are the first ones.
            return sources[: len(model.weights)]
        return sources

    sources = on_chief(world(), read)
    count = broadcast_object(sources and len(sources), name="LoadedVariables")
    values = DenseValues(described)
    for number in range(count):
        values.scatter(number, sources and sources[number].numpy())


def _described(pipeline):
    """Return the `DenseVariable`s of the model and its optimizer, and their keys."""
    slots = getattr(getattr(pipeline, "optimizer", None), "variables", [])
    weights = pipeline.dense_variables(pipeline.weights)
    state = pipeline.dense_variables(slots)
    common = {id(variable) for variable in common_state(pipeline)}
    is_common = [id(each.variable) in common for each in state]
    return [*weights, *state], _keys(weights, state, is_common)


def _ordered(model, keys):
    """Return the variables of a dense model that have these keys."""
    optimizer = getattr(model, "optimizer", None)
    state = optimizer.variables if optimizer else []
    common = {id(variable) for variable in common_state(model)}
    is_common = [id(variable) in common for variable in state]
    found = _keys(model.weights, state, is_common)
    variables = dict(zip(found, [*model.weights, *state], strict=True))
    return [variables[key] for key in keys]


def _keys(weights, state, is_common):
    """Return keys of variables that are equal in the dense model and in its stages.

    A slot of the optimizer has the name of its weight. The scope before it is no part
    of the key: it depends on where Keras has built the optimizer.
    """
    names = [f"weights/{each.path}" for each in weights]
    for each, common in zip(state, is_common, strict=True):
        names.append("common" if common else each.path.rpartition("/")[2])
    # Of equal names, by their order.
    counts = collections.Counter()
    keys = []
    for name in names:
        counts[name] += 1
        keys.append((name, counts[name]))
    return keys
