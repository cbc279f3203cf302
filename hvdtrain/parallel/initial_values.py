"""Initial values of a slice of a variable: those of the dense one, bit for bit."""

import math

import keras
import numpy as np
import tensorflow as tf
from keras.src.random import seed_generator

_PHILOX = 1
# Elements that are drawn at once.
_CHUNK = 1 << 20


def initial_slice(initializer, shape, partition, dtype):
    """Return this rank's part of the initial value of a dense variable.

    Constants are made in the shape of the slice. Keras' `RandomUniform` and
    `RandomNormal` use a generator by counter (Philox; Salmon et al. 2011): their draw
    is continued at the first element of each chunk of rows, so that the dense value is
    never whole on a rank. Other initializers draw all of it, then the slice is taken:
    those that reject draws, and a user's own.

    Args:
        initializer: a Keras initializer, or a function of shape and dtype.
        shape: of the dense variable.
        partition: its `Partition`.
        dtype: of the variable; by default Keras' floatx.
    """
    if _fills(initializer):
        return initializer(partition.local_shape(shape), dtype=dtype)
    is_plain = partition.shape is None and partition.within is None
    if type(initializer) in _DRAWS and is_plain:
        return _in_chunks(_Draw(initializer, dtype), shape, partition)
    return partition.of(initializer(shape, dtype=dtype))


def _fills(initializer):
    kind = type(initializer)
    if kind is keras.initializers.Constant:
        return np.ndim(initializer.value) == 0
    return kind in (keras.initializers.Zeros, keras.initializers.Ones)


def _in_chunks(draw, shape, partition):
    row_size = math.prod(shape[1:])
    rows = partition.slice if partition.axis == 0 else slice(0, shape[0])
    other = [slice(None)] * len(shape)
    if partition.axis:
        other[partition.axis] = partition.slice
    step = max(1, _CHUNK // max(1, row_size))
    chunks = []
    for first in range(rows.start, rows.stop, step):
        last = min(first + step, rows.stop)
        values = draw(first * row_size, last * row_size)
        chunks.append(tf.reshape(values, [last - first, *shape[1:]])[tuple(other)])
    empty = tf.zeros([0, *partition.local_shape(shape)[1:]], draw.dtype)
    return tf.concat([empty, *chunks], axis=0)


class _Draw:
    """The elements of one draw of an initializer, from any one to any other.

    Args:
        initializer: a `RandomUniform` or `RandomNormal`.
        dtype: of the elements.
    """

    def __init__(self, initializer, dtype):
        self.dtype = tf.as_dtype(dtype or keras.config.floatx())
        self._operation, scale_of = _DRAWS[type(initializer)]
        self._factor, self._summand = scale_of(initializer, self.dtype)
        # As Keras' own random functions for TensorFlow, and TensorFlow's.
        seed = seed_generator.draw_seed(initializer.seed)
        seed = tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)
        state = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        self._key, self._counter = state.key, state.counter

    def __call__(self, first, last):
        """Return the elements from number `first` to before number `last`."""
        # Each value of the counter gives 128 random bits: two float64, or four others.
        per_count = 2 if self.dtype == tf.float64 else 4
        counts, unused = divmod(first, per_count)
        drawn = self._operation(
            shape=[last - first + unused],
            key=self._key,
            counter=self._counter + tf.constant([counts, 0], tf.uint64),
            alg=_PHILOX,
            dtype=self.dtype,
        )
        return drawn[unused:] * self._factor + self._summand


def _uniform_scale(initializer, dtype):
    least = tf.cast(initializer.minval, dtype)
    return tf.cast(initializer.maxval, dtype) - least, least


def _normal_scale(initializer, dtype):
    return tf.constant(initializer.stddev, dtype), tf.constant(initializer.mean, dtype)


_DRAWS = {
    keras.initializers.RandomUniform: (
        tf.raw_ops.StatelessRandomUniformV2,
        _uniform_scale,
    ),
    keras.initializers.RandomNormal: (
        tf.raw_ops.StatelessRandomNormalV2,
        _normal_scale,
    ),
}
