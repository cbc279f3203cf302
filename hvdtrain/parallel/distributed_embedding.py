"""Many embedding tables, placed over the data ranks.

Names, defaults and meaning follow NVIDIA Merlin's distributed-embeddings.
"""

import os

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.keras.gradients import update_rows_once
from hvdtrain.parallel.embedding import (
    Embedding,
    ShardedTable,
    as_ragged,
    combine,
    combiner_of,
    ids_of,
    output_shape,
)
from hvdtrain.parallel.exchange import look_up, look_up_for_all
from hvdtrain.parallel.mesh import Axes, data_axis
from hvdtrain.parallel.placement import place
from hvdtrain.sharding.full_values import FullValues, FullVariable
from hvdtrain.sharding.shards import assign_shard, get_sharding


class PlacedTable(ShardedTable):
    """The part of a table that this rank holds.

    Args:
        embedding: the dense layer, not built.
        placement: its `Placement`.
        data: the `Axis` of a mesh over which it is divided.
    """

    def __init__(self, embedding, placement, data):
        super().__init__(
            embedding.input_dim,
            embedding.output_dim,
            embeddings_initializer=embedding.embeddings_initializer,
            embeddings_regularizer=embedding.embeddings_regularizer,
            embeddings_constraint=embedding.embeddings_constraint,
            mask_zero=embedding.mask_zero,
            name=embedding.name,
            dtype=embedding.dtype_policy,
            trainable=embedding.trainable,
        )
        self.combiner = combiner_of(embedding)
        self._divide(placement.axis, data, placement.sizes)

    def compute_mask(self, inputs, mask=None):
        """As that of the dense layer."""
        return None if self.combiner else super().compute_mask(inputs, mask)


def rows_of_inputs(tables, input_table_map, ids):
    """Return the rows of a list of tensors of ids, one for each input.

    Args:
        tables: list of layers that are built, whole or divided.
        input_table_map: number of the table of each input.
        ids: list of tensors of integers.
    """
    # Inputs of one table are looked up together: its gradient has each row once.
    inputs = {}
    for i, table in enumerate(input_table_map):
        inputs.setdefault(table, []).append(i)
    flat = {
        table: tf.concat([tf.reshape(ids[i], [-1]) for i in numbers], axis=0)
        for table, numbers in inputs.items()
    }
    divided = [table for table in flat if get_sharding(tables[table].embeddings)]
    # Of Keras' own class: a combiner needs the inputs' structure.
    found = {
        table: keras.layers.Embedding.call(tables[table], flat[table])
        for table in flat
        if table not in divided
    }
    if divided:
        variables = [tables[table].embeddings for table in divided]
        rows = look_up(variables, [flat[table] for table in divided])
        found.update(zip(divided, rows, strict=True))
    rows = [None] * len(ids)
    for table, numbers in inputs.items():
        sizes = [tf.size(ids[i]) for i in numbers]
        for i, piece in zip(numbers, tf.split(found[table], sizes), strict=True):
            rows[i] = _in_shape(piece, ids[i], tables[table])
    return rows


def _in_shape(rows, ids, table):
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), [table.output_dim]], axis=0))
    rows = tf.ensure_shape(rows, [*ids.shape, table.output_dim])
    return tf.cast(rows, table.compute_dtype)


def dense_weights(tables, all_ranks):
    """Return the weights of dense tables as NumPy arrays. A collective of all ranks.

    Args:
        tables: list of layers that are built.
        all_ranks: whether all ranks return them, or rank 0, and the others none.
    """
    described = [FullVariable.of(table.embeddings) for table in tables]
    values = FullValues(described)
    weights = [values.gather(number) for number in range(len(described))]
    if all_ranks:
        weights = [
            ops.broadcast(np.zeros(v.shape, v.dtype) if w is None else w, 0).numpy()
            for v, w in zip(described, weights, strict=True)
        ]
    return [weight for weight in weights if weight is not None]


def assign_dense_weights(tables, weights):
    """Assign to tables this rank's parts of arrays, or of `.npy` files by their paths.

    Raises:
        ValueError: for another number, or shape, than those of the dense tables.
    """
    if len(weights) != len(tables):
        raise ValueError(
            f"Expected weights of {len(tables)} tables. Received: {len(weights)}"
        )
    for table, weight in zip(tables, weights, strict=True):
        is_path = isinstance(weight, str | os.PathLike)
        dense = np.load(weight, mmap_mode="r") if is_path else weight
        shape = (table.input_dim, table.output_dim)
        if tuple(dense.shape) != shape:
            raise ValueError(
                f"Expected weights of the shape {shape} for {table.name}. Received: "
                f"{tuple(dense.shape)}"
            )
        assign_shard(table.embeddings, dense)


