"""Shards that are gathered without Horovod, within a host and between hosts."""

import os

import horovod.tensorflow as raw
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.collectives import transport

RANK, SIZE = hvd.rank(), hvd.size()

pytestmark = pytest.mark.four_ranks


def is_native():
    return raw.is_homogeneous() and os.environ.get("HVDTRAIN_REDUCTION") != "horovod"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_shards_of_all_lengths_are_gathered_from_all_ranks(dtype):
    # Shorter than a cache line, empty on rank 0, and of several chunks of a slot.
    sizes = [
        [3 + rank for rank in range(SIZE)],
        [300_001 * rank for rank in range(SIZE)],
        [1_200_007] * SIZE,
    ]
    random = np.random.default_rng(0)
    full = [tf.cast(random.integers(-99, 99, sum(each)), dtype) for each in sizes]
    shards = [
        tensor[sum(each[:RANK]) : sum(each[: RANK + 1])]
        for tensor, each in zip(full, sizes, strict=True)
    ]
    shapes = [[sum(each)] for each in sizes]
    # The last rank does not need the last one.
    needed = [*shapes[:2], None if RANK == SIZE - 1 else shapes[2]]

    @tf.function(autograph=False)
    def gather():
        gathered = transport.gather_shards(shards, sizes, needed, name="shards")
        return [tensor for tensor in gathered if tensor is not None]

    operations = gather.get_concrete_function().graph.get_operations()
    assert is_native() == ("HvdtrainAllgather" in [each.type for each in operations])
    # Again, since the slots of the first call are overwritten.
    for _ in range(2):
        gathered = gather()
        assert len(gathered) == 3 - (RANK == SIZE - 1)
        for tensor, expected in zip(gathered, full, strict=False):
            np.testing.assert_array_equal(tensor, expected)
