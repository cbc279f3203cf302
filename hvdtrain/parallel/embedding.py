"""Embeddings of which each data rank has some rows or some columns."""

import keras
import numpy as np
from keras import ops

from hvdtrain.collectives import ops as collectives
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Sum
from hvdtrain.keras import collective_calls
from hvdtrain.keras.gradients import update_rows_once
from hvdtrain.keras.partition import Partition, assign_part
from hvdtrain.parallel.combining import ids_of
from hvdtrain.parallel.divided_weights import DividedWeights, check_arguments
from hvdtrain.parallel.exchange import look_up
from hvdtrain.parallel.mesh import Axes, data_axis

_AXES = {"row": 0, "column": 1}


class DividedEmbedding(DividedWeights, keras.layers.Embedding):
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

    def clone_divided(self) -> keras.layers.Layer:
        """Return a new layer that is divided alike, with new weights."""
        return self.remade(Axes(data=self.data_axis))

    @property
    def divided_axes(self):
        """The divided axis of the table."""
        return {"embeddings": self.axis}

    def partition(self, axis, size):
        """Return the `Partition` of an axis of `size` elements over the data ranks."""
        return Partition(
            axis=axis,
            size=size,
            parts=self.data_axis.size,
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
    def sum_of_penalties(penalty, partition):
        """Return the penalty of the dense table.

        Its gradient is that of the sum of all ranks' losses, as for the rows.
        """
        if not needs_communication(partition.process_set):
            return penalty
        return collectives.allreduce(
            penalty, "Penalty", op=Sum, process_set=partition.process_set
        )

    def call(self, inputs):
        """Return the rows of the dense table. All data ranks call it together."""
        if not needs_communication(self.data_axis.process_set):
            return super().call(inputs)
        (rows,) = look_up([self.embeddings], [ids_of(inputs)])
        return ops.cast(rows, self.compute_dtype)


class ShardedEmbedding(DividedEmbedding):
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
            assign_part(self.embeddings, np.asarray(dense))


def _check_constraint(layer, axis):
    constraint = layer.embeddings_constraint
    if constraint is None or isinstance(constraint, keras.constraints.NonNeg):
        return
    if axis == 1 or getattr(constraint, "axis", None) not in (1, -1, [1]):
        raise ValueError(
            f"{type(layer).__name__} supports NonNeg as embeddings_constraint, and "
            f"where rows are divided those of axis=1. Received: {constraint!r}"
        )
