"""Embeddings of which each data rank has some rows or some columns."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from hvdtrain.collectives import ops as collectives
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Sum
from hvdtrain.keras import collective_calls
from hvdtrain.keras.gradients import update_rows_once
from hvdtrain.parallel.exchange import look_up
from hvdtrain.parallel.layer import ShardedWeights, check_arguments
from hvdtrain.parallel.mesh import Axes, data_axis
from hvdtrain.sharding.shards import Sharding, assign_shard

_COMBINERS = (None, "sum", "mean")


class Embedding(keras.layers.Embedding):
    """`keras.layers.Embedding` with a combiner, as that of distributed-embeddings.

    Args:
        input_dim: rows of the table.
        output_dim: columns of the table.
        *args: as for `keras.layers.Embedding`.
        combiner: "sum" or "mean" of the rows of the last axis of the ids; None returns
            all of them. The combination of no rows is zero.
        **kwargs: as for `keras.layers.Embedding`.

    Raises:
        ValueError: for another combiner.
    """

    def __init__(self, input_dim, output_dim, *args, combiner=None, **kwargs):
        super().__init__(input_dim, output_dim, *args, **kwargs)
        if combiner not in _COMBINERS:
            raise ValueError(
                f'combiner must be None, "sum" or "mean". Received: {combiner!r}'
            )
        self.combiner = combiner

    def call(self, inputs):
        """Return rows or their combinations.

        Args:
            inputs: ids, of the shape (..., ids of a sample); a `tf.RaggedTensor` or
                `tf.SparseTensor` of the shape (samples, None).
        """
        inputs = as_ragged(inputs)
        return combine(inputs, super().call(ids_of(inputs)), self.combiner)

    def compute_output_shape(self, input_shape):
        """Return the shape of the rows, or of their combinations."""
        return output_shape(self, input_shape)

    def compute_mask(self, inputs, mask=None):
        """Return which ids are not 0, for `mask_zero`; None of combinations."""
        return None if self.combiner else super().compute_mask(inputs, mask)

    def get_config(self):
        """Return the arguments."""
        return {**super().get_config(), "combiner": self.combiner}


def combiner_of(embedding):
    """Return the combiner of a layer; Keras' own Embedding has none."""
    return getattr(embedding, "combiner", None)


def output_shape(embedding, input_shape):
    """Return the shape of what an Embedding, with a combiner or not, makes of ids."""
    leading = input_shape[:-1] if combiner_of(embedding) else input_shape
    return (*leading, embedding.output_dim)


def as_ragged(inputs):
    """Return a `tf.SparseTensor` as a `tf.RaggedTensor`, and others as they are."""
    is_sparse = isinstance(inputs, tf.SparseTensor)
    return tf.RaggedTensor.from_sparse(inputs) if is_sparse else inputs


def ids_of(inputs):
    """Return the ids of a tensor or `tf.RaggedTensor`, cast as by Keras' Embedding."""
    if isinstance(inputs, tf.RaggedTensor):
        inputs = inputs.flat_values
    is_integer = inputs.dtype in ("int32", "int64")
    return inputs if is_integer else ops.cast(inputs, "int32")


def combine(inputs, rows, combiner):
    """Return rows in the structure of the inputs, or their combinations.

    Args:
        inputs: a tensor or `tf.RaggedTensor` of ids.
        rows: those of `ids_of(inputs)`.
        combiner: as for `Embedding`.
    """
    if not isinstance(inputs, tf.RaggedTensor):
        if combiner is None:
            return rows
        if combiner == "sum":
            return tf.reduce_sum(rows, axis=-2)
        mean = tf.reduce_mean(rows, axis=-2)
        if rows.shape[-2]:
            return mean
        # The mean of no rows is NaN.
        return tf.where(tf.shape(rows)[-2] > 0, mean, tf.zeros_like(mean))
    rows = inputs.with_flat_values(rows)
    if combiner is None:
        return rows
    total = tf.reduce_sum(rows, axis=1)
    if combiner == "sum":
        return total
    lengths = tf.cast(inputs.row_lengths(), total.dtype)
    return tf.math.divide_no_nan(total, lengths[:, tf.newaxis])


_AXES = {"row": 0, "column": 1}


