"""Embeddings whose rows or columns are sharded over the data ranks."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from hvdtrain.collectives import ops as collectives
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Sum
from hvdtrain.keras import sharded_models
from hvdtrain.keras.gradients import update_rows_once
from hvdtrain.parallel.exchange import look_up
from hvdtrain.parallel.layer import ShardedWeights, check_arguments
from hvdtrain.parallel.mesh import Axes, Axis, Mesh, data_axis
from hvdtrain.sharding.shards import Shape, Sharding, assign_shard

# Ids of a layer; a tf.RaggedTensor or tf.SparseTensor for a layer with a combiner.
Ids: TypeAlias = tf.Tensor | tf.RaggedTensor | tf.SparseTensor

_COMBINERS = (None, "sum", "mean")


class Embedding(keras.layers.Embedding):
    """`keras.layers.Embedding` with a combiner, as NVIDIA's distributed-embeddings has.

    Args:
        combiner: "sum" or "mean" combines the rows along the last axis of the ids; None
            returns all rows. The combination of no rows is zero.
        others: as for `keras.layers.Embedding`.

    Raises:
        ValueError: for another combiner.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *args: Any,
        combiner: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_dim, output_dim, *args, **kwargs)
        if combiner not in _COMBINERS:
            raise ValueError(
                f'combiner must be None, "sum" or "mean". Received: {combiner!r}'
            )
        self.combiner = combiner

    def call(self, inputs: Ids) -> tf.Tensor | tf.RaggedTensor:
        """Return rows or their combinations.

        Args:
            inputs: ids, of the shape (..., ids of a sample); a `tf.RaggedTensor` or
                `tf.SparseTensor` of the shape (samples, None).
        """
        inputs = as_ragged(inputs)
        return combine(inputs, super().call(get_ids(inputs)), self.combiner)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return output_shape(self, input_shape)

    def compute_mask(self, inputs: Ids, mask: object = None) -> tf.Tensor | None:
        # A combination is of many ids.
        return None if self.combiner else super().compute_mask(inputs, mask)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "combiner": self.combiner}


def get_combiner(embedding: keras.layers.Embedding) -> str | None:
    """Return the combiner of a layer; Keras' own Embedding has none."""
    return getattr(embedding, "combiner", None)


def output_shape(
    embedding: keras.layers.Embedding, input_shape: tuple[int | None, ...]
) -> tuple[int | None, ...]:
    """Return the shape of an embedding's output, for the shape of the ids."""
    leading = input_shape[:-1] if get_combiner(embedding) else input_shape
    return (*leading, embedding.output_dim)


def as_ragged(inputs: Ids) -> tf.Tensor | tf.RaggedTensor:
    """Return a `tf.SparseTensor` as a `tf.RaggedTensor`, and others as they are."""
    is_sparse = isinstance(inputs, tf.SparseTensor)
    return tf.RaggedTensor.from_sparse(inputs) if is_sparse else inputs


