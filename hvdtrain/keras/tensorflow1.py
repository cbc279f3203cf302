"""Names of Horovod that exist in TensorFlow 1 only."""

from hvdtrain.collectives.process_sets import global_process_set


def broadcast_global_variables(root_rank):
    """Raises a RuntimeError: TensorFlow 2 has no collection of global variables."""
    raise RuntimeError(
        "broadcast_global_variables needs the collection of global variables of "
        "TensorFlow 1. Use hvd.callbacks.BroadcastGlobalVariablesCallback"
        f"({root_rank}) with fit, or in a loop of your own hvd.broadcast_variables"
        f"(model.weights + optimizer.variables, root_rank={root_rank})."
    )


def broadcast_object_fn(
    root_rank=0, session=None, name=None, process_set=global_process_set
):
    """Raises a RuntimeError: it builds a graph of TensorFlow 1."""
    raise RuntimeError(
        "broadcast_object_fn builds a graph of TensorFlow 1. Use "
        f"hvd.broadcast_object(obj, root_rank={root_rank})."
    )
