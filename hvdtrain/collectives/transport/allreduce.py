"""Reduction of a list of tensors: partitioned into buckets, each moved as a whole."""

import functools

import tensorflow as tf

from hvdtrain.collectives import dtypes, graph
from hvdtrain.collectives.process_sets import needs_communication, size_of
from hvdtrain.collectives.transport import counting, dense, moving, shared_memory
from hvdtrain.collectives.transport.reduction import Average, Reduction, Sum, op_name
from hvdtrain.collectives.transport.signature import Signature


def combine(value, process_set, *, name, op=Sum):
    """Returns one tensor, combined over a process set; over one rank, as it is.

    Args:
        value: a tensor.
        process_set: the ranks that take part.
        name: of the operation.
        op: `Sum`, `Max` or another operation of `Reduction`.
    """
    if not needs_communication(process_set):
        return value
    return allreduce([value], Reduction(op=op, process_set=process_set), name=name)[0]


def allreduce(values, reduction, *, name=None):
    """Reduces a list of tensors; `tf.IndexedSlices` are gathered instead.

    Args:
        values: list of tensor-compatible values or `tf.IndexedSlices`; number,
            kinds, shapes and dtypes agree on all ranks.
        reduction: a `Reduction`.
        name: prefix of the operations' names.

    Returns:
        The reduced values, in the order given.

    Raises:
        NotImplementedError: for `tf.IndexedSlices` and an op other than `Average` and
            `Sum`.
        TypeError: for a dtype that cannot be reduced.
        tensorflow.errors.FailedPreconditionError: on every rank, if the ranks' lists
            or options differ.
    """
    if not values:
        return []
    graph.check_not_compiled_by_xla()
    if any(map(is_slices, values)):
        _check_op_of_slices(reduction)
    values = [_as_dense_or_slices(value) for value in values]
    name = graph.operation_name(name or "Allreduce", reduction.process_set)
    signature = Signature(reduction.describe(), values)
    sent, contexts = zip(*(_compress(v, reduction) for v in values), strict=True)
    buckets = dtypes.partition(sent)
    # Horovod's first operation holds a guard. A native reduction compares one bucket,
    # not the number of buckets.
    is_compared = not shared_memory.takes_part(reduction.process_set) or (
        len(buckets) == 1 and _is_native(sent[0], reduction)
    )
    reduced = moving.run(
        functools.partial(_reduce_buckets, sent, buckets, reduction, name, signature),
        signature,
        functools.partial(counting.of_allreduce, sent, reduction.process_set),
        name=name,
        process_set=reduction.process_set,
        is_compared=is_compared,
    )
    return [
        result if is_slices(result) else reduction.compression.decompress(result, c)
        for result, c in zip(reduced, contexts, strict=True)
    ]


def _reduce_buckets(sent, buckets, reduction, name, signature):
    results, first = [None] * len(sent), []
    for number, places in enumerate(buckets):
        bucket = [sent[i] for i in places]
        is_sparse = is_slices(bucket[0])
        device = reduction.device_sparse if is_sparse else reduction.device_dense
        exchange = _allgather_slices if is_sparse else dense.method(bucket, reduction)
        # The guard of the first bucket holds the signature of the whole list. Other
        # buckets start after it: of lists that differ, none may be in flight.
        with tf.device(device), tf.control_dependencies(first):
            reduced = exchange(bucket, f"{name}_{number}", reduction, signature)
        first = first or [reduced[0].values if is_sparse else reduced[0]]
        for i, result in zip(places, reduced, strict=True):
            results[i] = result
    return results


def _is_native(value, reduction):
    return not is_slices(value) and shared_memory.covers(value, reduction)


def _as_dense_or_slices(value):
    value = dtypes.as_tensorflow(value)
    if not is_slices(value):
        return tf.convert_to_tensor(value)
    # As Horovod, which takes lists for values and indices.
    values, indices = dtypes.as_tensors([value.values, value.indices])
    return tf.IndexedSlices(values, indices, value.dense_shape)


def _compress(value, reduction):
    # As in Horovod, which compresses dense tensors only.
    return (value, None) if is_slices(value) else reduction.compression.compress(value)


def _check_op_of_slices(reduction: Reduction) -> None:
    if reduction.op not in (Average, Sum):
        raise NotImplementedError(
            "Sparse gradients (tf.IndexedSlices) can be reduced with op=hvd.Average or "
            f"op=hvd.Sum only. Received: op=hvd.{op_name(reduction.op)}. Pass "
            "sparse_as_dense=True instead."
        )


def is_slices(value):
    """Whether `value` is a sparse tensor: `tf.IndexedSlices`."""
    return isinstance(value, tf.IndexedSlices)


def _allgather_slices(slices, name, reduction, signature):
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
    values = [dtypes.scaled(v, reduction.factor) for v in values]
    if reduction.op == Average:
        values = [v / size_of(process_set, v.dtype) for v in values]
    return [
        tf.IndexedSlices(v, i, dense_shape=s.dense_shape)
        for v, i, s in zip(values, indices, slices, strict=True)
    ]
