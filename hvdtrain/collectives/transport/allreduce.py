"""Reduction of a list of tensors, in one bucket for each dtype."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.collectives import dtypes, graph
from hvdtrain.collectives.dtypes import TensorLike
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    is_elastic,
    needs_communication,
    size_of,
)
from hvdtrain.collectives.transport import moving, native_reduction
from hvdtrain.collectives.transport.moving import exchange_guard
from hvdtrain.collectives.transport.reduction import (
    Adasum,
    Average,
    Reduction,
    Sum,
    is_sparse,
    op_name,
)
from hvdtrain.collectives.transport.signature import Signature

_FLAT_BYTES = 1 << 20


Values = Sequence[tf.Tensor | tf.IndexedSlices]
# Reduces a bucket of tensors of one dtype.
Method = Callable[[list[tf.Tensor], str, Reduction, Signature], list[tf.Tensor]]


def method(bucket: list[tf.Tensor], reduction: Reduction) -> Method:
    """Return the function that reduces this bucket.

    Raises:
        TypeError: for a dtype that cannot be reduced.
    """
    if native_reduction.covers(bucket[0], reduction):
        return _reduce_natively
    if reduction.op == Adasum:
        dtypes.check_adasum(bucket[0])
    if bucket[0].dtype == tf.bfloat16:
        is_added = reduction.op in (Average, Sum)
        # The exchange in bfloat16 needs the number of ranks at trace time.
        return _add_bfloat16 if is_added and not is_elastic() else _widen_bfloat16
    dtypes.check_reducible(bucket[0])
    return _adasum if reduction.op == Adasum else _reduce


def _reduce_natively(
    tensors: list[tf.Tensor], name: str, reduction: Reduction, signature: Signature
) -> list[tf.Tensor]:
    return native_reduction.allreduce(tensors, name=name, reduction=reduction)


def _reduce(
    tensors: list[tf.Tensor], name: str, reduction: Reduction, signature: Signature
) -> list[tf.Tensor]:
    is_small = _is_small(tensors)
    arguments = (tensors, name, reduction, signature)
    if isinstance(is_small, bool):
        return (_reduce_flat if is_small else _reduce_group)(*arguments)
    # Another rank may know the shapes at trace time: all must choose by the same size.
    return tf.cond(
        is_small, lambda: _reduce_flat(*arguments), lambda: _reduce_group(*arguments)
    )


def _is_small(tensors: list[tf.Tensor]) -> bool | tf.Tensor:
    """Return whether a flat buffer pays; a tensor where shapes are not known yet."""
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    limit = _FLAT_BYTES // tensors[0].dtype.size
    if None in sizes:
        return tf.add_n([tf.size(tensor) for tensor in tensors]) <= limit
    return sum(sizes) <= limit


def _reduce_flat(
    tensors: list[tf.Tensor], name: str, reduction: Reduction, signature: Signature
) -> list[tf.Tensor]:
    """Reduce the concatenation of all tensors."""
    dtype = tensors[0].dtype
    flattened = [tf.reshape(tensor, [-1]) for tensor in tensors]
    # The count of ranks at the end: a slice from the start shares the buffer.
    flat = tf.concat([*flattened, tf.ones([1], dtype)], axis=0)
    total, _ = mpi_ops._grouped_allreduce(
        [flat, signature.guard(dtype)], **_options(reduction, dtype, name)
    )
    totals = _split_like(tensors, total[:-1])
    return [_averaged(tensor, total[-1], reduction) for tensor in totals]


def _reduce_group(
    tensors: list[tf.Tensor], name: str, reduction: Reduction, signature: Signature
) -> list[tf.Tensor]:
    """Reduce each tensor in its own memory, all of them in one negotiation."""
    dtype = tensors[0].dtype
    agreed = exchange_guard(signature, name, reduction.process_set, dtype)
    with tf.control_dependencies(agreed):
        one = graph.block_constant_folding(tf.ones([1], dtype))
        count, *totals = mpi_ops._grouped_allreduce(
            [one, *tensors],
            **_options(reduction, dtype, f"{name}_tensors"),
        )
    return [_averaged(total, count[0], reduction) for total in totals]


def _counts_ranks(reduction: Reduction, dtype: tf.DType) -> bool:
    # A rank that has joined adds zeros, yet Horovod divides by the number of all
    # ranks. So every rank adds a one as well, and the sum is divided by the sum of the
    # ones. Only the global process set can be joined.
    is_global = reduction.process_set.process_set_id == 0
    return is_global and reduction.operation(dtype) == Average


def _options(reduction: Reduction, dtype: tf.DType, name: str) -> dict[str, Any]:
    # Ranks are matched by the operation's own name: a name scope that is open on one
    # rank only must not be part of it.
    counts_ranks = _counts_ranks(reduction, dtype)
    return {
        "name": name,
        "op": Sum if counts_ranks else reduction.operation(dtype),
        "process_set": reduction.process_set,
        "ignore_name_scope": True,
    }


def _averaged(total: tf.Tensor, count: tf.Tensor, reduction: Reduction) -> tf.Tensor:
    return total / count if _counts_ranks(reduction, total.dtype) else total


def _split_like(tensors: list[tf.Tensor], flat: tf.Tensor) -> list[tf.Tensor]:
    """Return the elements of `flat`, split into the shapes of `tensors`."""
    are_known = all(tensor.shape.is_fully_defined() for tensor in tensors)
    shapes = [tensor.shape if are_known else tf.shape(tensor) for tensor in tensors]
    sizes = [
        tensor.shape.num_elements() if are_known else tf.size(tensor)
        for tensor in tensors
    ]
    return list(map(tf.reshape, tf.split(flat, sizes), shapes))


def _adasum(
    tensors: list[tf.Tensor], name: str, reduction: Reduction, signature: Signature
) -> list[tf.Tensor]:
    # Adasum weighs each tensor by its own norm: no flat buffer.
    dtype = tensors[0].dtype
    agreed = exchange_guard(signature, name, reduction.process_set)
    with tf.control_dependencies(agreed):
        first, *others = tensors
        return mpi_ops._grouped_allreduce(
            [graph.block_constant_folding(first), *others],
            **_options(reduction, dtype, f"{name}_tensors"),
        )


def _widen_bfloat16(
    tensors: list[tf.Tensor], name: str, reduction: Reduction, signature: Signature
) -> list[tf.Tensor]:
    wide = [tf.cast(tensor, tf.float32) for tensor in tensors]
    reduced = _reduce(wide, name, reduction, signature)
    return [tf.cast(tensor, tf.bfloat16) for tensor in reduced]


def _add_bfloat16(
    tensors: list[tf.Tensor], name: str, reduction: Reduction, signature: Signature
) -> list[tf.Tensor]:
    """Add bfloat16 tensors, which Horovod's allreduce does not support.

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
    total = tf.reduce_sum(shares, axis=0)
    total = total / ranks if reduction.op == Average else total
    sums = dtypes.to_carrier(tf.cast(total, tf.bfloat16))
    gathered = mpi_ops.allgather(sums, name=f"{name}_sums", **options)
    return _split_like(tensors, dtypes.from_carrier(gathered, tf.bfloat16)[:length])


