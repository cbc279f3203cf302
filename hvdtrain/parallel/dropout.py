"""Dropout of tensors of which each rank of a model group has a part."""

import keras
from keras import ops

from hvdtrain.parallel.layer import InModelGroup


class ParallelDropout(InModelGroup, keras.layers.Dropout):
    """`keras.layers.Dropout` between divided layers.

    Its place is between a `ColumnParallelDense` with `gather_output=False` and a
    `RowParallelDense` with `input_is_parallel=True`. Each rank draws the mask of the
    dense twin and takes its part of the last axis: the ranks' masks together are, bit
    for bit, that of the dense twin with the same seed. Nothing crosses the ranks; each
    has a mask of the dense size for a moment.

    `hvd.callbacks.BroadcastGlobalVariablesCallback` makes the seeds of the ranks of a
    model group equal, and those of data replicas different. Without it, seed the ranks
    of a group alike. In replicated parts of the model, use `keras.layers.Dropout`.

    Args:
        rate: as for `keras.layers.Dropout`.
        noise_shape: the same; of the dense tensor.
        seed: the same.
        mesh: the `Mesh`; by default the active one.
        **kwargs: as for `keras.layers.Dropout`.
    """

    takes_shards = gives_shards = True

    def __init__(self, rate, noise_shape=None, seed=None, *, mesh=None, **kwargs):
        super().__init__(rate, noise_shape, seed, **kwargs)
        self._set_mesh(mesh)

    def call(self, inputs, training=False):
        """Return the inputs, in training with some of them set to 0."""
        if not training or not 0 < self.rate < 1:
            return super().call(inputs, training=training)
        return dropout(self, inputs, self.sharding_of_input(inputs))


def dropout(layer, part, sharding):
    """Return this rank's part of what a `keras.layers.Dropout` makes of a dense tensor.

    Args:
        layer: the layer, whose `seed_generator` is advanced.
        part: this rank's part of the dense tensor.
        sharding: its `Sharding`.
    """
    shape = list(ops.shape(part))
    shape[sharding.axis] = sharding.size
    # 0, or what the inputs that are kept are multiplied with.
    factors = sharding.shard(
        keras.random.dropout(
            ops.ones(shape, part.dtype),
            layer.rate,
            noise_shape=layer.noise_shape,
            seed=layer.seed_generator,
        )
    )
    # A product with 0 is -0.0 or NaN for some inputs.
    return ops.where(factors == 0, ops.zeros_like(part), part * factors)
