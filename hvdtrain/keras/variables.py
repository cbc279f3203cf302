"""Which variables of a model and its optimizer are equal on all ranks."""

from hvdtrain.collectives import ops
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.keras.optimizer_state import shared_state, variable_key
from hvdtrain.keras.partition import is_copied
from hvdtrain.keras.ranks import local_keys_of


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
