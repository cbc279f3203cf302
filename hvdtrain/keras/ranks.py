"""The optimizers of a model, their ranks, and which ranks hold equal variables."""

import keras

from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.keras.optimizer_state import hook_of
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
