"""Rows of divided tables: ids go to the ranks that have the rows, and rows come back.

Each rank looks up ids of its own in tables of which it has a slice, some rows or some
columns. One exchange serves all tables of a layer:

    rank r                                        rank q
    ids, each once, by owner      -- alltoall ->  ids of all ranks, each once
    rows, repeated for each id    <- alltoall --  rows of its slice
    gradients, summed by row      -- alltoall ->  gradients, summed by row, sparse

The gradient of a slice is the sum over all ranks' losses, without a reduction.
"""

import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.sharding.shards import get_sharding


def look_up(tables, ids):
    """Return the rows of dense tables, by ids of this rank.

    A collective: all ranks that hold slices call it, also those without ids.

    Args:
        tables: list of Keras variables of shape (rows, columns) and one dtype, each a
            slice with a `Sharding` along axis 0 or 1 over the same process set.
        ids: list of tensors of integers, of any shape; as in `keras.ops.take`,
            negative ones count from the last row.

    Returns:
        List of tensors of the shapes (*ids.shape, columns of the dense table). Their
        gradients by the tables are `tf.IndexedSlices` of which no index repeats.

    Raises:
        tensorflow.errors.InvalidArgumentError: on all ranks, for an id out of range on
            one of them.
    """
    requests = [_Request(*each) for each in zip(tables, ids, strict=True)]
    process_set = get_sharding(tables[0]).process_set
    asked, counts = _send_ids(requests, process_set)
    numbers = [request.counts for request in requests]
    rows = send_rows(tables, asked, counts, numbers)
    return [request.of_ids(each) for request, each in zip(requests, rows, strict=True)]


def send_rows(tables, asked, counts, numbers):
    """Return the rows of each table that this rank gets.

    Args:
        tables: list of this rank's slices.
        asked: the ids of each table for which it returns rows, those of rank 0 first.
        counts: how many for each rank, of the shape (ranks, tables).
        numbers: how many rows, or parts of them, of each table each rank returns.
    """
    rows = [_rows_of(*each) for each in zip(tables, asked, strict=True)]
    sent = _by_rank(rows, tf.unstack(counts, axis=1))
    received, _ = ops.alltoall(
        tf.concat([tf.reshape(piece, [-1]) for piece in sent], axis=0),
        splits=tf.reduce_sum(
            counts * [int(table.shape[1]) for table in tables], axis=1
        ),
        name="EmbeddingRows",
        process_set=get_sharding(tables[0]).process_set,
    )
    widths = [_widths(table) for table in tables]
    elements = [n * width for n, width in zip(numbers, widths, strict=True)]
    pieces = _divide(received, elements)
    return [_join(*each) for each in zip(tables, pieces, strict=True)]


def from_first_row(ids, rows):
    """Return ids of any shape as a vector; negative ones count from the last row."""
    ids = tf.reshape(tf.cast(ids, tf.int64), [-1])
    return tf.where(ids < 0, ids + rows, ids)


def _widths(table):
    """Return how many columns of a row each rank returns."""
    sharding = get_sharding(table)
    if sharding.axis == 1:
        return sharding.sizes
    return [int(table.shape[1])] * sharding.num_shards


def _rows_of(table, ids):
    """Return rows of this rank's slice."""
    sharding = get_sharding(table)
    numbers = ids - (sharding.local_slice.start if sharding.axis == 0 else 0)
    wrong = (numbers < 0) | (numbers >= table.shape[0])
    rows, _ = sharding.full_shape(table.shape)
    message = f"An id is out of range for an embedding of {rows} rows. Received:"
    check = tf.debugging.Assert(
        tf.logical_not(tf.reduce_any(wrong)), [message, tf.boolean_mask(ids, wrong)[:1]]
    )
    with tf.control_dependencies([check] if check is not None else []):
        distinct, places = tf.unique(numbers)
    # Of the variable itself: Keras' take would read, and so copy, all of the slice.
    return _expand(tf.gather(table.value, distinct), places)


