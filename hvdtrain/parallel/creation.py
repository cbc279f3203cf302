"""Weights of which each rank stores a shard as soon as they are created.

`parallel.fully_shard` calls a function that builds a model in the block
`sharding_created`: a rank then has one full weight at a time, never the full model.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives.process_sets import ProcessSet
from hvdtrain.keras.seams import replace
from hvdtrain.parallel.gathering import shard_variable
from hvdtrain.parallel.layer import ShardedWeights
from hvdtrain.sharding.shards import get_sharding


def is_shardable(variable: keras.Variable, min_size: int) -> bool:
    """Return whether `fully_shard` shards a weight that a layer has as trainable."""
    return (
        tf.as_dtype(variable.dtype).is_floating
        and math.prod(variable.shape) >= min_size
        and variable.constraint is None
        and get_sharding(variable) is None
    )


@contextlib.contextmanager
def sharding_created(
    process_set: ProcessSet, min_size: int
) -> Iterator[list[keras.Variable]]:
    """Shard each weight that a layer adds in the block, if it is shardable.

    Creations are then collectives of `process_set`.

    Yields:
        A list to which each weight is appended that is sharded.
    """
    created: list[keras.Variable] = []
    # Weights of layers that Keras builds while it infers shapes get their values later.
    awaited: dict[int, keras.Variable] = {}

    def shard(variable: keras.Variable) -> None:
        # Their dtype of computation is known when the model is complete.
        shard_variable(variable, process_set, variable._dtype)
        created.append(variable)

    def add_weight(
        layer: keras.layers.Layer, *args: Any, **kwargs: Any
    ) -> keras.Variable:
        variable = add_full_weight(layer, *args, **kwargs)
        # A layer that is frozen has trainable weights, too. Layers of `ShardedWeights`
        # mark their shards after this.
        is_trainable = any(variable is each for each in layer._trainable_variables)
        if (
            is_trainable
            and not isinstance(layer, ShardedWeights)
            and is_shardable(variable, min_size)
        ):
            if variable._value is None:
                awaited[id(variable)] = variable
            elif tf.executing_eagerly():
                shard(variable)
        return variable

    def initialize(variable: keras.Variable) -> None:
        initialize_full(variable)
        if awaited.pop(id(variable), None) is not None:
            shard(variable)

    targets = (
        (keras.layers.Layer, "add_weight"),
        (keras.Variable, "_deferred_initialize"),
    )
    add_full_weight = replace(*targets[0], add_weight, by=sharding_created)
    initialize_full = replace(*targets[1], initialize, by=sharding_created)
    try:
        yield created
    finally:
        replace(*targets[0], add_full_weight, by=sharding_created)
        replace(*targets[1], initialize_full, by=sharding_created)
