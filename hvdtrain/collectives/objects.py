"""Python objects across ranks, and which ranks hold equal ones."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
import tensorflow as tf

from hvdtrain.collectives import pickles, transport
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    check_root,
    global_process_set,
)
from hvdtrain.output import name_ranks

T = TypeVar("T")


class RanksOfValue(NamedTuple, Generic[T]):
    """A value, and the ranks that hold one equal to it, in ascending order."""

    value: T
    ranks: list[int]


def broadcast_object(
    obj: object,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return `root_rank`'s `obj` on every rank. A collective.

    Args:
        obj: an object that cloudpickle accepts; used on `root_rank` only.
        root_rank: the rank whose object is taken.
        session: TensorFlow 1's; must be None.
        name: name of the operation. Ranks are matched by it inside a `tf.function`,
            and by the order of their calls outside.
        process_set: the ranks that take part.

    Raises:
        pickle.PicklingError: on every rank, if the object cannot be pickled.
        RuntimeError: the object is not signed with the secret of the job.
    """
    _check_no_session(session)
    name = name or "broadcast_object"
    check_root(root_rank, process_set)
    data = b""
    if process_set.rank() == list(process_set.ranks).index(root_rank):
        operation = "broadcast_object"
        data, _ = pickles.dumps(obj, sender=process_set.rank(), operation=operation)
    received = transport.allgather_bytes(data, name=name, process_set=process_set)
    [obj] = _load_all(received, "broadcast_object")
    return obj


def broadcast_object_fn(
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> NoReturn:
    """Raise a RuntimeError: the function of Horovod builds a graph of TensorFlow 1."""
    raise RuntimeError(
        "broadcast_object_fn builds a graph of TensorFlow 1. Use "
        f"hvd.broadcast_object(obj, root_rank={root_rank})."
    )


def allgather_object(
    obj: T,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Return all ranks' `obj`, in the order of ranks. A collective.

    `broadcast_object` describes the arguments and the errors.
    """
    _check_no_session(session)
    operation = "allgather_object"
    data, _ = pickles.dumps(obj, sender=process_set.rank(), operation=operation)
    gathered = transport.allgather_bytes(
        data, name=name or operation, process_set=process_set
    )
    return _load_all(gathered, operation)


def gather_object(obj: T, *, name: str) -> list[T] | None:
    """Return all ranks' `obj` on rank 0, and None on the others. A collective.

    It saves the memory and the traffic of `allgather_object`.
    """
    size, rank = global_process_set.size(), global_process_set.rank()
    data, is_pickled = pickles.dumps(obj, sender=rank, operation="gather_object")
    # A failure is raised on all ranks.
    sent = [data] + [b"" if is_pickled else data] * (size - 1)
    objs = _load_all(_exchange(sent, name=name), "gather_object")
    return objs if rank == 0 else None


def scatter_object(objs: Sequence[T], *, name: str) -> T:
    """Return item `r` of rank 0's `objs` on each rank `r`. A collective."""
    size, rank = global_process_set.size(), global_process_set.rank()
    sent = [b""] * size
    if rank == 0:
        dumped = [
            pickles.dumps(obj, sender=0, operation="scatter_object") for obj in objs
        ]
        sent = [data for data, _ in dumped]
        failures = [data for data, is_pickled in dumped if not is_pickled]
        if failures:
            sent = failures[:1] * size
    return _load_all(_exchange(sent, name=name), "scatter_object")[0]


def group_by_value(
    values_by_rank: Sequence[T],
    ranks: Iterable[int] | None = None,
    *,
    key: Callable[[T], object] = lambda value: value,
) -> list[RanksOfValue[T]]:
    """Return the distinct values, in the order of the lowest rank that holds each.

    Args:
        values_by_rank: values that can be compared; they need not be hashable.
        ranks: the rank of each value; by default 0, 1, and so on.
        key: returns what is compared of a value.
    """
    groups: list[RanksOfValue[T]] = []
    ranks = range(len(values_by_rank)) if ranks is None else ranks
    for rank, value in zip(ranks, values_by_rank, strict=True):
        for group in groups:
            if key(group.value) == key(value):
                group.ranks.append(rank)
                break
        else:
            groups.append(RanksOfValue(value, [rank]))
    return groups


def name_values(
    groups: Iterable[RanksOfValue[T]], show: Callable[[T], object] = str
) -> str:
    """Return which ranks hold which value, as in "3 on rank 0 and 4 on rank 1"."""
    return " and ".join(
        f"{show(group.value)} on {name_ranks(group.ranks)}" for group in groups
    )


def exchange_arrays(
    arrays: Sequence[np.ndarray], splits: Sequence[int], *, name: str
) -> list[np.ndarray]:
    """Send rows to each rank; return the rows from each rank. A collective.

    The concatenated `arrays` are the rows for all ranks, in the order of ranks, and
    `splits` has the number of rows for each.
    """
    received, counts = transport.alltoall(
        tf.constant(np.concatenate(arrays)), tf.constant(splits, tf.int32), name=name
    )
    return np.split(received.numpy(), np.cumsum(counts.numpy())[:-1])


def _exchange(sent: list[bytes], *, name: str) -> list[bytes]:
    """Send item `r` to each rank `r`; return what each rank has sent to this one."""
    # Words of eight bytes, since MPI counts in 32 bits.
    words = [np.frombuffer(data, np.int64) for data in sent]
    received = exchange_arrays(words, list(map(len, words)), name=name)
    return [array.tobytes() for array in received]


def _load_all(data_by_rank: Sequence[bytes], operation: str) -> list[Any]:
    """Return the objects of the ranks that have sent one to this rank."""
    return [
        pickles.loads(data, sender=sender, operation=operation)
        for sender, data in enumerate(data_by_rank)
        if data
    ]


def _check_no_session(session: None) -> None:
    if session is not None:
        raise ValueError(
            "session belongs to TensorFlow 1. Leave it out. Received: "
            f"session={session!r}"
        )
