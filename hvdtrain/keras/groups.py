"""One group of tensors of one dtype, which Horovod negotiates and moves together.

The tensors agree on all ranks in number, position and shape. Results come in the order
of the tensors.
"""

import os

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.keras import wire

Average, Sum = hvd.Average, hvd.Sum


def is_elastic():
    """Whether the job may lose and gain ranks."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def gather(tensors, name, process_set):
    """Concatenates each tensor's rows over the ranks of `process_set`."""
    first, *others = tensors
    return mpi_ops.grouped_allgather(
        [wire.not_folded(first), *others, *_guard(tensors, free_axes=1)],
        name=name,
        process_set=process_set,
        ignore_name_scope=True,
    )[: len(tensors)]


def reduce(tensors, name, op, process_set, scale):
    """Reduces each tensor; `scale` holds Horovod's two factors by their names."""
    wire.check_reducible(tensors[0])
    guard = _guard(tensors)
    # Only the global set can be joined.
    is_global = process_set.process_set_id == 0
    if op == Average and is_global and tensors[0].dtype.is_floating:
        return _mean_of_those_present(tensors, guard, name, process_set, **scale)
    reduced = _allreduce([*tensors, *guard], name, op, process_set, **scale)
    return reduced[: len(tensors)]


def _mean_of_those_present(
    tensors, guard, name, process_set, *, prescale_factor, postscale_factor
):
    # A rank that has joined adds nothing, yet Horovod divides by all ranks: count
    # those that add something. Horovod would scale the count as well.
    sent = [scaled(tensor, prescale_factor) for tensor in tensors]
    one = tf.ones([1], sent[0].dtype)
    count, *sums = _allreduce([one, *sent, *guard], name, Sum, process_set)
    return [
        scaled(total / count[0], postscale_factor) for total in sums[: len(tensors)]
    ]


def _allreduce(tensors, name, op, process_set, **scale):
    first, *others = tensors
    return mpi_ops._grouped_allreduce(
        [wire.not_folded(first), *others],
        name=name,
        op=op,
        process_set=process_set,
        # Ranks are matched by the operation's own name: a scope that only one of
        # them has opened must not keep them apart.
        ignore_name_scope=True,
        **scale,
    )


def _guard(tensors, *, free_axes=0):
    """The shape guard in a list, or an empty list where none is needed."""
    # Of a single tensor Horovod itself tells the shapes, and more clearly.
    if len(tensors) == 1:
        return []
    return [wire.shape_guard(tensors, free_axes=free_axes)]


def scaled(tensor, factor):
    """Returns `tensor * factor` in the dtype of `tensor`."""
    if factor == 1.0:
        return tensor
    # A loss scale, say, is too large for float16, what it scales is not.
    wide = tf.cast(tensor, tf.float32) if tensor.dtype == tf.float16 else tensor
    return tf.cast(wide * factor, tensor.dtype)


def reduce_bfloat16(tensors, name, op, process_set, scale):
    """Sums bfloat16 tensors, which Horovod's allreduce does not know.

    Each rank receives its share of every rank's buffer, adds the shares in
    float32, and the rounded sums are gathered: the bytes of a bfloat16 ring
    allreduce, with one rounding instead of one per hop. Horovod sees uint16. Lengths
    that differ between ranks fail in the first exchange, other shapes in the second.
    """
    if op not in (Average, Sum) or is_elastic():
        wide = [tf.cast(tensor, tf.float32) for tensor in tensors]
        reduced = reduce(wide, name, op, process_set, scale)
        return [tf.cast(tensor, tf.bfloat16) for tensor in reduced]
    ranks = process_set.size()
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    length = tf.size(flat)
    flat = tf.reshape(tf.pad(flat, [[0, -length % ranks]]), [ranks, -1])
    options = {"process_set": process_set, "ignore_name_scope": True}
    shares = mpi_ops.alltoall(
        wire.not_folded(tf.bitcast(flat, tf.uint16)), name=f"{name}_scatter", **options
    )
    shares = tf.cast(tf.bitcast(shares, tf.bfloat16), tf.float32)
    total = tf.reduce_sum(shares * scale["prescale_factor"], axis=0)
    total *= scale["postscale_factor"] / (ranks if op == Average else 1)
    sums = tf.cast(total, tf.bfloat16)
    gathered, _ = mpi_ops.grouped_allgather(
        [wire.pack(sums), wire.pack(wire.shape_guard(tensors))],
        name=f"{name}_gather",
        **options,
    )
    flat = tf.bitcast(gathered, tf.bfloat16)[:length]
    parts = tf.split(flat, [tf.size(tensor) for tensor in tensors])
    return [
        tf.reshape(part, tf.shape(tensor))
        for part, tensor in zip(parts, tensors, strict=True)
    ]
