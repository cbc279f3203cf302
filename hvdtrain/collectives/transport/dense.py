"""How one bucket of dense tensors, all of one dtype, is reduced.

A small bucket is reduced as one flat tensor: Horovod negotiates and copies two tensors
instead of all. A large one is reduced as a Horovod group of its tensors, since the
additional copy would cost more than it saves.
"""

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.collectives import dtypes, graph
from hvdtrain.collectives.process_sets import is_elastic
from hvdtrain.collectives.transport import shared_memory
from hvdtrain.collectives.transport.moving import exchange_guard
from hvdtrain.collectives.transport.reduction import Adasum, Average, Sum

_FLAT_BYTES = 1 << 20


def method(bucket, reduction):
    """Returns the function (tensors, name, reduction, signature) for this bucket.

    Raises:
        TypeError: for a dtype that cannot be reduced.
    """
    if shared_memory.covers(bucket[0], reduction):
        return _reduce_natively
    if bucket[0].dtype == tf.bfloat16:
        is_added = reduction.op in (Average, Sum)
        # The exchange in bfloat16 needs the number of ranks at trace time.
        return _add_bfloat16 if is_added and not is_elastic() else _widen_bfloat16
    dtypes.check_reducible(bucket[0])
    return _adasum if reduction.op == Adasum else _reduce


def _reduce_natively(tensors, name, reduction, signature):
    sent = [dtypes.scaled(tensor, reduction.prescale_factor) for tensor in tensors]
    reduced = shared_memory.allreduce(sent, name=name, reduction=reduction)
    return [dtypes.scaled(tensor, reduction.postscale_factor) for tensor in reduced]


def _reduce(tensors, name, reduction, signature):
    is_small = _is_small(tensors)
    arguments = (tensors, name, reduction, signature)
    if isinstance(is_small, bool):
        return (_reduce_flat if is_small else _reduce_group)(*arguments)
    # Another rank may know the shapes at trace time: all must choose by the same size.
    return tf.cond(
        is_small, lambda: _reduce_flat(*arguments), lambda: _reduce_group(*arguments)
    )


def _is_small(tensors):
    """Whether a flat buffer pays; a scalar tensor where shapes are not known yet."""
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    limit = _FLAT_BYTES // tensors[0].dtype.size
    if None in sizes:
        return tf.add_n([tf.size(tensor) for tensor in tensors]) <= limit
    return sum(sizes) <= limit


def _reduce_flat(tensors, name, reduction, signature):
    """Reduces the concatenation of all tensors."""
    dtype = tensors[0].dtype
    parts = [tf.reshape(tensor, [-1]) for tensor in _prescaled(tensors, reduction)]
    # The count of ranks at the end: a slice from the start shares the buffer.
    flat = tf.concat([*parts, tf.ones([1], dtype)], axis=0)
    total, _ = mpi_ops._grouped_allreduce(
        [flat, signature.guard(dtype)], **_options(reduction, dtype, name)
    )
    parts = _split_like(tensors, total[:-1])
    return [_averaged(part, total[-1], reduction) for part in parts]


def _reduce_group(tensors, name, reduction, signature):
    """Reduces each tensor in its own memory, all of them in one negotiation."""
    dtype = tensors[0].dtype
    agreed = exchange_guard(signature, name, reduction.process_set, dtype)
    with tf.control_dependencies(agreed):
        one = graph.block_constant_folding(tf.ones([1], dtype))
        count, *totals = mpi_ops._grouped_allreduce(
            [one, *_prescaled(tensors, reduction)],
            **_options(reduction, dtype, f"{name}_tensors"),
        )
    return [_averaged(total, count[0], reduction) for total in totals]


def _counts_ranks(reduction, dtype):
    # A rank that has joined adds zeros, yet Horovod divides by the number of all
    # ranks. So every rank adds a one as well, and the sum is divided by the sum of the
    # ones. Only the global process set can be joined.
    is_global = reduction.process_set.process_set_id == 0
    return reduction.op == Average and is_global and dtype.is_floating


def _options(reduction, dtype, name):
    # Ranks are matched by the operation's own name: a name scope that is open on one
    # rank only must not be part of it.
    options = {
        "name": name,
        "process_set": reduction.process_set,
        "ignore_name_scope": True,
    }
    if _counts_ranks(reduction, dtype):
        return {**options, "op": Sum}
    return {
        **options,
        "op": reduction.op,
        "prescale_factor": reduction.prescale_factor,
        "postscale_factor": reduction.postscale_factor,
    }


def _prescaled(tensors, reduction):
    # Horovod would scale the count of ranks as well.
    if not _counts_ranks(reduction, tensors[0].dtype):
        return tensors
    return [dtypes.scaled(tensor, reduction.prescale_factor) for tensor in tensors]


def _averaged(total, count, reduction):
    if not _counts_ranks(reduction, total.dtype):
        return total
    return dtypes.scaled(total / count, reduction.postscale_factor)


def _split_like(tensors, flat):
    """Returns the parts of `flat` in the shapes of `tensors`."""
    are_known = all(tensor.shape.is_fully_defined() for tensor in tensors)
    shapes = [tensor.shape if are_known else tf.shape(tensor) for tensor in tensors]
    sizes = [
        tensor.shape.num_elements() if are_known else tf.size(tensor)
        for tensor in tensors
    ]
    parts = tf.split(flat, sizes)
    return [tf.reshape(part, s) for part, s in zip(parts, shapes, strict=True)]


def _adasum(tensors, name, reduction, signature):
    # Adasum weighs each tensor by its own norm: no flat buffer.
    dtype = tensors[0].dtype
    agreed = exchange_guard(signature, name, reduction.process_set)
    with tf.control_dependencies(agreed):
        first, *others = tensors
        return mpi_ops._grouped_allreduce(
            [graph.block_constant_folding(first), *others],
            **_options(reduction, dtype, f"{name}_tensors"),
        )


def _widen_bfloat16(tensors, name, reduction, signature):
    wide = [tf.cast(tensor, tf.float32) for tensor in tensors]
    reduced = _reduce(wide, name, reduction, signature)
    return [tf.cast(tensor, tf.bfloat16) for tensor in reduced]


def _add_bfloat16(tensors, name, reduction, signature):
    """Adds bfloat16 tensors, which Horovod's allreduce does not support.

    Each rank receives its share of every rank's buffer, adds the shares in float32,
    and the rounded sums are gathered: the bytes of a ring allreduce in bfloat16, with
    one rounding instead of one for each hop. Horovod moves the bits as uint16.
    """
    process_set = reduction.process_set
    ranks = process_set.size()
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    length = tf.size(flat)
    flat = tf.reshape(tf.pad(flat, [[0, -length % ranks]]), [ranks, -1])
    options = {"process_set": process_set, "ignore_name_scope": True}
    with tf.control_dependencies(exchange_guard(signature, name, process_set)):
        shares = mpi_ops.alltoall(
            graph.block_constant_folding(dtypes.to_carrier(flat)),
            name=f"{name}_shares",
            **options,
        )
    shares = tf.cast(dtypes.from_carrier(shares, tf.bfloat16), tf.float32)
    total = tf.reduce_sum(shares * reduction.prescale_factor, axis=0)
    total *= reduction.postscale_factor / (ranks if reduction.op == Average else 1)
    sums = dtypes.to_carrier(tf.cast(total, tf.bfloat16))
    gathered = mpi_ops.allgather(sums, name=f"{name}_sums", **options)
    return _split_like(tensors, dtypes.from_carrier(gathered, tf.bfloat16)[:length])
