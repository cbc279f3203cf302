"""Which variables of a model and its optimizer are equal on all ranks."""

from collections.abc import Iterator

import keras

from hvdtrain.collectives import ops
from hvdtrain.collectives.dtypes import as_tensorflow
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.sharding.shards import (
    get_sharding,
    get_stages,
    is_replicated,
    is_split_over_ranks,
    set_sharding,
    set_stages,
)


def find_optimizers(model):
    """The compiled optimizer, and distributed ones that are attributes of `model`."""
    compiled = getattr(model, "optimizer", None)
    beside = [
        value
        for value in vars(model).values()
        if isinstance(value, keras.optimizers.Optimizer)
        and value is not compiled
        and get_hook(value) is not None
    ]
    return [compiled, *beside] if compiled is not None else beside


def get_process_set(optimizer):
    """The ranks over which gradients are reduced; by default all.

    Of a `parallel.Mesh`, those along its axis data.
    """
    hook = get_hook(optimizer)
    return hook.reducer.process_set if hook else global_process_set


def get_training_ranks(optimizer):
    """The ranks that train with `optimizer`: all of a mesh, else `get_process_set`."""
    hook = get_hook(optimizer)
    return hook.all_ranks if hook else global_process_set


def get_local_keys(optimizer):
    """The `variable_key`s of the variables that were registered as local."""
    hook = get_hook(optimizer)
    return hook.reducer.local_keys if hook else frozenset()


def replicated_by_process_set(optimizer, variables, root_rank=None):
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
    hook = get_hook(optimizer)
    for process_set, root in hook.axes(root_rank) if hook else ():
        copies = [v for v in variables if is_replicated(v, process_set)]
        yield process_set, root, copies
    if not hook:
        yield global_process_set, root_rank or 0, list(variables)


def non_local_variables(model, *, optimizer=None, local_keys=frozenset()):
    """Returns the weights and the optimizer's variables that are equal on all ranks.

    Without local weights and their slots in the optimizer, and without accumulated
    gradients. Slices of divided weights and their slots are among them, although ranks
    have different ones: `sharding.is_replicated` leaves them out, by process set.

    Args:
        model: a model that is built, compiled or not.
        optimizer: by default the one that the model was compiled with.
        local_keys: set of `variable_key(variable)` of local variables,
            in addition to those registered with the optimizer.
    """
    # A model that was never compiled has no such attribute.
    optimizer = optimizer or getattr(model, "optimizer", None)
    local_keys = local_keys | get_local_keys(optimizer)
    weights = [w for w in model.weights if variable_key(w) not in local_keys]
    if optimizer is None:
        return weights
    return weights + non_local_state(optimizer, model.trainable_variables, local_keys)


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
    copied = [v for v in variables if is_replicated(v, process_set)]
    ops.broadcast_variables(copied, root_rank, process_set, inplace)


# By the names of optimizers, which older versions of Keras lack.
_COPIES = {"ScheduleFreeAdamW": "_momentums"}


def non_local_state(optimizer, trainable, local_keys=frozenset()):
    """Returns the variables of `optimizer` that are equal on all ranks.

    Without the slots of local weights. Accumulated gradients are left out as well:
    until their window is complete, each rank has its own. Slots of divided weights are
    among them, although ranks have different slices: see `sharding.is_replicated`.

    Args:
        optimizer: a Keras optimizer, built or not.
        trainable: list of the variables that it trains.
        local_keys: set of `variable_key(variable)` of local variables.
    """
    own = _slots(optimizer, trainable, local_keys)
    own |= {id(accumulator) for accumulator in accumulated_gradients(optimizer)}
    return [v for v in optimizer.variables if id(v) not in own]


def common_state(optimizer, trained):
    """Returns the variables of `optimizer` that belong to none of some variables.

    Such as the number of iterations. Their order is that of all models, in which
    their names may differ: Keras numbers the product of Nadam as any variable.
    """
    slots = {id(slot) for slot, _ in owned_slots(optimizer, trained)}
    return [variable for variable in optimizer.variables if id(variable) not in slots]


