"""Counted bytes of collectives, against numbers computed by hand."""

import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from benchmarks.sent_bytes import count_bytes
from hvdtrain.collectives import transport

pytestmark = pytest.mark.ranks
RANK, SIZE = hvd.rank(), hvd.size()
OTHERS = SIZE - 1
SPLITS = [rank + 1 for rank in range(SIZE)]


def slices(rows):
    """Rows of 5 float32, and their numbers: 28 bytes each."""
    return tf.IndexedSlices(
        tf.ones([rows, 5]), tf.range(rows, dtype=tf.int64), tf.constant([99, 5])
    )


# The bytes that one rank sends, where rows are as many as its number + 2.
COLLECTIVES = {
    "allreduce": (
        lambda rows: hvd.grouped_allreduce(
            [tf.ones([6, 7]), tf.ones([3], tf.float64)], name="Counted"
        ),
        2 * OTHERS * (6 * 7 * 4 + 3 * 8) // SIZE,
    ),
    "compressed": (
        lambda rows: hvd.allreduce(tf.ones([6]), compression=hvd.Compression.fp16),
        2 * OTHERS * 6 * 2 // SIZE,
    ),
    "sparse": (
        lambda rows: hvd.allreduce(slices(rows)),
        OTHERS * (RANK + 2) * (5 * 4 + 8),
    ),
    "allgather": (
        lambda rows: transport.allgather([tf.ones([rows, 3])]),
        OTHERS * (RANK + 2) * 3 * 4,
    ),
    "reducescatter": (
        lambda rows: hvd.reducescatter(tf.ones([12, 2])),
        OTHERS * 12 * 2 * 4 // SIZE,
    ),
    "alltoall": (
        lambda rows: hvd.alltoall(
            tf.ones([rows * sum(SPLITS), 3]), rows * tf.constant(SPLITS)
        ),
        (RANK + 2) * (sum(SPLITS) - SPLITS[RANK]) * 3 * 4,
    ),
    "equal alltoall": (
        lambda rows: hvd.alltoall(tf.ones([12])),
        OTHERS * 12 * 4 // SIZE,
    ),
    "broadcast": (
        lambda rows: hvd.broadcast(tf.ones([5], tf.int32), 1),
        OTHERS * 5 * 4 if RANK == 1 else 0,
    ),
    "gathered shards": (
        lambda rows: transport.gather_shards(
            [tf.ones([RANK + 1])], [SPLITS], [[sum(SPLITS)]], name="Gathered"
        ),
        OTHERS * (RANK + 1) * 4,
    ),
    "reduced shards": (
        lambda rows: transport.reduce_to_shards(
            [tf.ones([2 * SIZE])], [[2] * SIZE], transport.Reduction(), name="Reduced"
        ),
        OTHERS * 2 * 4,
    ),
}


def test_each_collective():
    for name, (call, sent) in COLLECTIVES.items():
        with count_bytes() as counter:
            call(RANK + 2)
        assert counter.bytes == sent, name


def test_a_function_counts_in_each_call_if_it_was_traced_in_the_block():
    def step(rows):
        for call, _ in COLLECTIVES.values():
            call(rows)

    counting, other = (tf.function(step, autograph=False) for _ in range(2))
    rows = tf.constant(RANK + 2)
    with count_bytes() as counter:
        counting(rows)
    once = sum(sent for _, sent in COLLECTIVES.values())
    assert counter.bytes == once
    other(rows)
    assert counter.bytes == once
    counting(rows)
    assert counter.bytes == 2 * once
