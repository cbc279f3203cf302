"""Weights of which each rank stores a shard as soon as they are created.

A rank that builds a model this way has one full weight at a time, never the full model.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from hvdtrain.keras.seams import replace
from hvdtrain.parallel.layer import ShardedWeights
from hvdtrain.sharding.shards import get_sharding

# Makes a variable this rank's shard.
Shard: TypeAlias = Callable[[keras.Variable], None]


def is_shardable(variable: keras.Variable, min_size: int) -> bool:
    """Return whether a weight that a layer has as trainable can be fully sharded."""
    return (
        tf.as_dtype(variable.dtype).is_floating
        and math.prod(variable.shape) >= min_size
        and variable.constraint is None
        and get_sharding(variable) is None
    )


def shard_when_created(
    choose: Callable[[keras.Variable], Shard | None],
) -> Callable[[], None]:
    """Shard trainable weights when layers add them, from now on.

    Args:
        choose: returns the function that shards a weight, or None. Creations of weights
            that are sharded are collectives.

    Returns:
        A function that ends it.
    """
    # Weights of layers that Keras builds while it infers shapes get their values later.
    awaited: dict[int, tuple[keras.Variable, Shard]] = {}

    def add_weight(
        layer: keras.layers.Layer, *args: Any, **kwargs: Any
    ) -> keras.Variable:
        variable = add_full_weight(layer, *args, **kwargs)
        # A layer that is frozen has trainable weights, too. Layers of `ShardedWeights`
        # mark their shards after this.
        is_trainable = any(variable is each for each in layer._trainable_variables)
        if not is_trainable or isinstance(layer, ShardedWeights):
            return variable
        shard = choose(variable)
        if shard and variable._value is None:
            awaited[id(variable)] = variable, shard
        elif shard and tf.executing_eagerly():
            shard(variable)
        return variable

    def initialize(variable: keras.Variable) -> None:
        initialize_full(variable)
        found = awaited.pop(id(variable), None)
        # While a function is traced, the variable has no value yet.
        if found and tf.executing_eagerly():
            _, shard = found
            shard(variable)

    layer_class, variable_class = keras.layers.Layer, keras.Variable
    add_full_weight = replace(
        layer_class, "add_weight", add_weight, by=shard_when_created
    )
    initialize_full = replace(
        variable_class, "_deferred_initialize", initialize, by=shard_when_created
    )

    def end() -> None:
        replace(layer_class, "add_weight", add_full_weight, by=shard_when_created)
        replace(
            variable_class,
            "_deferred_initialize",
            initialize_full,
            by=shard_when_created,
        )

    return end