def check_tables(embeddings, input_table_map):
    """Raise a ValueError for what a DistributedEmbedding does not take."""
    for each in embeddings:
        if not isinstance(each, keras.layers.Embedding) or each.built:
            raise ValueError(
                "embeddings must be keras.layers.Embedding layers that are not built. "
                f"Received: {each!r}"
            )
    if len({each.variable_dtype for each in embeddings}) > 1:
        raise ValueError(
            "The tables must have one dtype. Received: "
            f"{', '.join(each.variable_dtype for each in embeddings)}"
        )
    if not set(input_table_map) <= set(range(len(embeddings))):
        raise ValueError(
            f"input_table_map must have numbers of {len(embeddings)} tables. "
            f"Received: {input_table_map}"
        )


@keras.saving.register_keras_serializable("hvdtrain")
class DistributedEmbedding(keras.layers.Layer):
    """Embedding tables that are placed over the data ranks.

    A list of inputs goes to a list of tables, as in

        [table(ids) for table, ids in zip(tables, inputs)]

    with ids of this rank. Outputs, initial values and updates are those of dense tables
    with dense gradients and the batch of all ranks, wherever a table is placed; one
    exchange serves all tables, see `exchange`.

        embedding = DistributedEmbedding(
            [keras.layers.Embedding(rows, 64) for rows in (10, 1000, 10_000_000)],
            strategy="memory_balanced",
            row_slice_threshold=10_000_000,
        )
        outputs = embedding([first_ids, second_ids, third_ids])

    All data ranks call it equally often; a rank may have fewer samples than others.
    Without `with mesh:` and `mesh`, all ranks of the job are data ranks.

    Args:
        embeddings: list of `keras.layers.Embedding` that are not built, or `Embedding`
            with a combiner. Tables that are divided have one dtype.
        strategy: see `placement.place`, also for the three thresholds.
        column_slice_threshold: see there.
        row_slice_threshold: see there.
        dp_input: whether each rank gives its samples for all inputs. If not, it gives
            all ranks' samples, rank 0's first, for the inputs of the tables that it
            holds, which `input_ids_list[rank]` numbers; all ranks have equally many
            samples. Outputs are then of the shape (samples of this rank, ids of a
            sample, columns). Tables are then neither divided by row nor held by all.
        input_table_map: list of the number of the table of each input; by default one
            input for each table.
        data_parallel_threshold: see `placement.place`.
        mesh: a `Mesh`; the ranks are those of its axis data.
        **kwargs: as for `keras.layers.Layer`.

    Attributes:
        tables: the layers, in the order of `embeddings`.
        placements: their `Placement`s; None for a table that all ranks hold.
        input_ids_list: list of the inputs of each rank's tables.

    Raises:
        ValueError: for arguments out of range, and for tables that are built.
        tensorflow.errors.InvalidArgumentError: in a call, on all ranks, for an id that
            is not a row of its table, and with `dp_input=False` for a number of samples
            that is no multiple of the ranks.
    """

    def __init__(
        self,
        embeddings,
        strategy="basic",
        column_slice_threshold=None,
        row_slice_threshold=None,
        dp_input=True,
        input_table_map=None,
        data_parallel_threshold=None,
        mesh=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        # The compute dtype is that of the tables; a cast would read them whole.
        self.autocast = False
        self.dp_input = dp_input
        self._options = {
            "strategy": strategy,
            "column_slice_threshold": column_slice_threshold,
            "row_slice_threshold": row_slice_threshold,
            "dp_input": dp_input,
            "input_table_map": input_table_map,
            "data_parallel_threshold": data_parallel_threshold,
        }
        self.data_axis = data_axis(mesh)
        if input_table_map is None:
            input_table_map = range(len(embeddings))
        self.input_table_map = list(input_table_map)
        check_tables(embeddings, self.input_table_map)
        self.placements = [None] * len(embeddings)
        if needs_communication(self.data_axis.process_set):
            self.placements = place(
                [(each.input_dim, each.output_dim) for each in embeddings],
                self.data_axis.size,
                strategy=strategy,
                column_slice_threshold=column_slice_threshold,
                row_slice_threshold=row_slice_threshold if dp_input else None,
                data_parallel_threshold=data_parallel_threshold if dp_input else None,
            )
        self.tables = [
            each if placement is None else PlacedTable(each, placement, self.data_axis)
            for each, placement in zip(embeddings, self.placements, strict=True)
        ]
        self.supports_masking = dp_input and any(e.mask_zero for e in embeddings)

    @property
    def input_ids_list(self):
        """The numbers of the inputs of each rank's tables."""
        return [
            [
                i
                for i, table in enumerate(self.input_table_map)
                if _holds(self.placements[table], rank)
            ]
            for rank in range(self.data_axis.size)
        ]

    def build(self, input_shape=None):
        """Make the tables, each rank its parts."""
        for table in self.tables:
            table.build()
            # Also of a table that all ranks hold.
            for variable in table.variables:
                update_rows_once(variable)
        self.built = True

    def call(self, inputs):
        """Return a list of outputs, in the order of all inputs.

        Args:
            inputs: list of tensors of ids; where a table has a combiner also
                `tf.RaggedTensor` or `tf.SparseTensor`. See `dp_input`.
        """
        if not self.dp_input and any(self.placements):
            return self._call_for_all(inputs)
        inputs = [as_ragged(each) for each in inputs]
        rows = rows_of_inputs(
            self.tables, self.input_table_map, [ids_of(each) for each in inputs]
        )
        return [
            combine(each, of_ids, combiner_of(self._table_of(i)))
            for i, (each, of_ids) in enumerate(zip(inputs, rows, strict=True))
        ]

    def _table_of(self, number):
        return self.tables[self.input_table_map[number]]

    def _call_for_all(self, inputs):
        if not all(self.input_ids_list):
            raise ValueError(
                "With dp_input=False each rank needs a table, of which it takes the "
                f"inputs. Received: input_ids_list={self.input_ids_list}. Use fewer "
                "ranks, dp_input=True, or a lower column_slice_threshold."
            )
        mine = self.input_ids_list[self.data_axis.index]
        if len(inputs) != len(mine):
            raise ValueError(
                f"With dp_input=False this rank takes the inputs {mine}, see "
                f"input_ids_list. Received: {len(inputs)} inputs"
            )
        all_samples = tf.shape(inputs[0])[0]
        ids = [None] * len(self.input_table_map)
        for i, each in zip(mine, inputs, strict=True):
            ids[i] = ids_of(each)
        tables = list(map(self._table_of, range(len(ids))))
        variables = [table.embeddings for table in tables]
        rows = look_up_for_all(variables, ids, all_samples)
        samples = all_samples // self.data_axis.size
        outputs = []
        for each, table in zip(rows, tables, strict=True):
            per_sample = tf.shape(each)[0] // tf.maximum(samples, 1)
            shaped = tf.reshape(each, [samples, per_sample, table.output_dim])
            shaped = tf.cast(shaped, table.compute_dtype)
            outputs.append(combine(None, shaped, table.combiner))
        return outputs

    def compute_output_spec(self, inputs):
        """Return the shapes and dtypes of the outputs."""
        tables = list(map(self._table_of, range(len(self.input_table_map))))
        shapes = [(None, None)] * len(tables)
        if self.dp_input:
            shapes = [each.shape for each in inputs]
        return [
            keras.KerasTensor(output_shape(table, shape), dtype=table.compute_dtype)
            for table, shape in zip(tables, shapes, strict=True)
        ]

    def compute_mask(self, inputs, mask=None):
        """Return a list of the masks of the outputs."""
        return [self._table_of(i).compute_mask(each) for i, each in enumerate(inputs)]

    def get_config(self):
        """Return the arguments, with the dense layers; without the mesh."""
        embeddings = [
            {**table.get_config(), "combiner": combiner_of(table)}
            for table in self.tables
        ]
        return {**super().get_config(), **self._options, "embeddings": embeddings}

    @classmethod
    def from_config(cls, config):
        """Return a layer with all tables on this rank, from what `get_config` returned.

        Also in a job: one rank can load a saved model. With `mesh` in `config`, the
        tables are placed over its data ranks.
        """
        embeddings = [Embedding.from_config(each) for each in config["embeddings"]]
        return cls(**{"mesh": Axes(), **config, "embeddings": embeddings})

    def clone_sharded(self) -> keras.layers.Layer:
        """Return a new layer whose tables are placed alike, with new weights."""
        axes = Axes(data=self.data_axis)
        return type(self).from_config({**self.get_config(), "mesh": axes})

    def get_weights(self, all_ranks=False):
        """Return the dense tables as NumPy arrays. A collective of all ranks.

        Args:
            all_ranks: whether all ranks return them. If not, rank 0 does, and the
                others return an empty list.
        """
        return dense_weights(self.tables, all_ranks)

    def set_weights(self, weights, chunk=134217728, use_lock=False):
        """Assign to each rank its parts of dense tables.

        Args:
            weights: list of arrays, or paths of `.npy` files, of the dense tables; the
                same on all ranks. Of a file, a rank reads its part.
            chunk: NVIDIA's, without effect: parts are assigned as a whole.
            use_lock: NVIDIA's, without effect: ranks assign at the same time.

        Raises:
            ValueError: if there are not as many as tables, or for another shape.
        """
        assign_dense_weights(self.tables, weights)


def _holds(placement, rank):
    return placement is None or placement.sizes[rank] > 0
