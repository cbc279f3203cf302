"""Which ranks train a model, and which of its variables are equal on them."""

from collections.abc import Iterable, Iterator, Set

import keras

from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    needs_communication,
)
from hvdtrain.keras.hook import ReductionHook
from hvdtrain.keras.variables import (
    Optimizer,
    Variable,
    get_inner_optimizer,
    non_local_state,
    variable_key,
)
from hvdtrain.sharding.shards import is_replicated


def get_hook(optimizer: Optimizer | None) -> ReductionHook | None:
    """Return the hook of a distributed optimizer, or None."""
    return getattr(get_inner_optimizer(optimizer), "reduction_hook", None)


def get_process_set(optimizer: Optimizer | None) -> ProcessSet:
    """Return the ranks over which gradients are reduced; by default all.

    With a `parallel.Mesh` these are the ranks along its axis data.
    """
    hook = get_hook(optimizer)
    return hook.reducer.process_set if hook else global_process_set


def get_training_ranks(optimizer: Optimizer | None) -> ProcessSet:
    """Return the ranks that train: all of the optimizer's mesh, if it has one."""
    hook = get_hook(optimizer)
    return hook.all_ranks if hook else global_process_set


def get_local_keys(optimizer: Optimizer | None) -> Set[object]:
    """Return the `variable_key`s of variables that were registered as local."""
    hook = get_hook(optimizer)
    return hook.reducer.local_keys if hook else frozenset()


def replicated_by_process_set(
    optimizer: Optimizer | None,
    variables: Iterable[Variable],
    root_rank: int | None = None,
) -> Iterator[tuple[ProcessSet, int, list[Variable]]]:
    """Yield process sets, the root rank in each, and the variables it replicates.

    Process sets of one rank are left out: Horovod has none for an axis of one rank.
    With a mesh, the process sets are the ranks along each axis: broadcasts over all of
    them, in this order, give all replicas of a variable the value of `root_rank` (by
    default the first rank). The stages of a pipeline replicate the optimizer's
    variables that belong to no weight, such as the learning rate.
    """
    hook = get_hook(optimizer)
    variables = list(variables)
    axes = hook.axes(root_rank) if hook else [(global_process_set, root_rank or 0)]
    for process_set, root in axes:
        if needs_communication(process_set):
            replicated = [v for v in variables if is_replicated(v, process_set)]
            yield process_set, root, replicated if hook else variables


def non_local_variables(
    model: keras.Model,
    *,
    optimizer: Optimizer | None = None,
    local_keys: Set[object] = frozenset(),
) -> list[Variable]:
    """Return the weights and the optimizer's variables that are not local to a rank.

    Local weights are left out with their slots, and so are accumulated gradients.
    Sharded weights and their slots are included although they differ by rank: filter
    with `sharding.is_replicated`, for each process set.

    Args:
        model: a model that is built, compiled or not.
        optimizer: by default the one that the model was compiled with.
        local_keys: `variable_key`s of local variables, in addition to those
            registered with the optimizer.
    """
    # A model that was never compiled has no such attribute.
    optimizer = optimizer or getattr(model, "optimizer", None)
    local_keys = local_keys | get_local_keys(optimizer)
    weights = [w for w in model.weights if variable_key(w) not in local_keys]
    if optimizer is None:
        return weights
    return weights + non_local_state(optimizer, model.trainable_variables, local_keys)


def finalize_weights(model: keras.Model) -> None:
    """Assign the moving averages of the weights, if the optimizer has them (`use_ema`).

    As Keras' `fit` does at its end, which the flight recorder counts. The optimizer is
    distributed.
    """
    hook = get_hook(model.optimizer)
    assert hook
    hook.finalize(model.trainable_variables)
