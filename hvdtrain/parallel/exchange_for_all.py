"""Rows of divided tables whose holders have been given the ids of all ranks."""

import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.keras.partition import partition_of
from hvdtrain.parallel.exchange import from_first_row, send_rows

# No number of ids is as far from an id as this.
_FAR = 1 << 62


def look_up_for_all(tables, ids):
    """As `exchange.look_up`, of ids that are given to the ranks that hold the rows.

    Args:
        tables: list of Keras variables, as there; a table may be in it repeatedly.
        ids: list of tensors of integers of the shape (samples of all ranks, ...), those
            of rank 0 first; None for a table of which this rank holds nothing.

    Returns:
        List of tensors of the shape (ids of this rank's samples, columns).

    Raises:
        tensorflow.errors.InvalidArgumentError: on all ranks, for an id out of range on
            one of them.
    """
    partitions = [partition_of(table) for table in tables]
    rows = [p.dense_shape(t.shape)[0] for p, t in zip(partitions, tables, strict=True)]
    asked = [
        tf.zeros([0], tf.int64) if each is None else from_first_row(each, size)
        for each, size in zip(ids, rows, strict=True)
    ]
    ranks, process_set = partitions[0].parts, partitions[0].process_set
    counts = tf.stack([[tf.size(each) // ranks] * ranks for each in asked], axis=1)
    numbers = _send_counts(counts, _out_of_range(asked, rows), process_set)
    # A rank that fails alone would leave the others in the exchange.
    with tf.control_dependencies([numbers]):
        asked = [tf.identity(each) for each in asked]
    return send_rows(tables, asked, counts, tf.unstack(numbers, axis=1))


def _out_of_range(asked, rows):
    wrong = [
        tf.boolean_mask(ids, (ids < 0) | (ids >= size))
        for ids, size in zip(asked, rows, strict=True)
    ]
    return tf.concat(wrong, axis=0)[:1]


def _send_counts(counts, wrong, process_set):
    """Return how many ids of each table each rank has; fail for an id out of range."""
    ranks = counts.shape[0]
    # In place of numbers, a rank sends such an id to all others.
    sent = tf.cond(
        tf.size(wrong) > 0,
        lambda: tf.fill(counts.shape, wrong[0] - _FAR),
        lambda: tf.cast(counts, tf.int64),
    )
    received, _ = ops.alltoall(
        sent, splits=[1] * ranks, name="EmbeddingCounts", process_set=process_set
    )
    check = tf.debugging.Assert(
        tf.reduce_all(received >= 0),
        [
            "An id is out of range for its embedding. Received:",
            tf.boolean_mask(received, received < 0)[:1] + _FAR,
        ],
    )
    with tf.control_dependencies([check] if check is not None else []):
        numbers = tf.cast(received, counts.dtype)
    return tf.ensure_shape(numbers, counts.shape)
