"""The full model of a pipeline: its config, and its variables over all stages."""

import collections
import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

# A key of a variable that does not depend on names; see `_keys_by_id`.
_Key: TypeAlias = tuple[Any, int]

# The arguments and the result of the last `_number_state` of an optimizer.
_numbered: weakref.WeakKeyDictionary[
    keras.optimizers.Optimizer, tuple[dict[_Key, FullVariable], dict[_Key, int]]
] = weakref.WeakKeyDictionary()


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
    pipeline: keras.Model, variables: Sequence[keras.Variable], axis: Axis
) -> dict[_Key, FullVariable]:
    """Return the variables of all stages, in the order of the full model.

    A collective of the ranks of the pipeline. Variables of the optimizer that all
    stages have, such as the number of iterations, are there once.
    """
    optimizer = getattr(pipeline, "optimizer", None)
    names = pipeline.full_model.layers
    keys = _keys_by_id(pipeline, pipeline.network.layers, names)
    # The states of random layers have no key, and may have equal paths.
    local = {
        keys.get(id(variable), (axis.index, number)): FullVariable.of(variable)
        for number, variable in enumerate(variables)
    }
    weights = {
        keys[id(w)]: _without_variable(FullVariable.of(w))
        for w in _weights_with_slots(optimizer, pipeline.weights)
    }
    stages = [(local, weights)]
    if needs_communication(axis.process_set):
        # Without the variables, which cannot be pickled.
        sent = {key: _without_variable(described) for key, described in local.items()}
        stages = allgather_object(
            (sent, weights), name="StageVariables", process_set=axis.process_set
        )
    merged, all_weights = (
        {key: value for stage in part for key, value in stage.items()}
        for part in zip(*stages, strict=True)
    )
    merged |= local
    if any(map(_is_of_optimizer, merged)):
        numbers = _number_state(optimizer, all_weights)
        merged = dict(sorted(merged.items(), key=lambda item: numbers[item[0]]))
    return merged


def _is_of_optimizer(key: _Key) -> bool:
    owner, number = key
    return owner is None or (isinstance(owner, tuple) and number > 0)


def _without_variable(described: FullVariable) -> FullVariable:
    return dataclasses.replace(described, variable=None)


def _number_state(
    optimizer: keras.optimizers.Optimizer, weights: dict[_Key, FullVariable]
) -> dict[_Key, int]:
    """Return the places of the variables that an optimizer of all `weights` has.

    An optimizer may create two kinds of slots one after the other, or both for each
    weight. An optimizer that is built for small weights has the same order.
    """
    # To build it takes some 0.1 s, before each checkpoint.
    known, numbers = _numbered.get(optimizer, ({}, {}))
    if known != weights or not numbers:
        small = [_make_small(weight) for weight in weights.values()]
        clone = _clone_optimizer(optimizer)
        clone.build(small)
        owners = {id(v): owner for v, (owner, _) in zip(small, weights, strict=True)}
        keys = _state_keys(clone, small, owners).values()
        numbers = {key: number for number, key in enumerate(keys)}
        _numbered[optimizer] = weights, numbers
    return numbers


def _make_small(weight: FullVariable) -> keras.Variable:
    """Return a variable of one element, with the path and the axes of a weight."""
    scope, _, name = weight.path.rpartition("/")
    with in_scope(scope):
        value = keras.ops.zeros([1] * len(weight.shape), weight.dtype)
        return keras.Variable(value, dtype=weight.dtype, name=name)


def gather(pipeline: keras.Model, axis: Axis) -> keras.Model | None:
    """Gather the full model of a `PipelineModel`: see its method `gather_full`."""
    described = _describe_all(pipeline, axis)
    model, targets = None, []
    with fail_together(world()):
        if global_process_set.rank() == 0:
            model = pipeline.full_model.build(pipeline)
            targets = _order(model, described, pipeline.full_model.layers)
    values = FullValues(described.values())
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
    described = _describe_all(pipeline, axis)

    def read() -> list[keras.Variable]:
        model = pipeline.full_model.build(pipeline)
        optimizer = get_inner_optimizer(getattr(model, "optimizer", None))
        if optimizer:
            optimizer._iterations.assign(_NOT_LOADED)
        try:
            model.load_weights(filepath, **options)
        except (OSError, ValueError) as error:
            raise JobError(f"Cannot load {filepath}: {error}") from error
        sources = _order(model, described, pipeline.full_model.layers)
        if optimizer and int(optimizer._iterations) == _NOT_LOADED:
            # Weights come before the optimizer's variables.
            return sources[: len(model.weights)]
        return sources

    sources = on_chief(world(), read)
    count = broadcast_object(sources and len(sources), name="LoadedVariables")
    values = FullValues(described.values())
    for number in range(count):
        values.scatter(number, sources[number].numpy() if sources else None)
    layer_state.refresh(pipeline)


def _describe_all(pipeline: keras.Model, axis: Axis) -> dict[_Key, FullVariable]:
    """Return the variables of the full model and its optimizer."""
    weights = describe(pipeline, pipeline.weights, axis)
    return weights | describe(pipeline, _optimizer_state(pipeline), axis)


def _order(
    model: keras.Model, keys: Iterable[_Key], names: Sequence[str]
) -> list[keras.Variable]:
    """Return the variables of a full model that have these keys."""
    key_by_id = _keys_by_id(model, model.layers, names)
    own = [*model.weights, *_optimizer_state(model)]
    by_key = {key_by_id[id(variable)]: variable for variable in own}
    return [by_key[key] for key in keys]


def _optimizer_state(model: keras.Model) -> list[keras.Variable]:
    optimizer = getattr(model, "optimizer", None)
    return optimizer.variables if optimizer else []


def _weights_with_slots(
    optimizer: keras.optimizers.Optimizer | None, weights: Sequence[keras.Variable]
) -> list[keras.Variable]:
    slots = variables.owned_slots(optimizer, weights) if optimizer else ()
    owners = {id(weight) for _, weight in slots}
    return [weight for weight in weights if id(weight) in owners]


def _keys_by_id(
    model: keras.Model, layers: Sequence[keras.layers.Layer], names: Sequence[str]
) -> dict[int, _Key]:
    """Return keys of the weights and of the optimizer's variables of a model, by `id`.

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
    owners = {
        id(weight): (names.index(layer.name), number)
        for layer in layers
        for number, weight in enumerate(layer.weights)
    }
    keys: dict[int, _Key] = {
        id(weight): (owners[id(weight)], 0) for weight in model.weights
    }
    if _optimizer_state(model):
        keys |= _state_keys(model.optimizer, model.weights, owners)
    return keys


def _state_keys(
    optimizer: keras.optimizers.Optimizer,
    weights: Sequence[keras.Variable],
    owners: Mapping[int, Any],
) -> dict[int, _Key]:
    """Return keys of the variables of an optimizer by `id`, in its order."""
    slots = variables.owned_slots(optimizer, weights)
    owner_by_slot = {id(slot): owners[id(weight)] for slot, weight in slots}
    # The weight itself is the first variable of its owner.
    counts = collections.Counter[Any](owners.values())
    keys = {}
    for variable in optimizer.variables:
        owner = owner_by_slot.get(id(variable))
        keys[id(variable)] = owner, counts[owner]
        counts[owner] += 1
    return keys