def _join(table, pieces):
    """Return whole rows of the pieces that the ranks have returned."""
    axis = get_sharding(table).axis
    parts = [
        tf.reshape(piece, [-1 if axis == 0 else tf.size(piece) // width, width])
        for piece, width in zip(pieces, _widths(table), strict=True)
        if width
    ]
    return tf.concat(parts, axis)


def _send_ids(requests, process_set):
    """Return the ids that all ranks ask this one for, by table, and their numbers.

    The numbers have the shape (ranks, tables).
    """
    counts = tf.stack([request.counts for request in requests], axis=1)
    # Each rank receives the numbers of ids by table, then these ids.
    heads = tf.cast(tf.reshape(counts, [-1]), tf.int64)
    ones = tf.ones_like(counts[:, 0])
    sent = _by_rank(
        [heads, *(request.sent for request in requests)],
        [ones * len(requests), *tf.unstack(counts, axis=1)],
    )
    received, lengths = ops.alltoall(
        tf.concat(sent, axis=0),
        splits=tf.reduce_sum(counts, axis=1) + len(requests),
        name="EmbeddingIds",
        process_set=process_set,
    )
    starts = tf.cumsum(lengths, exclusive=True)
    places = starts[:, tf.newaxis] + tf.range(len(requests))
    numbers = tf.cast(tf.gather(received, places), counts.dtype)
    numbers = tf.ensure_shape(numbers, counts.shape)
    sizes = [ones * len(requests), *tf.unstack(numbers, axis=1)]
    _, *pieces = _divide(received, sizes)
    return [tf.concat(each, axis=0) for each in pieces], numbers


def _by_rank(tensors, sizes):
    """Return pieces of tensors for rank 0, then those for rank 1, and so on."""
    ranks = sizes[0].shape[0]
    pieces = [
        tf.split(tensor, size, num=ranks)
        for tensor, size in zip(tensors, sizes, strict=True)
    ]
    return [piece for of_rank in zip(*pieces, strict=True) for piece in of_rank]


def _divide(tensor, sizes):
    """Divide what `_by_rank` made; return a list of each rank's piece by tensor."""
    sizes = tf.stack(sizes, axis=1)
    ranks, tensors = sizes.shape
    pieces = tf.split(tensor, tf.reshape(sizes, [-1]), num=ranks * tensors)
    return [pieces[i::tensors] for i in range(tensors)]


class _Request:
    """This rank's ids of one table.

    Attributes:
        sent: the ids, each once, those for rank 0 first.
        counts: how many of them go to each rank.
    """

    def __init__(self, table, ids):
        self._sharding = get_sharding(table)
        rows, self._columns = self._sharding.full_shape(table.shape)
        self._shape = ids.shape, tf.shape(ids)
        distinct, self._places = tf.unique(from_first_row(ids, rows))
        by_owner = self._by_row if self._sharding.axis == 0 else self._by_column
        sent, counts = by_owner(distinct)
        self.sent, self.counts = self._or_out_of_range(sent, counts, distinct, rows)

    def _by_row(self, ids):
        ends = tf.cumsum(tf.constant(self._sharding.sizes, tf.int64))
        owners = tf.searchsorted(ends, ids, side="right")
        ranks = self._sharding.num_shards
        # An id out of range has no owner; it is sent in another way.
        owners = tf.clip_by_value(owners, 0, ranks - 1)
        parts = tf.dynamic_partition(tf.range(tf.size(ids)), owners, ranks)
        order = tf.concat(parts, axis=0)
        self._places = tf.gather(tf.math.invert_permutation(order), self._places)
        return tf.gather(ids, order), tf.stack([tf.size(part) for part in parts])

    def _by_column(self, ids):
        holders = [int(size > 0) for size in self._sharding.sizes]
        return tf.tile(ids, [sum(holders)]), tf.size(ids) * tf.constant(holders)

    def _or_out_of_range(self, sent, counts, ids, rows):
        # A rank that failed alone would leave the others in the exchange. So an id out
        # of range is sent to all of them instead, and all fail.
        wrong = tf.boolean_mask(ids, (ids < 0) | (ids >= rows))[:1]
        return tf.cond(
            tf.size(wrong) > 0,
            lambda: (tf.repeat(wrong, self._sharding.num_shards), tf.ones_like(counts)),
            lambda: (sent, counts),
        )

    def of_ids(self, rows):
        """Return the rows of this rank's ids, of those that the ranks returned."""
        static, dynamic = self._shape
        shape = tf.concat([dynamic, [self._columns]], axis=0)
        rows = tf.reshape(_expand(rows, self._places), shape)
        return tf.ensure_shape(rows, [*static, self._columns])


@tf.custom_gradient
def _expand(rows, places):
    """Return the rows at some places; the gradients of one row are added up."""

    def gradient(upstream):
        return tf.math.unsorted_segment_sum(upstream, places, tf.shape(rows)[0]), None

    return tf.gather(rows, places), gradient


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
    shardings = [get_sharding(table) for table in tables]
    rows = [p.full_shape(t.shape)[0] for p, t in zip(shardings, tables, strict=True)]
    asked = [
        tf.zeros([0], tf.int64) if each is None else from_first_row(each, size)
        for each, size in zip(ids, rows, strict=True)
    ]
    ranks, process_set = shardings[0].num_shards, shardings[0].process_set
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
