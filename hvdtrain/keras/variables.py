"""The variables of an optimizer, and the optimizers of a model."""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, NoReturn, TypeAlias, TypeVar

import keras
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.dtypes import as_tensorflow, local_shard
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import ProcessSet, global_process_set
from hvdtrain.keras import layer_state
from hvdtrain.keras.seeds import is_seed_state, separate_seeds
from hvdtrain.sharding.shards import (
    get_sharding,
    get_stages,
    has_summed_gradients,
    is_replicated,
    is_split_over_ranks,
    set_sharding,
    set_stages,
)

Variable: TypeAlias = keras.Variable | tf.Variable
Optimizer: TypeAlias = keras.optimizers.Optimizer


def find_optimizers(model: keras.Model) -> list[Optimizer]:
    """Return the compiled optimizer, and distributed ones in attributes of `model`."""
    compiled = getattr(model, "optimizer", None)
    attributes = [
        value
        for value in vars(model).values()
        if isinstance(value, keras.optimizers.Optimizer)
        and value is not compiled
        and is_distributed(value)
    ]
    return [compiled, *attributes] if compiled is not None else attributes


@do_not_convert
def broadcast_variables(
    variables: Iterable[Variable],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Assign `root_rank`'s values to the `variables` of every rank.

    A collective. Variables that are sharded over these ranks keep their values. So do
    the states of random layers such as Dropout, except that equal seeds on several
    ranks are made different: ranks with equal seeds would drop the same units. The
    ranks of a replica of a sharded model need equal seeds, and take those of
    `root_rank`. Call it before a function of your own that calls the model is traced:
    a traced function keeps the constants of a `keras.layers.Normalization`.

    Args:
        variables: the same list on every rank; all of `model.variables`, for example.
        root_rank: the rank whose values are taken.
        process_set: the ranks that take part.
        inplace: write into the variables' memory without a temporary copy.
    """
    variables = list(variables)
    replicated = [v for v in variables if is_replicated(v, process_set)]
    is_separated = not _shares_replica(variables)
    seeds = [v for v in replicated if is_separated and is_seed_state(v)]
    assigned = [v for v in replicated if not (is_separated and is_seed_state(v))]
    ops.broadcast_variables(assigned, root_rank, process_set, inplace)
    if seeds:
        separate_seeds(seeds, process_set)
    if tf.executing_eagerly():
        layer_state.refresh_owners(assigned)


def _shares_replica(variables: Iterable[Variable]) -> bool:
    """Return whether several ranks hold one replica of the model of `variables`."""
    # Each rank is a replica where only optimizer slots, or tables, are sharded.
    weights = [v for v in variables if v.trainable and not has_summed_gradients([v])]
    return is_split_over_ranks(weights)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise a RuntimeError: TensorFlow 2 has no collection of global variables."""
    raise RuntimeError(
        "broadcast_global_variables needs the collection of global variables of "
        "TensorFlow 1. Use hvd.callbacks.BroadcastGlobalVariablesCallback"
        f"({root_rank}) with fit, or in a loop of your own hvd.broadcast_variables"
        f"(model.variables + optimizer.variables, root_rank={root_rank})."
    )


def non_local_state(
    optimizer: Optimizer,
    trainable: Iterable[Variable],
    local_keys: Set[object] = frozenset(),
) -> list[Variable]:
    """Return the variables of `optimizer` that are not local to a rank.

    Slots of local weights are left out, and so are accumulated gradients: until their
    window is complete, each rank has its own. Slots of sharded weights are included:
    see `non_local_variables`.

    Args:
        trainable: the variables that `optimizer` trains.
        local_keys: `variable_key`s of local variables.
    """
    local = {id(accumulator) for accumulator in accumulated_gradients(optimizer)}
    if local_keys:
        for slot, variable in owned_slots(optimizer, trainable):
            if variable_key(variable) in local_keys:
                local.add(id(slot))
    return [v for v in optimizer.variables if id(v) not in local]


def accumulated_gradients(optimizer: Optimizer) -> list[Variable]:
    """Return the variables with the sums of an accumulation window; may be none."""
    return list(getattr(get_inner_optimizer(optimizer), "_accumulated_gradients", ()))


def shard_slots(optimizer: Optimizer, trainable: Sequence[Variable]) -> None:
    """Give the slots of a built optimizer the shardings and stages of their weights."""
    if not is_split_over_ranks(trainable):
        return
    for slot, variable in owned_slots(optimizer, trainable):
        if (stages := get_stages([variable])) is not None:
            set_stages(slot, stages)
        is_unmarked = slot.shape == variable.shape and not get_sharding(slot)
        if is_unmarked and (sharding := get_sharding(variable)):
            set_sharding(slot, sharding)


def owned_slots(
    optimizer: Optimizer, trainable: Iterable[Variable]
) -> Iterator[tuple[Variable, Variable]]:
    """Yield each slot, and the variable that it belongs to."""
    # First by index: a slot is named after its variable's path, which may be another
    # variable's too, and Adafactor's factors have no names that lead to their weights.
    owner_by_id = {
        id(slot): weight
        for base in optimizers_inside(optimizer)
        for _, slot, weight in slots_by_index(base, base._trainable_variables)
    }
    trainable = list(map(local_shard, trainable))
    is_trained = {id(variable) for variable in trainable}
    # Of several paths that fit, the longest is the variable's own: "a/kernel_2" has
    # "a_kernel_2_momentum".
    prefixes = {v.path.replace("/", "_") + "_": v for v in trainable}
    for slot in optimizer.variables:
        owner = owner_by_id.get(id(slot))
        if owner is None:
            fitting = [prefix for prefix in prefixes if slot.name.startswith(prefix)]
            owner = prefixes[max(fitting, key=len)] if fitting else None
        if id(owner) in is_trained:
            yield slot, owner


_Owner = TypeVar("_Owner")


def slots_by_index(
    optimizer: Optimizer, owners: Sequence[_Owner]
) -> Iterator[tuple[str, Variable, _Owner]]:
    """Yield the name of each list of slots, and each slot of it with its owner.

    Args:
        optimizer: one that is built, not a `LossScaleOptimizer`.
        owners: one object for each weight.
    """
    # Keras keeps the slots of one kind in a list, in the order of the weights.
    for name, slots in vars(optimizer).items():
        # Not `_variables`: it lists all slots, and its length may equal the number of
        # weights by chance.
        is_kind = isinstance(slots, list) and name != "_variables"
        if is_kind and len(slots) == len(owners):
            yield from zip([name] * len(slots), slots, owners, strict=True)


def weight_copies(optimizer: Optimizer) -> list[Variable]:
    """Return the slots that start as copies of the weights, in the weights' order.

    Args:
        optimizer: one that is built, not a `LossScaleOptimizer`.
    """
    # Older versions of Keras lack it.
    schedule_free: Any = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
    return optimizer._momentums if isinstance(optimizer, schedule_free) else []


def get_inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a `LossScaleOptimizer`, or `optimizer` itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def is_distributed(optimizer: Optimizer | None) -> bool:
    """Return whether `optimizer` went through `DistributedOptimizer`."""
    return hasattr(get_inner_optimizer(optimizer), "reduction_hook")


def is_multi_optimizer(optimizer: Optimizer) -> bool:
    """Return whether this is a `MultiOptimizer`, which Keras has from 3.15."""
    multi_optimizer: Any = getattr(keras.optimizers, "MultiOptimizer", ())
    return isinstance(get_inner_optimizer(optimizer), multi_optimizer)


def optimizers_inside(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that update weights: those of a `MultiOptimizer`, or one.

    A `MultiOptimizer` with a callable has all of its own only when it is built.
    """
    base = get_inner_optimizer(optimizer)
    return list(base.optimizers) if is_multi_optimizer(base) else [base]


def variable_key(variable: Variable | tf.Tensor) -> object:
    """Return a hashable, equal for a Keras variable and its TensorFlow variable."""
    return as_tensorflow(variable).ref()


def local_variables(
    layers: keras.layers.Layer | Iterable[keras.layers.Layer] | None,
) -> list[keras.Variable]:
    """Return the trainable weights of `layers`, whose gradients stay on their rank.

    Raises:
        ValueError: for an element that is no Keras layer or has not been built.
    """
    if layers is None:
        return []
    layers = [layers] if isinstance(layers, keras.layers.Layer) else list(layers)
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                "local_layers must be of type keras.layers.Layer. Received: "
                f"{layer!r} of type {type(layer).__name__}"
            )
        if not layer.built:
            raise ValueError(
                f"The local layer {layer.name} has not been built: its variables, "
                "which are to stay local, do not exist yet. Build the model first, "
                "with keras.Input or model.build(input_shape)."
            )
    return [variable for layer in layers for variable in layer.trainable_weights]