def combine(
    value: tf.Tensor, process_set: ProcessSet, *, name: str, op: object = Sum
) -> tf.Tensor:
    """Return one tensor, reduced over a process set; over one rank, as it is."""
    if not needs_communication(process_set):
        return value
    return allreduce([value], Reduction(op=op, process_set=process_set), name=name)[0]


def allreduce(
    values: Sequence[TensorLike | tf.IndexedSlices],
    reduction: Reduction,
    *,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduce a list of tensors; `tf.IndexedSlices` are gathered instead.

    Args:
        values: number, kinds, shapes and dtypes agree on all ranks.
        reduction: how they are reduced.
        name: prefix of the operations' names.

    Raises:
        NotImplementedError: for `tf.IndexedSlices` and an op other than `Average` and
            `Sum`.
        TypeError: for a dtype that cannot be reduced.
        tensorflow.errors.FailedPreconditionError: on every rank, if the ranks' lists
            or options differ.
    """
    if not values:
        return []
    if any(map(is_sparse, values)):
        _check_op_of_slices(reduction)
    values = [_as_dense_or_slices(value) for value in values]
    name = graph.operation_name(name or "Allreduce", reduction.process_set)
    signature = Signature(reduction.describe(), values)
    sent, contexts = reduction.prepare(values)
    buckets = dtypes.buckets(sent)
    # Horovod's first operation holds a guard. A native reduction compares its bucket,
    # and not the number of buckets.
    is_compared = not native_reduction.takes_part(reduction.process_set) or (
        len(buckets) == 1 and _is_native(sent[0], reduction)
    )
    reduced = moving.run(
        functools.partial(_reduce_buckets, sent, buckets, reduction, name, signature),
        signature,
        name=name,
        process_set=reduction.process_set,
        is_compared=is_compared,
    )
    return reduction.finish(reduced, contexts)


def _reduce_buckets(
    sent: Values,
    buckets: list[list[int]],
    reduction: Reduction,
    name: str,
    signature: Signature,
) -> Values:
    results: list[tf.Tensor | tf.IndexedSlices] = [None] * len(sent)
    first: list[tf.Tensor] = []
    for number, indices in enumerate(buckets):
        bucket = [sent[i] for i in indices]
        has_slices = is_sparse(bucket[0])
        device = reduction.device_sparse if has_slices else reduction.device_dense
        exchange = _allgather_slices if has_slices else method(bucket, reduction)
        # The guard of the first bucket holds the signature of the whole list. Other
        # buckets start after it: of lists that differ, none may be in flight.
        with tf.device(device), tf.control_dependencies(first):
            reduced = exchange(bucket, f"{name}_{number}", reduction, signature)
        first = first or [reduced[0].values if has_slices else reduced[0]]
        for i, result in zip(indices, reduced, strict=True):
            results[i] = result
    return results


def _is_native(value: tf.Tensor | tf.IndexedSlices, reduction: Reduction) -> bool:
    return not is_sparse(value) and native_reduction.covers(value, reduction)


def _as_dense_or_slices(value: TensorLike) -> tf.Tensor | tf.IndexedSlices:
    value = dtypes.as_tensorflow(value)
    if not is_sparse(value):
        return tf.convert_to_tensor(value)
    # Horovod takes lists for values and indices, too.
    values, indices = dtypes.as_tensors([value.values, value.indices])
    return tf.IndexedSlices(values, indices, value.dense_shape)


def _check_op_of_slices(reduction: Reduction) -> None:
    if reduction.op not in (Average, Sum):
        raise NotImplementedError(
            "Sparse gradients (tf.IndexedSlices) can be reduced with op=hvd.Average or "
            f"op=hvd.Sum only. Received: op=hvd.{op_name(reduction.op)}. Pass "
            "sparse_as_dense=True instead."
        )


def _allgather_slices(
    slices: list[tf.IndexedSlices],
    name: str,
    reduction: Reduction,
    signature: Signature,
) -> list[tf.IndexedSlices]:
    process_set = reduction.process_set
    # The first operation of a dense bucket too: where another rank has a dense tensor,
    # both fail. Eager operations are named by their type, so an allgather would not be
    # matched with the other rank's allreduce.
    agreed = moving.exchange_guard(signature, name, process_set)
    with tf.control_dependencies(agreed):
        values = moving.gather_groups([s.values for s in slices], name, process_set)
        indices = moving.gather_groups(
            [s.indices for s in slices], f"{name}_indices", process_set
        )
    if reduction.operation(values[0].dtype) == Average:
        values = [v / size_of(process_set, v.dtype) for v in values]
    return [
        tf.IndexedSlices(v, i, dense_shape=s.dense_shape)
        for v, i, s in zip(values, indices, slices, strict=True)
    ]
