"""Lookups in sharded tables: ids go to the ranks that hold the rows, rows come back.

Each rank looks up its ids in tables of which it holds a shard, some rows or some
columns. One exchange serves all tables of a layer:

    rank r                                        rank q
    distinct ids, by owner        -- alltoall ->  distinct ids of all ranks
    rows, repeated for each id    <- alltoall --  rows of its shard
    gradients, summed by row      -- alltoall ->  gradients, summed by row, sparse

The gradient of a shard is the sum over the losses of all ranks, without a reduction.

A rank that raised an error alone would leave the other ranks blocked in an alltoall.
So an id out of range is sent to all ranks in place of what they expect, and all raise.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf
from horovod.tensorflow import ProcessSet

from hvdtrain.collectives import ops
from hvdtrain.sharding.shards import Sharding, get_sharding


def look_up(
    tables: Sequence[keras.Variable], ids: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the full rows of sharded tables, for ids of this rank.

    A collective: all ranks that hold shards call it, also ranks without ids.

    Args:
        tables: variables of shape (rows, columns) and one dtype, each with a `Sharding`
            along axis 0 or 1 over the same process set.
        ids: tensors of integers, of any shape, one for each table; negative ids count
            from the last row, as in `keras.ops.take`.

    Returns:
        Tensors of the shapes (*ids.shape, columns of the full table). Their gradients
        by the tables are `tf.IndexedSlices` in which no index repeats.

    Raises:
        tensorflow.errors.InvalidArgumentError: on all ranks, for an id out of range on
            one of them.
    """
    requests = [_Request(*pair) for pair in zip(tables, ids, strict=True)]
    received_ids, counts = _send_ids(requests, _require_sharding(tables[0]).process_set)
    expected = [request.counts for request in requests]
    rows = _send_rows(tables, received_ids, counts, expected)
    return [
        request.expand(received)
        for request, received in zip(requests, rows, strict=True)
    ]


def _require_sharding(table: keras.Variable) -> Sharding:
    sharding = get_sharding(table)
    if sharding is None:
        raise ValueError(f"Expected a sharded table. Received: {table.path}")
    return sharding


