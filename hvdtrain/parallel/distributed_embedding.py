"""Many embedding tables, distributed over the data ranks.

Names, defaults and meaning follow NVIDIA Merlin's distributed-embeddings.
"""

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.keras.gradients import update_rows_once
from hvdtrain.parallel.embedding import (
    Embedding,
    Ids,
    ShardedTable,
    as_ragged,
    combine,
    get_combiner,
    get_ids,
    output_shape,
)
from hvdtrain.parallel.exchange import look_up, look_up_for_all
from hvdtrain.parallel.mesh import Axes, Axis, Mesh, data_axis
from hvdtrain.parallel.placement import Placement, place
from hvdtrain.sharding.full_values import FullValues, FullVariable
from hvdtrain.sharding.shards import assign_shard, get_sharding


@keras.saving.register_keras_serializable("hvdtrain")
class DistributedEmbedding(keras.layers.Layer):
    """Embedding tables that are distributed over the data ranks.

    A list of inputs goes to a list of tables, as in

        [table(ids) for table, ids in zip(tables, inputs)]

    with ids of this rank. A table is on one rank, sharded or replicated: `placements`
    has the result. Outputs, initial values and updates equal those of replicated tables
    with dense gradients and the batch of all ranks. One exchange serves all tables; see
    `exchange`.

        embedding = DistributedEmbedding(
            [keras.layers.Embedding(rows, 64) for rows in (10, 1000, 10_000_000)],
            strategy="memory_balanced",
            row_slice_threshold=10_000_000,
        )
        outputs = embedding([first_ids, second_ids, third_ids])

    All data ranks call it equally often; a rank may have fewer samples than others.
    Without `with mesh:` and `mesh`, all ranks of the job are data ranks.

    Args:
        embeddings: `keras.layers.Embedding` layers that are not built, or `Embedding`
            layers with a combiner. Tables that are sharded have one dtype.
        strategy: see `placement.place`, also for the three thresholds.
        dp_input: whether each rank gives its samples for all inputs. If not, it gives
            all ranks' samples, rank 0's first, for the inputs of the tables of which it
            holds a shard, `input_ids_list[rank]`; all ranks have equally many samples.
            Outputs are then of the shape (samples of this rank, ids of a sample,
            columns), and no table is replicated or sharded by rows.
        input_table_map: number of the table of each input; by default one input for
            each table.
        mesh: a `Mesh`, whose axis data has the ranks.

    Attributes:
        tables: the layers, in the order of `embeddings`.
        placements: their `Placement`s; None for a table that is replicated.

    Raises:
        ValueError: for arguments out of range, and for tables that are built.
        tensorflow.errors.InvalidArgumentError: in a call, on all ranks, for an id that
            is not a row of its table, and with `dp_input=False` for a number of samples
            that is no multiple of the ranks.
    """

    def __init__(
        self,
        embeddings: Sequence[keras.layers.Embedding],
        strategy: str = "basic",
        column_slice_threshold: float | None = None,
        row_slice_threshold: float | None = None,
        dp_input: bool = True,
        input_table_map: Sequence[int] | None = None,
        data_parallel_threshold: float | None = None,
        mesh: Mesh | Axes | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        # Each table has its own compute dtype. A cast of the layer's variables would
        # read, and so copy, the tables.
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
        _check_tables(embeddings, self.input_table_map)
        self.placements: list[Placement | None] = [None] * len(embeddings)
        if needs_communication(self.data_axis.process_set):
            self.placements = place(
                [(table.input_dim, table.output_dim) for table in embeddings],
                self.data_axis.size,
                strategy=strategy,
                column_slice_threshold=column_slice_threshold,
                row_slice_threshold=row_slice_threshold if dp_input else None,
                data_parallel_threshold=data_parallel_threshold if dp_input else None,
            )
        self.tables = [
            table if placement is None else _Table(table, placement, self.data_axis)
            for table, placement in zip(embeddings, self.placements, strict=True)
        ]
        self.supports_masking = dp_input and any(e.mask_zero for e in embeddings)

    @property
    def input_ids_list(self) -> list[list[int]]:
        """For each rank, the indices of the inputs that its tables look up."""
        return [
            [
                i
                for i, table in enumerate(self.input_table_map)
                if _holds(self.placements[table], rank)
            ]
            for rank in range(self.data_axis.size)
        ]

    def build(self, input_shape: object = None) -> None:
        for table in self.tables:
            table.build()
            # Also for a replicated table, which is a layer of Keras.
            for variable in table.variables:
                update_rows_once(variable)
        self.built = True

    def call(self, inputs: Sequence[Ids]) -> list[tf.Tensor | tf.RaggedTensor]:
        """Return the outputs, in the order of all inputs.

        Args:
            inputs: ids; for a table with a combiner also as `tf.RaggedTensor` or
                `tf.SparseTensor`. See `dp_input`.
        """
        if not self.dp_input and any(self.placements):
            return self._call_for_all(inputs)
        inputs = [as_ragged(x) for x in inputs]
        rows = _look_up_inputs(
            self.tables, self.input_table_map, [get_ids(x) for x in inputs]
        )
        return [
            combine(x, x_rows, get_combiner(table))
            for x, x_rows, table in zip(
                inputs, rows, self._list_input_tables(), strict=True
            )
        ]

    def _list_input_tables(self) -> list[keras.layers.Embedding]:
        # Not a property: Keras would save the tables as an attribute of this name.
        return [self.tables[number] for number in self.input_table_map]

    def _call_for_all(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if not all(self.input_ids_list):
            raise ValueError(
                "With dp_input=False each rank needs a table, of which it takes the "
                f"inputs. Received: input_ids_list={self.input_ids_list}. Use fewer "
                "ranks, dp_input=True, or a lower column_slice_threshold."
            )
        numbers = self.input_ids_list[self.data_axis.index]
        if len(inputs) != len(numbers):
            raise ValueError(
                f"With dp_input=False this rank takes the inputs {numbers}, see "
                f"input_ids_list. Received: {len(inputs)} inputs"
            )
        all_samples = tf.shape(inputs[0])[0]
        tables = self._list_input_tables()
        ids: list[tf.Tensor | None] = [None] * len(tables)
        for i, x in zip(numbers, inputs, strict=True):
            ids[i] = get_ids(x)
        variables = [table.embeddings for table in tables]
        rows = look_up_for_all(variables, ids, all_samples)
        samples = all_samples // self.data_axis.size
        outputs = []
        for table_rows, table in zip(rows, tables, strict=True):
            per_sample = tf.shape(table_rows)[0] // tf.maximum(samples, 1)
            shaped = tf.reshape(table_rows, [samples, per_sample, table.output_dim])
            shaped = tf.cast(shaped, table.compute_dtype)
            outputs.append(combine(None, shaped, table.combiner))
        return outputs

    def compute_output_spec(self, inputs: Sequence[Ids]) -> list[keras.KerasTensor]:
        tables = self._list_input_tables()
        shapes: list[tuple[int | None, ...]] = [(None, None)] * len(tables)
        if self.dp_input:
            shapes = [x.shape for x in inputs]
        return [
            keras.KerasTensor(output_shape(table, shape), dtype=table.compute_dtype)
            for table, shape in zip(tables, shapes, strict=True)
        ]

    def compute_mask(
        self, inputs: Sequence[Ids], mask: object = None
    ) -> list[tf.Tensor | None]:
        pairs = zip(self._list_input_tables(), inputs, strict=False)
        return [table.compute_mask(x) for table, x in pairs]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, with layers of full tables and without the mesh."""
        embeddings = [
            {**table.get_config(), "combiner": get_combiner(table)}
            for table in self.tables
        ]
        return {**super().get_config(), **self._options, "embeddings": embeddings}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DistributedEmbedding":
        """Return a layer with all full tables on this rank, from a config.

        One rank of a job can so load a saved model. If the config has a `mesh`, the
        tables are distributed over its data ranks.
        """
        embeddings = [Embedding.from_config(table) for table in config["embeddings"]]
        return cls(**{"mesh": Axes(), **config, "embeddings": embeddings})

    def clone_sharded(self) -> "DistributedEmbedding":
        """Return a new layer with the same placements and new weights."""
        axes = Axes(data=self.data_axis)
        return type(self).from_config({**self.get_config(), "mesh": axes})

    def get_weights(self, all_ranks: bool = False) -> list[np.ndarray]:
        """Return the full tables as NumPy arrays. A collective of all ranks.

        Args:
            all_ranks: whether all ranks return them. If not, rank 0 does, and the
                others return an empty list.
        """
        described = [FullVariable.of(table.embeddings) for table in self.tables]
        values = FullValues(described)
        weights = [values.gather(number) for number in range(len(described))]
        if all_ranks:
            weights = [
                ops.broadcast(np.zeros(v.shape, v.dtype) if w is None else w, 0).numpy()
                for v, w in zip(described, weights, strict=True)
            ]
        return [weight for weight in weights if weight is not None]

    def set_weights(
        self,
        weights: Sequence[np.ndarray | str | os.PathLike],
        chunk: int = 134217728,
        use_lock: bool = False,
    ) -> None:
        """Assign to each rank its shards of full tables.

        Args:
            weights: arrays, or paths of `.npy` files, of the full tables; the same on
                all ranks. A rank reads only its shard of a file.
            chunk: an argument of NVIDIA's, without effect: shards are not chunked.
            use_lock: an argument of NVIDIA's, without effect: ranks do not take turns.

        Raises:
            ValueError: if there are not as many as tables, or for another shape.
        """
        if len(weights) != len(self.tables):
            raise ValueError(
                f"Expected weights of {len(self.tables)} tables. Received: "
                f"{len(weights)}"
            )
        for table, weight in zip(self.tables, weights, strict=True):
            if isinstance(weight, str | os.PathLike):
                weight = np.load(weight, mmap_mode="r")
            shape = (table.input_dim, table.output_dim)
            if tuple(weight.shape) != shape:
                raise ValueError(
                    f"Expected weights of the shape {shape} for {table.name}. "
                    f"Received: {tuple(weight.shape)}"
                )
            assign_shard(table.embeddings, weight)


def _holds(placement: Placement | None, rank: int) -> bool:
    return placement is None or placement.sizes[rank] > 0


class _Table(ShardedTable):
    """A table that is sharded by its placement."""

    def __init__(
        self, embedding: keras.layers.Embedding, placement: Placement, data: Axis
    ) -> None:
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
        self.combiner = get_combiner(embedding)
        self._set_sharding(placement.axis, data, placement.sizes)

    def compute_mask(self, inputs: Ids, mask: object = None) -> tf.Tensor | None:
        return None if self.combiner else super().compute_mask(inputs, mask)


def _look_up_inputs(
    tables: Sequence[keras.layers.Embedding],
    input_table_map: Sequence[int],
    ids: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Return the rows of each input, from built tables, sharded or replicated."""
    # The inputs of one table are looked up together: its gradient has each row once.
    inputs_by_table: dict[int, list[int]] = {}
    for i, table in enumerate(input_table_map):
        inputs_by_table.setdefault(table, []).append(i)
    ids_by_table = {
        table: tf.concat([tf.reshape(ids[i], [-1]) for i in numbers], axis=0)
        for table, numbers in inputs_by_table.items()
    }
    sharded = [n for n in ids_by_table if get_sharding(tables[n].embeddings)]
    rows_by_table = {
        table: _look_up_replicated(tables[table], ids_by_table[table])
        for table in ids_by_table
        if table not in sharded
    }
    if sharded:
        variables = [tables[table].embeddings for table in sharded]
        sharded_rows = look_up(variables, [ids_by_table[table] for table in sharded])
        rows_by_table.update(zip(sharded, sharded_rows, strict=True))
    rows: list[tf.Tensor] = [None] * len(ids)
    for table, numbers in inputs_by_table.items():
        sizes = [tf.size(ids[i]) for i in numbers]
        values = tf.split(rows_by_table[table], sizes)
        for i, input_rows in zip(numbers, values, strict=True):
            rows[i] = _reshape_rows(input_rows, ids[i], tables[table])
    return rows


def _look_up_replicated(table: keras.layers.Embedding, ids: tf.Tensor) -> tf.Tensor:
    if not isinstance(table.embeddings, keras.Variable):
        # With LoRA, it is a sum. The method of Keras' class returns rows: a subclass
        # with a combiner would combine them, without the structure of the inputs.
        return keras.layers.Embedding.call(table, ids)
    # tf.gather on the variable itself reads these rows only. Keras' take reads the
    # table, and an update of a table that a step has read copies it.
    ids = tf.where(ids < 0, ids + table.input_dim, ids)
    return tf.cast(tf.gather(table.embeddings.value, ids), table.compute_dtype)


def _reshape_rows(
    rows: tf.Tensor, ids: tf.Tensor, table: keras.layers.Embedding
) -> tf.Tensor:
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), [table.output_dim]], axis=0))
    rows = tf.ensure_shape(rows, [*ids.shape, table.output_dim])
    return tf.cast(rows, table.compute_dtype)


def _check_tables(
    embeddings: Sequence[keras.layers.Embedding], input_table_map: Sequence[int]
) -> None:
    for table in embeddings:
        if not isinstance(table, keras.layers.Embedding) or table.built:
            raise ValueError(
                "embeddings must be keras.layers.Embedding layers that are not built. "
                f"Received: {table!r}"
            )
    if len({table.variable_dtype for table in embeddings}) > 1:
        raise ValueError(
            "The tables must have one dtype. Received: "
            f"{', '.join(table.variable_dtype for table in embeddings)}"
        )
    if not set(input_table_map) <= set(range(len(embeddings))):
        raise ValueError(
            f"input_table_map must have numbers of {len(embeddings)} tables. "
            f"Received: {input_table_map}"
        )
