"""Python objects across ranks."""

import cloudpickle

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import check_root, global_process_set


def broadcast_object(
    obj, root_rank=0, session=None, name=None, process_set=global_process_set
):
    """Returns `root_rank`'s `obj` on every rank.

    Args:
        obj: what cloudpickle accepts; used on `root_rank` only.
        root_rank: the rank whose object is taken.
        session: TensorFlow 1's; must be None.
        name: name of the operation. Ranks are matched by it inside a `tf.function`,
            and by the order of their calls outside.
        process_set: the ranks that take part.
    """
    _check_no_session(session)
    name = name or "broadcast_object"
    check_root(root_rank, process_set)
    is_root = process_set.rank() == list(process_set.ranks).index(root_rank)
    data = cloudpickle.dumps(obj) if is_root else b""
    return cloudpickle.loads(
        b"".join(transport.allgather_bytes(data, name=name, process_set=process_set))
    )


def allgather_object(obj, session=None, name=None, process_set=global_process_set):
    """Returns the list of all ranks' `obj`, in the order of ranks.

    Args:
        obj: what cloudpickle accepts.
        session: TensorFlow 1's; must be None.
        name: name of the operation. Ranks are matched by it inside a `tf.function`,
            and by the order of their calls outside.
        process_set: the ranks that take part.
    """
    _check_no_session(session)
    gathered = transport.allgather_bytes(
        cloudpickle.dumps(obj),
        name=name or "allgather_object",
        process_set=process_set,
    )
    return [cloudpickle.loads(data) for data in gathered]


def _check_no_session(session):
    if session is not None:
        raise ValueError(
            "session belongs to TensorFlow 1. Leave it out. Received: "
            f"session={session!r}"
        )
