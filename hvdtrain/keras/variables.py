"""Which variables of a model and its optimizer are equal on all ranks."""

import keras

from hvdtrain.collectives import ops
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.keras.optimizer_state import hook_of, shared_state, variable_key
from hvdtrain.keras.partition import is_copied


def optimizers_of(model):
    """The compiled optimizer, and distributed ones that are attributes of `model`."""
    compiled = getattr(model, "optimizer", None)
    beside = [
        value
        for value in vars(model).values()
        if isinstance(value, keras.optimizers.Optimizer)
        and value is not compiled
        and hook_of(value) is not None
    ]
    return [compiled, *beside] if compiled is not None else beside


def process_set_of(optimizer):
    """The ranks over which gradients are reduced; by default all.

    Of a `parallel.Mesh`, those along its axis data.
    """
    hook = hook_of(optimizer)
    return hook.reducer.process_set if hook else global_process_set


def all_ranks_of(optimizer):
    """The ranks that train with `optimizer`: all of a mesh, else `process_set_of`."""
    hook = hook_of(optimizer)
    return hook.all_ranks if hook else global_process_set


def local_keys_of(optimizer):
    """The `variable_key`s of the variables that were registered as local."""
    hook = hook_of(optimizer)
    return hook.reducer.local_keys if hook else frozenset()


def copies_of(optimizer, variables, root_rank=None):
    """Yields process sets, and which of some variables are equal over their ranks.

    Of a mesh, the ranks along each axis: after a broadcast over all of them, all
    copies of a variable are those of the root. The stages of a pipeline have copies of
    the optimizer's variables that belong to no weight, such as the learning rate.

    Args:
        optimizer: an optimizer, distributed or not.
        variables: list of variables of this rank.
        root_rank: the rank whose values are meant; by default the first.

    Yields:
        Process set, root rank in it, list of variables.
    """
    hook = hook_of(optimizer)
    for process_set, root in hook.axes(root_rank) if hook else ():
        copies = [v for v in variables if is_copied(v, process_set)]
        yield process_set, root, copies
    if not hook:
        yield global_process_set, root_rank or 0, list(variables)


def shared_variables(model, *, optimizer=None, local_keys=frozenset()):
    """Returns the weights and the optimizer's variables that are equal on all ranks.

    Without local weights and their slots in the optimizer, and without accumulated
    gradients. Slices of divided weights and their slots are among them, although ranks
    have different ones: `partition.is_copied` leaves them out, by process set.

    Args:
        model: a model that is built, compiled or not.
        optimizer: by default the one that the model was compiled with.
        local_keys: set of `variable_key(variable)` of local variables,
            in addition to those registered with the optimizer.
    """
    # A model that was never compiled has no such attribute.
    optimizer = optimizer or getattr(model, "optimizer", None)
    local_keys = local_keys | local_keys_of(optimizer)
    weights = [w for w in model.weights if variable_key(w) not in local_keys]
    if optimizer is None:
        return weights
    return weights + shared_state(optimizer, model.trainable_variables, local_keys)


@do_not_convert
def broadcast_variables(
    variables, root_rank, process_set=global_process_set, inplace=False
):
    """Assigns `root_rank`'s values to the `variables` of every rank.

    Variables of which these ranks hold different slices keep them.

    Args:
        variables: Keras or TensorFlow variables, the same list on every rank.
        root_rank: the rank whose values are taken.
        process_set: the ranks that take part.
        inplace: write into the variables' memory without a temporary copy.
    """
    copied = [v for v in variables if is_copied(v, process_set)]
    ops.broadcast_variables(copied, root_rank, process_set, inplace)