def get_ids(inputs: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
    """Return the ids as a tensor, cast to an integer dtype as Keras' Embedding does."""
    if isinstance(inputs, tf.RaggedTensor):
        inputs = inputs.flat_values
    is_integer = inputs.dtype in ("int32", "int64")
    return inputs if is_integer else ops.cast(inputs, "int32")


def combine(
    inputs: tf.Tensor | tf.RaggedTensor, rows: tf.Tensor, combiner: str | None
) -> tf.Tensor | tf.RaggedTensor:
    """Return the rows of `get_ids(inputs)` as `inputs` are structured, or combined."""
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
    """`keras.layers.Embedding` whose table is sharded over the data ranks.

    Subclasses call `_set_sharding` before the layer is built.
    """

    def _set_sharding(
        self, axis: int, data: Axis, uneven: tuple[int, ...] | None = None
    ) -> None:
        """Shard rows (axis 0) or columns (1), evenly or in `uneven` numbers by rank."""
        sharded_models.install()
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

    def clone_sharded(self) -> "ShardedTable":
        return self.clone_for_mesh(Axes(data=self.data_axis))

    @property
    def sharded_axes(self) -> Mapping[str, int]:  # type: ignore[override]  # by layer
        return {"embeddings": self.axis}

    def make_sharding(self, axis: int, size: int) -> Sharding:
        return Sharding(
            axis=axis,
            size=size,
            num_shards=self.data_axis.size,
            rank=self.data_axis.index,
            process_set=self.data_axis.process_set,
            uneven=self.uneven,
            sums_gradients=True,
        )

    def build(self, input_shape: Shape | None = None) -> None:
        super().build(input_shape)
        update_rows_once(self.embeddings)

    @staticmethod
    def sum_penalties(penalty: tf.Tensor, sharding: Sharding) -> tf.Tensor:
        # The gradient must be summed over the losses of all ranks, as the gradients of
        # the rows are: the gradient of `mappings.reduce` is that of one loss.
        if not needs_communication(sharding.process_set):
            return penalty
        return collectives.allreduce(
            penalty, "Penalty", op=Sum, process_set=sharding.process_set
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Return the full rows. A collective of the data ranks."""
        if not needs_communication(self.data_axis.process_set):
            return super().call(inputs)
        (rows,) = look_up([self.embeddings], [get_ids(inputs)])
        return ops.cast(rows, self.compute_dtype)


class ShardedEmbedding(ShardedTable):
    """`keras.layers.Embedding` whose table is sharded over the data ranks.

    Each rank has some rows of the table, or some columns of all rows, with the slots of
    the optimizer for them: 1/N of the memory. Each rank looks up the ids of its own
    samples. One alltoall sends every distinct id to the ranks that have its row, a
    second one returns the rows, and a third one sends the gradients, one for each
    distinct row. Outputs and updates equal those of a replicated table with dense
    gradients and the batch of all ranks, on any number of ranks:

        model = keras.Sequential([parallel.ShardedEmbedding(10_000_000, 64), ...])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")

    All data ranks call it equally often, also to evaluate or predict; a rank may have
    fewer ids than others, or none. Without `with mesh:` and `mesh`, all ranks of the
    job are data ranks.

    Args:
        input_dim: rows of the full table.
        output_dim: columns of the full table.
        slicing: "row" sends an id to the rank that has its row; "column" sends it to
            all ranks, each of which returns its columns of the row.
        mesh: a `Mesh`, whose axis data has the ranks.
        weights: initial value of the full table, of shape (input_dim, output_dim).
        others: as for `keras.layers.Embedding`.

    Raises:
        ValueError: for another `slicing`, and for `lora_rank`, quantization, and
            regularizers and constraints that need the full table.
        tensorflow.errors.InvalidArgumentError: in a call, on all ranks, for an id that
            is not a row of the table.
    """

    own_arguments = ("slicing",)

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        *args: Any,
        slicing: str = "row",
        mesh: Mesh | Axes | None = None,
        weights: np.ndarray | list[np.ndarray] | None = None,
        **kwargs: Any,
    ) -> None:
        if slicing not in _AXES:
            raise ValueError(
                f'slicing must be "row" or "column". Received: slicing={slicing!r}'
            )
        super().__init__(input_dim, output_dim, *args, **kwargs)
        self.slicing = slicing
        self._set_sharding(_AXES[slicing], data_axis(mesh))
        if weights is not None:
            self.build()
            (full,) = weights if isinstance(weights, list) else [weights]
            assign_shard(self.embeddings, np.asarray(full))


def _check_constraint(layer: ShardedTable, axis: int) -> None:
    constraint = layer.embeddings_constraint
    if constraint is None or isinstance(constraint, keras.constraints.NonNeg):
        return
    if axis == 1 or getattr(constraint, "axis", None) not in (1, -1, [1]):
        raise ValueError(
            f"{type(layer).__name__} supports NonNeg as embeddings_constraint, and "
            f"if it is sharded by rows, constraints of axis=1. Received: {constraint!r}"
        )