def accumulated_gradients(optimizer):
    """Returns the variables with the sums of an accumulation window; may be none."""
    return list(getattr(get_inner_optimizer(optimizer), "_accumulated_gradients", ()))


def shard_slots(optimizer, trainable):
    """Gives the slots of divided variables the shardings of these, and the stages.

    Args:
        optimizer: a Keras optimizer that is built.
        trainable: list of the variables that it trains.
    """
    if not is_split_over_ranks(trainable):
        return
    for slot, variable in owned_slots(optimizer, trainable):
        if (stages := get_stages([variable])) is not None:
            set_stages(slot, stages)
        is_full = slot.shape == variable.shape and not get_sharding(slot)
        if is_full and get_sharding(variable):
            set_sharding(slot, get_sharding(variable))


def _slots(optimizer, trainable, local_keys):
    if not any(variable_key(v) in local_keys for v in trainable):
        return set()
    return {
        id(slot)
        for slot, variable in owned_slots(optimizer, trainable)
        if variable_key(variable) in local_keys
    }


def owned_slots(optimizer, trainable):
    """Yields each slot, and the variable that it belongs to."""
    # Keras names a slot after its variable's path, which may be another variable's too.
    by_place = _owners_by_place(optimizer)
    is_trained = {id(variable) for variable in trainable}
    # Of several paths that fit, the longest is the variable's own: "a/kernel_2" has
    # "a_kernel_2_momentum".
    prefixes = {v.path.replace("/", "_") + "_": v for v in trainable}
    for slot in optimizer.variables:
        owner = by_place.get(id(slot))
        if owner is None:
            fitting = [prefix for prefix in prefixes if slot.name.startswith(prefix)]
            owner = prefixes[max(fitting, key=len)] if fitting else None
        if id(owner) in is_trained:
            yield slot, owner


def _owners_by_place(optimizer: keras.optimizers.Optimizer) -> dict:
    """Returns the weight of each slot that is in a list of slots, by its identity.

    The factors of Adafactor have no names by which their weights could be found.
    """
    base = get_inner_optimizer(optimizer)
    placed = slots_by_index(base, base._trainable_variables)
    return {id(slot): weight for _, slot, weight in placed}


def slots_by_index(
    optimizer: keras.optimizers.Optimizer, owners: list
) -> Iterator[tuple]:
    """Yields the name of each list of slots, and each slot of it with its owner.

    Args:
        optimizer: one that is built, not a `LossScaleOptimizer`.
        owners: list of one object for each weight.
    """
    # Keras keeps the slots of one kind in a list, in the order of the weights.
    for name, slots in vars(optimizer).items():
        # _variables has all of them, which may be as many.
        is_kind = isinstance(slots, list) and name != "_variables"
        if is_kind and len(slots) == len(owners):
            yield from zip([name] * len(slots), slots, owners, strict=True)


def weight_copies(optimizer: keras.optimizers.Optimizer) -> list:
    """Returns the slots that start as copies of the weights, in the weights' order.

    Args:
        optimizer: one that is built, not a `LossScaleOptimizer`.
    """
    for name, attribute in _COPIES.items():
        if isinstance(optimizer, getattr(keras.optimizers, name, ())):
            return getattr(optimizer, attribute)
    return []


def get_inner_optimizer(optimizer):
    """The optimizer inside a `LossScaleOptimizer`, or `optimizer` itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def get_hook(optimizer):
    """Returns the `ReductionHook` of `optimizer`, or None."""
    return getattr(get_inner_optimizer(optimizer), "reduction_hook", None)


def variable_key(variable):
    """Returns a hashable, equal for a Keras variable and its TensorFlow variable."""
    return as_tensorflow(variable).ref()


def local_variables(layers):
    """Return the trainable weights of `layers`, whose gradients stay on their rank.

    Args:
        layers: a built Keras layer, a collection of them, or None for none.

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
