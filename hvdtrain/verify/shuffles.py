"""Datasets that are shuffled before they are sharded."""

from typing import Any

import tensorflow as tf

# Of one shuffle: two numbers, which are 0 if the order is another in each process.
Seeds = tuple[int, int]


def shuffles_before_shard(dataset: tf.data.Dataset) -> list[Seeds]:
    """Return the seeds of all shuffles whose result a dataset shards.

    Ranks with other seeds shard other orders, and their shards overlap.
    """
    return _find(dataset, is_sharded=False)


def _find(dataset: Any, *, is_sharded: bool) -> list[Seeds]:
    # The classes are private, as `_inputs` is.
    kind = type(dataset).__name__
    is_sharded |= kind == "_ShardDataset" and int(dataset._num_shards) > 1
    found = []
    if kind == "_ShuffleDataset" and is_sharded:
        found.append((int(dataset._seed), int(dataset._seed2)))
    for each in dataset._inputs():
        found += _find(each, is_sharded=is_sharded)
    return found
