"""Mappings between replicated and sharded regions, against hand-computed numbers."""

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.parallel import mappings
from hvdtrain.sharding.shards import Sharding

RANK, SIZE = hvd.rank(), hvd.size()
FULL = np.arange(10.0).reshape(2, 5)
# The last axis, of five elements, is not divisible.
SHARDING = Sharding(
    axis=1, size=5, num_shards=SIZE, rank=RANK, process_set=hvd.global_process_set
)
SHARD = SHARDING.shard(FULL)
TERM, TOTAL = (RANK + 1) * FULL, SIZE * (SIZE + 1) // 2 * FULL
# By mapping: input, output, gradient of the output, gradient of the input.
CASES = {
    mappings.copy: (FULL, FULL, TERM, TOTAL),
    mappings.reduce: (TERM, TOTAL, FULL, FULL),
    mappings.scatter: (FULL, SHARD, SHARD, FULL),
    mappings.gather: (SHARD, FULL, FULL, SHARD),
}


@pytest.mark.ranks
@pytest.mark.parametrize("mapping", CASES, ids=lambda mapping: mapping.__name__)
def test_forward_and_backward(mapping):
    x, expected, upstream, gradient = CASES[mapping]
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = mapping(x, SHARDING)
    np.testing.assert_array_equal(y, expected)
    found = tape.gradient(y, x, output_gradients=tf.constant(upstream))
    np.testing.assert_array_equal(found, gradient)
