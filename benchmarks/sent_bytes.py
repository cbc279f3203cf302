"""Bytes that this rank sends to others in collectives, counted while they run.

Of n ranks, one that gives B bytes to a collective sends, where all ranks together send
as little as an algorithm can (Patarasuk and Yuan, 2009, for the allreduce):

    allreduce        2 (n-1)/n B    as in a ring
    reducescatter    (n-1)/n B
    allgather        (n-1) B        to each of the others; so do sparse gradients
    alltoall         B without the rows that stay on the rank
    broadcast        (n-1) B        on the root, 0 on the others

B counts the tensors after compression, with their shapes in this call; comparisons of
the ranks and negotiation are left out. Horovod, MPI and shared memory may move more.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from hvdtrain.collectives import dtypes, transport
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    rank_in,
    size_of,
)
from hvdtrain.collectives.transport import Reduction, moving, native_reduction


class ByteCounter:
    """The bytes that this rank has sent; see the module."""

    def __init__(self) -> None:
        with tf.device("CPU"):
            self._sent = tf.Variable(0, trainable=False, dtype=tf.int64)

    @property
    def bytes(self) -> int:
        return int(self._sent)

    def add(self, count: tf.Tensor) -> tf.Tensor:
        """Add a scalar, int64; return what the exchange must depend on."""
        return self._sent.assign_add(count)


@contextlib.contextmanager
def count_bytes() -> Iterator[ByteCounter]:
    """Count the bytes of collectives that are called in the block.

    The functions of the transport that exchange tensors are replaced until the block
    ends. A function that is traced in the block counts in all its calls, also after
    it; one that was traced before counts nothing.
    """
    counter = ByteCounter()
    with contextlib.ExitStack() as stack:
        for function, sent_bytes in _SENT_BYTES.items():
            counted = _count_calls(function, sent_bytes, counter)
            for module in _modules_with(function):
                setattr(module, function.__name__, counted)
                stack.callback(setattr, module, function.__name__, function)
        yield counter


def _modules_with(function: Callable) -> list:
    # The package's own modules have imported it as well.
    return [
        module
        for name, module in sys.modules.items()
        if name.startswith(transport.__name__)
        and vars(module).get(function.__name__) is function
    ]


def _count_calls(
    function: Callable, sent_bytes: Callable[..., tf.Tensor], counter: ByteCounter
) -> Callable:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def counted(*args: object, **kwargs: object) -> object:
        arguments = signature.bind(*args, **kwargs).arguments
        # The exchange depends on the addition: a backward function, which may have no
        # automatic control dependencies, would prune it.
        with tf.control_dependencies([counter.add(sent_bytes(**arguments))]):
            return function(*args, **kwargs)

    return counted


def _allreduce(values: Sequence, reduction: Reduction, **_: object) -> tf.Tensor:
    dense, gathered = [], []
    for value in map(dtypes.as_tensorflow, values):
        if isinstance(value, tf.IndexedSlices):
            gathered += [value.values, value.indices]
        else:
            dense.append(reduction.compression.compress(tf.convert_to_tensor(value))[0])
    process_set = reduction.process_set
    return 2 * _reducescatter(dense, reduction) + _allgather(gathered, process_set)


def _reducescatter(
    tensors: Sequence[tf.Tensor], reduction: Reduction, **_: object
) -> tf.Tensor:
    return _shares(tensors, reduction.process_set)


def _allgather(
    values: Sequence, process_set: ProcessSet = global_process_set, **_: object
) -> tf.Tensor:
    return (size_of(process_set, tf.int64) - 1) * _bytes(dtypes.as_tensors(values))


def _allgather_natively(shards: Sequence[tf.Tensor], **_: object) -> tf.Tensor:
    return _allgather(shards)


def _alltoall(
    tensor: tf.Tensor,
    splits: tf.Tensor,
    process_set: ProcessSet = global_process_set,
    **_: object,
) -> tf.Tensor:
    splits = tf.cast(splits, tf.int64)
    # Horovod takes no splits for equal ones.
    if splits.shape.num_elements() == 0:
        return _shares([tensor], process_set)
    rows = tf.reduce_sum(splits) - splits[rank_in(process_set)]
    row = tf.reduce_prod(tf.shape(tensor, out_type=tf.int64)[1:])
    return rows * row * tensor.dtype.size


def _broadcast(value: object, root_rank: int, **options: ProcessSet) -> tf.Tensor:
    return _broadcast_all([value], root_rank, **options)


def _broadcast_all(
    values: Sequence,
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    **_: object,
) -> tf.Tensor:
    is_root = process_set.ranks[process_set.rank()] == root_rank
    return _allgather(values, process_set) if is_root else tf.constant(0, tf.int64)


def _broadcast_in_place(
    variables: Sequence, root_rank: int, **options: ProcessSet
) -> tf.Tensor:
    return _broadcast_all(variables, root_rank, **options)


def _shares(tensors: Sequence[tf.Tensor], process_set: ProcessSet) -> tf.Tensor:
    ranks = size_of(process_set, tf.int64)
    return (ranks - 1) * _bytes(tensors) // ranks


def _bytes(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    sizes = [tf.size(tensor, tf.int64) * tensor.dtype.size for tensor in tensors]
    return tf.add_n(sizes) if sizes else tf.constant(0, tf.int64)


# By function of the transport, one with the same arguments that returns the bytes.
_SENT_BYTES: dict[Callable, Callable[..., tf.Tensor]] = {
    transport.allreduce: _allreduce,
    moving.allgather: _allgather,
    transport.alltoall: _alltoall,
    moving.broadcast: _broadcast,
    moving.broadcast_all: _broadcast_all,
    moving.broadcast_in_place: _broadcast_in_place,
    moving.reduce_rows: _reducescatter,
    native_reduction.allgather: _allgather_natively,
    native_reduction.reducescatter: _reducescatter,
}
