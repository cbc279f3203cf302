"""Python objects across ranks, and Horovod's names that only TensorFlow 1 had."""

import horovod.tensorflow as hvd

from hvdtrain.keras.reduction import global_process_set


def broadcast_object(
    obj, root_rank=0, session=None, name=None, process_set=global_process_set
):
    """Returns `root_rank`'s `obj` on every rank.

    Args:
        obj: what cloudpickle takes; looked at on `root_rank` only.
        root_rank: the rank whose object is taken.
        session: TensorFlow 1's; must be None.
        name: names the operation; ranks are matched by it.
        process_set: the ranks that take part.
    """
    _check_no_session(session)
    # Horovod's default is the name of obj's type. Ranks that have None where the
    # root has something would wait for each other for ever.
    name = name or "broadcast_object"
    return hvd.broadcast_object(obj, root_rank, name=name, process_set=process_set)


def allgather_object(obj, session=None, name=None, process_set=global_process_set):
    """Returns the list of all ranks' `obj`, in the order of ranks.

    Args:
        obj: what cloudpickle takes.
        session: TensorFlow 1's; must be None.
        name: names the operation; ranks are matched by it.
        process_set: the ranks that take part.
    """
    _check_no_session(session)
    name = name or "allgather_object"
    return hvd.allgather_object(obj, name=name, process_set=process_set)


def broadcast_global_variables(root_rank):
    """Only makes sense in TensorFlow 1; raises a RuntimeError that says so."""
    raise RuntimeError(
        "broadcast_global_variables needs the collection of global variables of "
        "TensorFlow 1. Use hvd.callbacks.BroadcastGlobalVariablesCallback"
        f"({root_rank}) with fit, or in a loop of your own hvd.broadcast_variables"
        f"(model.weights + optimizer.variables, root_rank={root_rank})."
    )


def broadcast_object_fn(
    root_rank=0, session=None, name=None, process_set=global_process_set
):
    """Only makes sense in TensorFlow 1; raises a RuntimeError that says so."""
    raise RuntimeError(
        "broadcast_object_fn builds a graph of TensorFlow 1. Use "
        f"hvd.broadcast_object(obj, root_rank={root_rank})."
    )


def _check_no_session(session):
    if session is not None:
        raise ValueError(
            "session belongs to TensorFlow 1. Leave it out. Received: "
            f"session={session!r}"
        )
