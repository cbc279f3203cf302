"""Exchange of rows between ranks; splits that do not fit fail on all of them."""

import functools

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.collectives import dtypes, graph
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    rank_in,
    size_of,
)
from hvdtrain.collectives.transport import moving
from hvdtrain.collectives.transport.signature import Signature


def alltoall(
    tensor: tf.Tensor,
    splits: tf.Tensor,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Send `splits[r]` rows of `tensor` to each rank r.

    Returns:
        The rows received, and how many of them came from each rank.

    Raises:
        tensorflow.errors.OpError: on all ranks, if the splits of a rank do not fit its
            tensor.
    """
    name = graph.operation_name(name, process_set)
    dtypes.check_has_rows(tensor)
    fits, kind = _splits_fit(tensor, splits, process_set), "alltoall"
    if tf.executing_eagerly() and not fits:
        kind = f"alltoall with splits={splits.numpy().tolist()}, which do not fit,"
    signature = Signature(kind, [tensor], has_free_rows=True)
    exchange = functools.partial(_alltoall, tensor, splits, fits, name, process_set)
    return moving.run(
        exchange,
        signature,
        name=name,
        process_set=process_set,
        is_compared=moving.compares_itself(process_set),
    )


def _splits_fit(
    tensor: tf.Tensor, splits: tf.Tensor, process_set: ProcessSet
) -> tf.Tensor:
    """Return whether Horovod accepts the splits, as a scalar tensor."""
    ranks, rows = size_of(process_set, tf.int32), tf.shape(tensor)[0]
    # Horovod takes an empty tensor for equal splits.
    if splits.shape.num_elements() == 0:
        return rows % ranks == 0
    fits = (tf.reduce_sum(splits) <= rows) & (tf.size(splits) == ranks)
    return fits & tf.reduce_all(splits >= 0)


def _alltoall(
    tensor: tf.Tensor,
    splits: tf.Tensor,
    fits: tf.Tensor,
    name: str,
    process_set: ProcessSet,
) -> tuple[tf.Tensor, tf.Tensor]:
    sent, counts = dtypes.to_carrier(tensor), splits
    if not tf.executing_eagerly():
        sent, counts = _sent_by_alltoall(sent, splits, fits, process_set)
    received, counts = mpi_ops.alltoall(
        sent,
        splits=counts,
        name=name,
        process_set=process_set,
        ignore_name_scope=True,
    )
    received = tf.ensure_shape(received, [None, *tensor.shape[1:]])
    return dtypes.from_carrier(received, tensor.dtype), counts


def _sent_by_alltoall(
    tensor: tf.Tensor, splits: tf.Tensor, fits: tf.Tensor, process_set: ProcessSet
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return a tensor and splits that fail on all ranks if they do not fit on one.

    Horovod refuses splits that do not fit on their rank alone, before the negotiation,
    in which the other ranks would wait. So zeros replace them, and the tensor gets more
    axes than on the other ranks, which the negotiation refuses on all ranks. The number
    of axes differs also between two ranks whose splits do not fit.
    """
    fits = graph.block_constant_folding(fits)
    ranks, count = size_of(process_set, tf.int32), tf.size(splits)
    start, end = tf.unstack(tf.where(fits, [0, count], [count, count + ranks]))
    counts = tf.concat([splits, tf.zeros([ranks], tf.int32)], axis=0)[start:end]
    if splits.shape.num_elements():
        counts = tf.ensure_shape(counts, splits.shape)
    axes = tf.where(fits, 0, 1 + rank_in(process_set) % 2)
    shape = tf.concat([tf.shape(tensor), tf.ones([axes], tf.int32)], axis=0)
    return tf.reshape(tensor, shape), counts
