"""Rows of divided tables whose holders have been given the ids of all ranks."""

import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.keras.partition import partition_of
from hvdtrain.parallel.exchange import from_first_row, send_rows

# Offset that encodes an invalid id as a negative count; smaller negative values are
# sample numbers.
_FAR = 1 << 62


def look_up_for_all(tables: list, ids: list, samples: tf.Tensor) -> list[tf.Tensor]:
    """As `exchange.look_up`, of ids that are given to the ranks that hold the rows.

    Args:
        tables: list of Keras variables, as there; a table may be in it repeatedly.
        ids: list of tensors of integers of the shape (samples of all ranks, ...), those
            of rank 0 first; None for a table of which this rank holds nothing.
        samples: their number of samples of all ranks, a scalar of int32.

    Returns:
        List of tensors of the shape (ids of this rank's samples, columns).

    Raises:
        tensorflow.errors.InvalidArgumentError: on all ranks, for an id out of range, or
            samples that are no multiple of the ranks, on one of them.
    """
    partitions = [partition_of(table) for table in tables]
    rows = [p.dense_shape(t.shape)[0] for p, t in zip(partitions, tables, strict=True)]
    asked = [
        tf.zeros([0], tf.int64) if each is None else from_first_row(each, size)
        for each, size in zip(ids, rows, strict=True)
    ]
    ranks, process_set = partitions[0].parts, partitions[0].process_set
    counts = tf.stack([[tf.size(each) // ranks] * ranks for each in asked], axis=1)
    wrong = _out_of_range(asked, rows) - _FAR
    # Pieces of equal length would begin within a sample.
    uneven = tf.fill([tf.cast(samples % ranks > 0, tf.int32)], -samples)
    wrong = tf.concat([tf.cast(uneven, tf.int64), wrong], axis=0)
    numbers = _send_counts(counts, wrong, process_set)
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
    # In place of numbers, a rank sends what is wrong, a negative number, to all others.
    sent = tf.cond(
        tf.size(wrong) > 0,
        lambda: tf.fill(counts.shape, wrong[0]),
        lambda: tf.cast(counts, tf.int64),
    )
    received, _ = ops.alltoall(
        sent, splits=[1] * ranks, name="EmbeddingCounts", process_set=process_set
    )
    negative = tf.boolean_mask(received, received < 0)[:1]
    is_even = tf.reduce_all(negative < -_FAR // 2)
    checks = [
        tf.debugging.Assert(
            is_even,
            [
                f"With dp_input=False the samples must be a multiple of {ranks} "
                "ranks. Received samples:",
                -negative,
            ],
        ),
        tf.debugging.Assert(
            tf.equal(tf.size(negative), 0) | ~is_even,
            ["An id is out of range for its embedding. Received:", negative + _FAR],
        ),
    ]
    with tf.control_dependencies([each for each in checks if each is not None]):
        numbers = tf.cast(received, counts.dtype)
    return tf.ensure_shape(numbers, counts.shape)
