"""The full model of a pipeline: its config, and its variables over all stages."""

import collections
import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from hvdtrain.collectives.objects import allgather_object, broadcast_object
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.job.agreement import fail_together, on_chief
from hvdtrain.job.backend import world
from hvdtrain.job.world import JobError
from hvdtrain.keras import layer_state, variables
from hvdtrain.keras.variables import get_inner_optimizer
from hvdtrain.parallel.mesh import Axis
from hvdtrain.sharding.full_values import FullValues, FullVariable

_NOT_LOADED = -1

# A key of a variable that does not depend on names; see `_make_keys`.
_Key: TypeAlias = tuple[Any, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullModel:
    """The full model without its values.

    Attributes:
        custom_objects: the classes of its layers by name.
        scope: what the paths of its variables have before the names of layers; empty
            unless it is a Sequential.
        layers: the names of its layers, in their order.
    """

    model_class: type[keras.Model]
    config: dict[str, Any]
    custom_objects: dict[str, type]
    scope: str
    layers: list[str]

    def build(self, compiled: keras.Model | None = None) -> keras.Model:
        """Return the full model with new initial values, compiled as `compiled` is."""
        # A GPU may have no room for all stages.
        with tf.device("CPU"):
            return self._build(compiled)

    def _build(self, compiled: keras.Model | None) -> keras.Model:
        with in_scope(self.scope):
            # A copy: Keras pops entries of the config that it gets.
            model = self.model_class.from_config(
                copy.deepcopy(self.config), self.custom_objects
            )
        if compiled is not None and compiled.compiled:
            # The arguments themselves: a serialized config would have only the names of
            # a user's own functions.
            options = dict(compiled._compile_config.config)
            options["optimizer"] = _clone_optimizer(compiled.optimizer)
            model.compile(**options, auto_scale_loss=False)
            if compiled.optimizer.built:
                model.optimizer.build(model.trainable_variables)
        return model


def _clone_optimizer(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.Optimizer:
    """Return an optimizer of the same class and config, without state."""
    inner = get_inner_optimizer(optimizer)
    classes = {type(inner), type(inner._learning_rate)}
    with keras.saving.custom_object_scope({cls.__name__: cls for cls in classes}):
        return type(optimizer).from_config(optimizer.get_config())


def find_scope(model: keras.Model) -> str:
    """Return what the paths of a model's variables have before the names of layers."""
    for layer in model.layers:
        for variable in layer.variables:
            before, separator, _ = variable.path.partition(f"{layer.name}/")
            if separator:
                return before.removesuffix("/")
    return ""


@contextlib.contextmanager
def in_scope(scope: str) -> Iterator[None]:
    """Make paths of variables that are created in the block begin with `scope`."""
    with contextlib.ExitStack() as stack:
        for name in filter(None, scope.split("/")):
            stack.enter_context(keras.name_scope(name))
        yield


def describe(
    variables: Sequence[keras.Variable],
    common: Sequence[keras.Variable],
    pipeline: Axis,
) -> list[FullVariable]:
    """Return the variables of all stages as `FullVariable`s.

    A collective of the ranks of the pipeline. `common` has the variables of the
    optimizer that all stages have, such as the number of iterations. The result has
    each of them once.
    """
    numbers = {id(variable): number for number, variable in enumerate(common)}
    local = [(FullVariable.of(v), numbers.get(id(v))) for v in variables]
    # Without the variables, which cannot be pickled.
    sent = [
        (dataclasses.replace(described, variable=None), number)
        for described, number in local
    ]
    local_common: dict[int | None, FullVariable] = {
        number: v for v, number in local if number is not None
    }
    stages = [local]
    if needs_communication(pipeline.process_set):
        stages = allgather_object(
            sent, name="StageVariables", process_set=pipeline.process_set
        )
        stages[pipeline.index] = local
    by_key: dict[object, FullVariable] = {}
    for stage, entries in enumerate(stages):
        for position, (described, number) in enumerate(entries):
            # Not by path: the states of random layers may have equal paths.
            key = (stage, position) if number is None else number
            by_key.setdefault(key, local_common.get(number, described))
    return list(by_key.values())


def common_state(model: keras.Model) -> list[keras.Variable]:
    """Return the variables of an optimizer that belong to no weight of the model."""
    optimizer = getattr(model, "optimizer", None)
    return variables.unowned_variables(optimizer, model.weights) if optimizer else []


def gather(pipeline: keras.Model, axis: Axis) -> keras.Model | None:
    """Gather the full model of a `PipelineModel`: see its method `gather_full`."""
    described, keys = _describe_with_keys(pipeline, axis)
    model, targets = None, []
    with fail_together(world()):
        if global_process_set.rank() == 0:
            model = pipeline.full_model.build(pipeline)
            targets = _order(model, keys, pipeline.full_model.layers)
    values = FullValues(described)
    for number in range(len(described)):
        value = values.gather(number)
        if targets:
            targets[number].assign(value)
    if model:
        layer_state.refresh(model)
    return model


def load(
    pipeline: keras.Model, axis: Axis, filepath: str, options: dict[str, Any]
) -> None:
    """Load all stages of a `PipelineModel`: see its method `load_weights`."""
    described, keys = _describe_with_keys(pipeline, axis)

    def read() -> list[keras.Variable]:
        model = pipeline.full_model.build(pipeline)
        optimizer = get_inner_optimizer(getattr(model, "optimizer", None))
        if optimizer:
            optimizer._iterations.assign(_NOT_LOADED)
        try:
            model.load_weights(filepath, **options)
        except (OSError, ValueError) as error:
            raise JobError(f"Cannot load {filepath}: {error}") from error
        sources = _order(model, keys, pipeline.full_model.layers)
        if optimizer and int(optimizer._iterations) == _NOT_LOADED:
            # Weights come before the optimizer's variables.
            return sources[: len(model.weights)]
        return sources

    sources = on_chief(world(), read)
    count = broadcast_object(sources and len(sources), name="LoadedVariables")
    values = FullValues(described)
    for number in range(count):
        values.scatter(number, sources[number].numpy() if sources else None)
    layer_state.refresh(pipeline)


def _describe_with_keys(
    pipeline: keras.Model, axis: Axis
) -> tuple[list[FullVariable], list[_Key]]:
    """Return the variables of the full model and its optimizer, and their keys."""
    described = [
        *pipeline.full_variables(pipeline.weights),
        *pipeline.full_variables(_optimizer_state(pipeline)),
    ]
    ranks = axis.process_set
    local = _make_keys(pipeline, pipeline.network.layers, pipeline.full_model.layers)
    stages = [local]
    if needs_communication(ranks):
        stages = allgather_object(local, name="StageKeys", process_set=ranks)
    # In the order of the variables: a variable that all stages have is there once.
    of_weights, of_state = zip(*stages, strict=True)
    keys = itertools.chain(*of_weights, *of_state)
    return described, list(dict.fromkeys(keys))


def _order(
    model: keras.Model, keys: Sequence[_Key], names: Sequence[str]
) -> list[keras.Variable]:
    """Return the variables of a full model that have these keys."""
    of_weights, of_state = _make_keys(model, model.layers, names)
    weights = zip(of_weights, model.weights, strict=True)
    by_key = dict([*weights, *zip(of_state, _optimizer_state(model), strict=True)])
    return [by_key[key] for key in keys]


def _optimizer_state(model: keras.Model) -> list[keras.Variable]:
    optimizer = getattr(model, "optimizer", None)
    return optimizer.variables if optimizer else []


def _make_keys(
    model: keras.Model, layers: Sequence[keras.layers.Layer], names: Sequence[str]
) -> tuple[list[_Key], list[_Key]]:
    """Return keys of the weights and of the optimizer's variables of a model.

    Keys do not depend on names: automatic names of layers differ between ranks if one
    of them has made more layers before, and weights of nested models may have equal
    paths. The owner of a weight is a pair: the index of its layer in the full model,
    and its index in the layer. A slot has the owner of its weight. Other variables of
    the optimizer have no owner: None. A key is an owner and an index among the
    variables of this owner.

    Args:
        model: the full model or one of its stages.
        layers: its layers, which are layers of the full model.
        names: names of the layers of this rank's full model.
    """
    numbers = {
        id(weight): (names.index(layer.name), number)
        for layer in layers
        for number, weight in enumerate(layer.weights)
    }
    owners = {}
    if _optimizer_state(model):
        pairs = variables.owned_slots(model.optimizer, model.weights)
        owners = {id(slot): numbers[id(weight)] for slot, weight in pairs}
    counts = collections.Counter[Any](numbers.values())
    of_state = []
    for variable in _optimizer_state(model):
        owner = owners.get(id(variable))
        of_state.append((owner, counts[owner]))
        counts[owner] += 1
    return [(numbers[id(weight)], 0) for weight in model.weights], of_state
