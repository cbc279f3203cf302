"""Embeddings that combine the rows of a sample's ids."""

import keras
import tensorflow as tf
from keras import ops

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
        inputs = without_gaps(inputs)
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


def without_gaps(inputs):
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
