"""Mappings between divided regions, against numbers that are computed by hand."""

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.parallel import mappings
from hvdtrain.sharding.shards import Sharding

RANK, SIZE = hvd.rank(), hvd.size()
# Along the last axis, of five elements: not divisible.
WHOLE = np.arange(10.0).reshape(2, 5)
# All ranks' factors of the sum that is differentiated, and of the addends.
FACTORS = [(rank + 1) * (WHOLE + 1) for rank in range(SIZE)]
TOTAL = SIZE * (SIZE + 1) // 2


@pytest.fixture(scope="module")
def sharding():
    return Sharding(
        axis=1, size=5, num_shards=SIZE, rank=RANK, process_set=hvd.global_process_set
    )


@pytest.mark.ranks
def test_gather_for_divided_adds_up_the_gradients_of_the_ranks(sharding):
    part = tf.constant(sharding.shard(WHOLE))
    with tf.GradientTape() as tape:
        tape.watch(part)
        gathered = mappings.gather_for_divided(part, sharding)
        loss = tf.reduce_sum(gathered * FACTORS[RANK])
    np.testing.assert_array_equal(gathered, WHOLE)
    expected = sharding.shard(TOTAL * (WHOLE + 1))
    np.testing.assert_array_equal(tape.gradient(loss, part), expected)


@pytest.mark.ranks
def test_reducescatter_gathers_the_gradients_of_the_slices(sharding):
    addend = tf.constant((RANK + 1) * WHOLE)
    with tf.GradientTape() as tape:
        tape.watch(addend)
        part = mappings.reducescatter(addend, sharding)
        loss = tf.reduce_sum(part * sharding.shard(WHOLE + 1))
    np.testing.assert_array_equal(part, sharding.shard(TOTAL * WHOLE))
    np.testing.assert_array_equal(tape.gradient(loss, addend), WHOLE + 1)
