"""Embedding tables of which some ranks hold parts, and their dense weights."""

import os

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.keras.dense_values import DenseValues, DenseVariable
from hvdtrain.keras.partition import assign_part, partition_of
from hvdtrain.parallel.embedding import DividedEmbedding, combiner_of
from hvdtrain.parallel.exchange import look_up


class PlacedEmbedding(DividedEmbedding):
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
    divided = [table for table in flat if partition_of(tables[table].embeddings)]
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
    described = [DenseVariable.of(table.embeddings) for table in tables]
    values = DenseValues(described)
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
        assign_part(table.embeddings, dense)


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