def _send_rows(
    tables: Sequence[keras.Variable],
    ids: Sequence[tf.Tensor],
    counts: tf.Tensor,
    expected: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Return the rows of each table that the ranks send to this one.

    Args:
        tables: this rank's shards.
        ids: ids of each table whose rows this rank sends: first to rank 0, then to
            rank 1, and so on.
        counts: their numbers, of the shape (ranks, tables).
        expected: how many rows of each table, by rank, this rank receives.
    """
    rows = [_read_rows(*pair) for pair in zip(tables, ids, strict=True)]
    sent = _order_by_rank(rows, tf.unstack(counts, axis=1))
    received, _ = ops.alltoall(
        tf.concat([tf.reshape(values, [-1]) for values in sent], axis=0),
        splits=tf.reduce_sum(
            counts * [int(table.shape[1]) for table in tables], axis=1
        ),
        name="EmbeddingRows",
        process_set=_require_sharding(tables[0]).process_set,
    )
    widths = [_widths_by_rank(table) for table in tables]
    elements = [n * width for n, width in zip(expected, widths, strict=True)]
    values = _split_by_tensor(received, elements)
    return [_join_rows(*pair) for pair in zip(tables, values, strict=True)]


def _as_row_numbers(ids: tf.Tensor, rows: int) -> tf.Tensor:
    """Return ids as a vector, in which negative ids are counted from the first row."""
    ids = tf.reshape(tf.cast(ids, tf.int64), [-1])
    return tf.where(ids < 0, ids + rows, ids)


def _widths_by_rank(table: keras.Variable) -> list[int]:
    """Return how many columns of a row each rank sends."""
    sharding = _require_sharding(table)
    if sharding.axis == 1:
        return sharding.sizes
    return [int(table.shape[1])] * sharding.num_shards


def _read_rows(table: keras.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Return rows of this rank's shard."""
    sharding = _require_sharding(table)
    numbers = ids - (sharding.local_slice.start if sharding.axis == 0 else 0)
    wrong = (numbers < 0) | (numbers >= table.shape[0])
    rows, _ = sharding.full_shape(table.shape)
    message = f"An id is out of range for an embedding of {rows} rows. Received:"
    check = tf.debugging.Assert(
        tf.logical_not(tf.reduce_any(wrong)), [message, tf.boolean_mask(ids, wrong)[:1]]
    )
    with tf.control_dependencies([check] if check is not None else []):
        distinct, positions = tf.unique(numbers)
    # tf.gather on the variable itself reads these rows only: Keras' take would first
    # read, and so copy, the shard.
    return _repeat_rows(tf.gather(table.value, distinct), positions)


def _join_rows(table: keras.Variable, values_by_rank: list[tf.Tensor]) -> tf.Tensor:
    """Return full rows, of the values that the ranks have sent."""
    axis = _require_sharding(table).axis
    rows = [
        tf.reshape(values, [-1 if axis == 0 else tf.size(values) // width, width])
        for values, width in zip(values_by_rank, _widths_by_rank(table), strict=True)
        if width
    ]
    return tf.concat(rows, axis)


def _send_ids(
    requests: Sequence["_Request"], process_set: ProcessSet
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Return the ids that all ranks request of this one, by table, and their numbers.

    The numbers have the shape (ranks, tables).
    """
    counts = tf.stack([request.counts for request in requests], axis=1)
    # The message to a rank begins with the numbers of ids by table.
    headers = tf.cast(tf.reshape(counts, [-1]), tf.int64)
    ones = tf.ones_like(counts[:, 0])
    sent = _order_by_rank(
        [headers, *(request.sent for request in requests)],
        [ones * len(requests), *tf.unstack(counts, axis=1)],
    )
    received, lengths = ops.alltoall(
        tf.concat(sent, axis=0),
        splits=tf.reduce_sum(counts, axis=1) + len(requests),
        name="EmbeddingIds",
        process_set=process_set,
    )
    starts = tf.cumsum(lengths, exclusive=True)
    positions = starts[:, tf.newaxis] + tf.range(len(requests))
    numbers = tf.cast(tf.gather(received, positions), counts.dtype)
    numbers = tf.ensure_shape(numbers, counts.shape)
    sizes = [ones * len(requests), *tf.unstack(numbers, axis=1)]
    _, *ids = _split_by_tensor(received, sizes)
    return [tf.concat(ids_by_rank, axis=0) for ids_by_rank in ids], numbers


def _order_by_rank(
    tensors: Sequence[tf.Tensor], sizes: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return what rank 0 gets of each tensor, then what rank 1 gets, and so on.

    Each tensor is ordered by rank, and `sizes` has the rows of each rank in it.
    """
    ranks = sizes[0].shape[0]
    rows_by_tensor = [
        tf.split(tensor, size, num=ranks)
        for tensor, size in zip(tensors, sizes, strict=True)
    ]
    return [rows for of_rank in zip(*rows_by_tensor, strict=True) for rows in of_rank]


def _split_by_tensor(
    received: tf.Tensor, sizes: Sequence[tf.Tensor]
) -> list[list[tf.Tensor]]:
    """Return each tensor's rows by rank, of what `_order_by_rank` ordered."""
    counts = tf.stack(sizes, axis=1)
    ranks, tensors = counts.shape
    rows = tf.split(received, tf.reshape(counts, [-1]), num=ranks * tensors)
    return [rows[i::tensors] for i in range(tensors)]


class _Request:
    """This rank's ids of one table.

    Attributes:
        sent: the distinct ids that each rank gets; first rank 0's, then rank 1's.
        counts: how many of them each rank gets.
    """

    def __init__(self, table: keras.Variable, ids: tf.Tensor) -> None:
        self._sharding = _require_sharding(table)
        rows, self._columns = self._sharding.full_shape(table.shape)
        self._shape = ids.shape, tf.shape(ids)
        distinct, self._positions = tf.unique(_as_row_numbers(ids, rows))
        address = self._to_owners if self._sharding.axis == 0 else self._to_all
        sent, counts = address(distinct)
        self.sent, self.counts = self._replace_invalid(sent, counts, distinct, rows)

    def _to_owners(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        ends = tf.cumsum(tf.constant(self._sharding.sizes, tf.int64))
        owners = tf.searchsorted(ends, ids, side="right")
        ranks = self._sharding.num_shards
        # An id out of range has no owner; `_replace_invalid` sends it to all ranks.
        owners = tf.clip_by_value(owners, 0, ranks - 1)
        numbers_by_rank = tf.dynamic_partition(tf.range(tf.size(ids)), owners, ranks)
        order = tf.concat(numbers_by_rank, axis=0)
        self._positions = tf.gather(tf.math.invert_permutation(order), self._positions)
        counts = tf.stack([tf.size(numbers) for numbers in numbers_by_rank])
        return tf.gather(ids, order), counts

    def _to_all(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        holders = [int(size > 0) for size in self._sharding.sizes]
        return tf.tile(ids, [sum(holders)]), tf.size(ids) * tf.constant(holders)

    def _replace_invalid(
        self, sent: tf.Tensor, counts: tf.Tensor, ids: tf.Tensor, rows: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return an id out of range for every rank, if there is one."""
        wrong = tf.boolean_mask(ids, (ids < 0) | (ids >= rows))[:1]
        return tf.cond(
            tf.size(wrong) > 0,
            lambda: (tf.repeat(wrong, self._sharding.num_shards), tf.ones_like(counts)),
            lambda: (sent, counts),
        )

    def expand(self, rows: tf.Tensor) -> tf.Tensor:
        """Return a row for each of this rank's ids, from the rows of distinct ids."""
        static, dynamic = self._shape
        shape = tf.concat([dynamic, [self._columns]], axis=0)
        rows = tf.reshape(_repeat_rows(rows, self._positions), shape)
        return tf.ensure_shape(rows, [*static, self._columns])


@tf.custom_gradient
def _repeat_rows(rows: tf.Tensor, positions: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Return the rows at some positions; the gradients of one row are added up."""

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        count = tf.shape(rows)[0]
        return tf.math.unsorted_segment_sum(upstream, positions, count), None

    return tf.gather(rows, positions), gradient


# Offset that encodes an invalid id as a negative count; smaller negative values are
# sample numbers.
_INVALID_ID = 1 << 62


def look_up_for_all(
    tables: Sequence[keras.Variable],
    ids: Sequence[tf.Tensor | None],
    samples: tf.Tensor,
) -> list[tf.Tensor]:
    """Return full rows as `look_up` does, for ids given to the ranks with the rows.

    Each rank has the ids of all ranks' samples for its own tables, so that ids need not
    be sent. A collective.

    Args:
        tables: as for `look_up`; a table may be in it repeatedly.
        ids: tensors of integers of the shape (samples of all ranks, ...), rank 0's
            samples first; None for a table of which this rank holds nothing.
        samples: the number of samples of all ranks, a scalar of int32.

    Returns:
        Tensors of the shape (ids of this rank's samples, columns).

    Raises:
        tensorflow.errors.InvalidArgumentError: on all ranks, for an id out of range, or
            samples that are no multiple of the ranks, on one of them.
    """
    shardings = [_require_sharding(table) for table in tables]
    rows = [s.full_shape(t.shape)[0] for s, t in zip(shardings, tables, strict=True)]
    row_numbers = [
        tf.zeros([0], tf.int64) if table_ids is None else _as_row_numbers(table_ids, n)
        for table_ids, n in zip(ids, rows, strict=True)
    ]
    ranks, process_set = shardings[0].num_shards, shardings[0].process_set
    counts = tf.stack([[tf.size(x) // ranks] * ranks for x in row_numbers], axis=1)
    wrong = _find_invalid(row_numbers, rows) - _INVALID_ID
    # Equal shares of the ids would otherwise begin inside of a sample.
    uneven = tf.fill([tf.cast(samples % ranks > 0, tf.int32)], -samples)
    wrong = tf.concat([tf.cast(uneven, tf.int64), wrong], axis=0)
    expected = _exchange_counts(counts, wrong, process_set)
    # Read rows only after the ranks have exchanged errors: a rank that raised alone
    # would leave the others blocked in the exchange.
    with tf.control_dependencies([expected]):
        row_numbers = [tf.identity(numbers) for numbers in row_numbers]
    return _send_rows(tables, row_numbers, counts, tf.unstack(expected, axis=1))


def _find_invalid(ids: Sequence[tf.Tensor], rows: Sequence[int]) -> tf.Tensor:
    wrong = [
        tf.boolean_mask(table_ids, (table_ids < 0) | (table_ids >= n))
        for table_ids, n in zip(ids, rows, strict=True)
    ]
    return tf.concat(wrong, axis=0)[:1]


def _exchange_counts(
    counts: tf.Tensor, wrong: tf.Tensor, process_set: ProcessSet
) -> tf.Tensor:
    """Return how many ids of each table each rank has; raise the error of any rank."""
    ranks = counts.shape[0]
    # In place of counts, a rank sends an error, a negative number, to all others.
    sent = tf.cond(
        tf.size(wrong) > 0,
        lambda: tf.fill(counts.shape, wrong[0]),
        lambda: tf.cast(counts, tf.int64),
    )
    received, _ = ops.alltoall(
        sent, splits=[1] * ranks, name="EmbeddingCounts", process_set=process_set
    )
    negative = tf.boolean_mask(received, received < 0)[:1]
    is_even = tf.reduce_all(negative < -_INVALID_ID // 2)
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
            [
                "An id is out of range for its embedding. Received:",
                negative + _INVALID_ID,
            ],
        ),
    ]
    # In eager mode, Assert returns None.
    with tf.control_dependencies([check for check in checks if check is not None]):
        expected = tf.cast(received, counts.dtype)
    return tf.ensure_shape(expected, counts.shape)