class ShardedTable(ShardedWeights, keras.layers.Embedding):
    """`keras.layers.Embedding` whose table is divided among data ranks.

    Subclasses call `_divide` before the table is made.
    """

    def _divide(self, axis, data, uneven=None):
        """Set how the table is divided.

        Args:
            axis: 0 for rows, 1 for columns.
            data: the `Axis` of a mesh over which it is divided.
            uneven: numbers of rows or columns of each rank, if not about equal.
        """
        collective_calls.install()
        check_arguments(
            self,
            refused={
                "lora_rank": self.lora_rank,
                "quantization_config": getattr(self, "quantization_config", None),
            },
            additive={"embeddings_regularizer": self.embeddings_regularizer},
        )
        _check_constraint(self, axis)
        self.axis, self.data_axis, self.uneven = axis, data, uneven

    def clone_sharded(self) -> keras.layers.Layer:
        """Return a new layer that is divided alike, with new weights."""
        return self.clone_for_mesh(Axes(data=self.data_axis))

    @property
    def sharded_axes(self):
        """The divided axis of the table."""
        return {"embeddings": self.axis}

    def make_sharding(self, axis, size):
        """Return the `Sharding` of an axis of `size` elements over the data ranks."""
        return Sharding(
            axis=axis,
            size=size,
            num_shards=self.data_axis.size,
            rank=self.data_axis.index,
            process_set=self.data_axis.process_set,
            uneven=self.uneven,
            sums_gradients=True,
        )

    def build(self, input_shape=None):
        """Make this rank's part of the table."""
        super().build(input_shape)
        update_rows_once(self.embeddings)

    @staticmethod
    def sum_penalties(penalty, sharding):
        """Return the penalty of the dense table.

        Its gradient is that of the sum of all ranks' losses, as for the rows.
        """
        if not needs_communication(sharding.process_set):
            return penalty
        return collectives.allreduce(
            penalty, "Penalty", op=Sum, process_set=sharding.process_set
        )

    def call(self, inputs):
        """Return the rows of the dense table. All data ranks call it together."""
        if not needs_communication(self.data_axis.process_set):
            return super().call(inputs)
        (rows,) = look_up([self.embeddings], [ids_of(inputs)])
        return ops.cast(rows, self.compute_dtype)


class ShardedEmbedding(ShardedTable):
    """`keras.layers.Embedding` whose table is divided among the data ranks.

    Each rank has some rows of the table, or some columns of all rows, with their slots
    in the optimizer: 1/N of the memory. Each rank looks up ids of its own: an alltoall
    sends every distinct one to the ranks that have it, another one sends the rows
    back, and a third one the gradients, of which each row has one. Outputs and updates
    are those of a dense table with dense gradients and the batch of all ranks, on any
    number of ranks:

        model = keras.Sequential([parallel.ShardedEmbedding(10_000_000, 64), ...])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")

    All data ranks call it equally often, also to evaluate or predict; a rank may have
    fewer ids than others, or none. Without `with mesh:` and `mesh`, all ranks of the
    job are data ranks.

    Args:
        input_dim: rows of the dense table.
        output_dim: columns of the dense table.
        *args: as for `keras.layers.Embedding`.
        slicing: "row" sends an id to the rank of its row; "column" to all ranks, each
            of which returns a part of the row.
        mesh: a `Mesh`; the ranks are those of its axis data.
        weights: initial values of the dense table, of shape (input_dim, output_dim).
        **kwargs: as for `keras.layers.Embedding`.

    Raises:
        ValueError: for another `slicing`, and for `lora_rank`, quantization, and
            regularizers and constraints that need all of the table.
        tensorflow.errors.InvalidArgumentError: in a call, on all ranks, for an id that
            is not a row of the table.
    """

    own_arguments = ("slicing",)

    def __init__(
        self,
        input_dim,
        output_dim,
        *args,
        slicing="row",
        mesh=None,
        weights=None,
        **kwargs,
    ):
        if slicing not in _AXES:
            raise ValueError(
                f'slicing must be "row" or "column". Received: slicing={slicing!r}'
            )
        super().__init__(input_dim, output_dim, *args, **kwargs)
        self.slicing = slicing
        self._divide(_AXES[slicing], data_axis(mesh))
        if weights is not None:
            self.build()
            (dense,) = weights if isinstance(weights, list) else [weights]
            assign_shard(self.embeddings, np.asarray(dense))


def _check_constraint(layer, axis):
    constraint = layer.embeddings_constraint
    if constraint is None or isinstance(constraint, keras.constraints.NonNeg):
        return
    if axis == 1 or getattr(constraint, "axis", None) not in (1, -1, [1]):
        raise ValueError(
            f"{type(layer).__name__} supports NonNeg as embeddings_constraint, and "
            f"where rows are divided those of axis=1. Received: {constraint!r}"
        )
