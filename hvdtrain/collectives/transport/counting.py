"""Bytes that this rank sends to others in collectives, counted while they run.

Of n ranks, one that gives B bytes to a collective sends, where all ranks together send
as little as an algorithm can (Patarasuk and Yuan, 2009, for the allreduce):

    allreduce        2 (n-1)/n B    as in a ring
    reducescatter    (n-1)/n B
    allgather        (n-1) B        to each of the others; so do sparse gradients
    alltoall         B without the rows that stay on the rank
    broadcast        (n-1) B        on the root, 0 on the others

B is that of the tensors, after compression, with their shapes in this call; what
compares and negotiates is not in it. Horovod, MPI and shared memory may move more.
"""

import contextlib
import contextvars

import tensorflow as tf

from hvdtrain.collectives.process_sets import rank_in, size_of

_active = contextvars.ContextVar("active counter", default=None)


class ByteCounter:
    """The bytes that this rank has sent; see the module."""

    def __init__(self):
        with tf.device("CPU"):
            self._sent = tf.Variable(0, trainable=False, dtype=tf.int64)

    @property
    def bytes(self):
        """The count, an int."""
        return int(self._sent)

    def add(self, count):
        """Add a scalar, int64; return what the exchange must depend on."""
        return self._sent.assign_add(count)


@contextlib.contextmanager
def count_bytes():
    """Count the bytes of collectives that are called in the block.

    A function that is traced in the block counts in all its calls, also after it; one
    that was traced before counts nothing. Without a block, nothing is added to a graph.

    Yields:
        A `ByteCounter`.
    """
    counter = ByteCounter()
    before = _active.set(counter)
    try:
        yield counter
    finally:
        _active.reset(before)


def counted(exchange, sent):
    """Return `exchange` with the addition of `sent()` to the active counter, if any.

    Args:
        exchange: creates the operations of one collective.
        sent: returns its bytes, a scalar of int64.
    """
    counter = _active.get()
    if counter is None:
        return exchange

    def both():
        with tf.control_dependencies([counter.add(sent())]):
            return exchange()

    return both


def of_allreduce(values, process_set):
    """Return the bytes of tensors and `tf.IndexedSlices` that are reduced."""
    slices = [value for value in values if isinstance(value, tf.IndexedSlices)]
    dense = [value for value in values if not isinstance(value, tf.IndexedSlices)]
    parts = [part for each in slices for part in (each.values, each.indices)]
    return 2 * of_reducescatter(dense, process_set) + of_allgather(parts, process_set)


def of_reducescatter(tensors, process_set):
    """Return the bytes of tensors of which each rank receives its share of the sum."""
    ranks = size_of(process_set, tf.int64)
    return (ranks - 1) * _bytes(tensors) // ranks


def of_allgather(tensors, process_set):
    """Return the bytes of tensors that all other ranks receive."""
    return (size_of(process_set, tf.int64) - 1) * _bytes(tensors)


def of_alltoall(tensor, splits, process_set):
    """Return the bytes of the rows that go to other ranks."""
    splits = tf.cast(splits, tf.int64)
    if splits.shape.num_elements() == 0:
        # Horovod's for equal ones.
        return of_reducescatter([tensor], process_set)
    rows = tf.reduce_sum(splits) - splits[rank_in(process_set)]
    row = tf.reduce_prod(tf.shape(tensor, out_type=tf.int64)[1:])
    return rows * row * tensor.dtype.size


def of_broadcast(tensors, root_rank, process_set):
    """Return the bytes that the root sends, and 0 on the other ranks."""
    is_root = process_set.ranks[process_set.rank()] == root_rank
    return of_allgather(tensors, process_set) if is_root else tf.constant(0, tf.int64)


def _bytes(tensors):
    sizes = [tf.size(each, tf.int64) * each.dtype.size for each in tensors]
    return tf.add_n(sizes) if sizes else tf.constant(0, tf.int64)
