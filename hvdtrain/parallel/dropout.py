"""Dropout of tensors that are sharded over a model group."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from hvdtrain.parallel.layer import InModelGroup
from hvdtrain.parallel.mesh import Axes, Mesh
from hvdtrain.sharding.shards import Sharding


class ParallelDropout(InModelGroup, keras.layers.Dropout):
    """`keras.layers.Dropout` between sharded layers.

    Use it between a `ColumnParallelDense` with `gather_output=False` and a
    `RowParallelDense` with `input_is_parallel=True`. Each rank draws the full mask and
    takes its shard of the last axis. Together, the ranks' masks equal the mask of
    `keras.layers.Dropout` with the same seed, bit for bit. Nothing is communicated;
    each rank holds a mask of the full size for a moment.

    `hvd.callbacks.BroadcastGlobalVariablesCallback` makes the seeds equal within a
    model group, and different between data replicas. Without it, seed the ranks of a
    group alike. In replicated regions of the model, use `keras.layers.Dropout`.

    Args:
        noise_shape: as for `keras.layers.Dropout`; refers to the full tensor.
        mesh: the `Mesh`; by default the active one.
        others: as for `keras.layers.Dropout`.
    """

    takes_shards = gives_shards = True

    def __init__(
        self,
        rate: float,
        noise_shape: Sequence[int | None] | None = None,
        seed: int | keras.random.SeedGenerator | None = None,
        *,
        mesh: Mesh | Axes | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(rate, noise_shape, seed, **kwargs)
        self._set_mesh(mesh)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training or not 0 < self.rate < 1:
            return super().call(inputs, training=training)
        return dropout(self, inputs, self.get_input_sharding(inputs))


def dropout(
    layer: keras.layers.Dropout, shard: tf.Tensor, sharding: Sharding
) -> tf.Tensor:
    """Return this rank's shard of the output of a `Dropout` layer for a full tensor.

    Advances `layer.seed_generator`.
    """
    shape = list(ops.shape(shard))
    shape[sharding.axis] = sharding.size
    # 0 for an element that is dropped, or the factor of one that is kept.
    factors = sharding.shard(
        keras.random.dropout(
            ops.ones(shape, shard.dtype),
            layer.rate,
            noise_shape=layer.noise_shape,
            seed=layer.seed_generator,
        )
    )
    # Not shard * factors alone: the product with 0 is -0.0 or NaN for some inputs.
    return ops.where(factors == 0, ops.zeros_like(shard), shard * factors)
