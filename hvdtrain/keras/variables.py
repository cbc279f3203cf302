"""Which variables of a model and its optimizer all ranks share."""

from hvdtrain.keras.gradients import variable_key
from hvdtrain.keras.learning_rates import without_loss_scale
from hvdtrain.keras.optimizer import local_keys_of


def replicated_variables(model, *, optimizer=None, local_keys=frozenset()):
    """The weights of `model` and its optimizer's variables that are equal on all ranks.

    Without local weights and their slots in the optimizer; and without accumulated
    gradients, which are each rank's own until their window is complete.

    Args:
        model: a model that is built, compiled or not.
        optimizer: by default the one that the model was compiled with.
        local_keys: set of `gradients.variable_key(variable)` of local variables,
            beside those that the optimizer knows.
    """
    # A model that was never compiled has no such attribute.
    optimizer = optimizer or getattr(model, "optimizer", None)
    local_keys = local_keys | local_keys_of(optimizer)
    weights = [w for w in model.weights if variable_key(w) not in local_keys]
    if optimizer is None:
        return weights
    local = [w for w in model.weights if variable_key(w) in local_keys]
    own = _slots(optimizer, local, model.trainable_variables) | _accumulated(optimizer)
    return weights + [v for v in optimizer.variables if id(v) not in own]


def _accumulated(optimizer):
    accumulators = getattr(without_loss_scale(optimizer), "_accumulated_gradients", ())
    return {id(accumulator) for accumulator in accumulators}


def _slots(optimizer, local, trainable):
    # Keras names a slot after its variable's path. Of several paths that fit, the
    # longest is the variable's own: "a/kernel_2" has "a_kernel_2_momentum".
    local = {id(v) for v in local} & {id(v) for v in trainable}
    if not local:
        return set()
    prefixes = {v.path.replace("/", "_") + "_": v for v in trainable}
    slots = set()
    for slot in optimizer.variables:
        owners = [prefix for prefix in prefixes if slot.name.startswith(prefix)]
        if owners and id(prefixes[max(owners, key=len)]) in local:
            slots.add(id(slot))
    return slots
