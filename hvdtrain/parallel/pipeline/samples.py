"""Detection of ranks of a pipeline that train on different samples."""

import keras
import tensorflow as tf

# Integers below it are exact in float32, and their sum with zeros is.
_MODULUS = 1 << 20


def fingerprints(x, y, pipeline):
    """Return a vector whose sum over the ranks has the fingerprint of each of them.

    The fingerprint is a function of the bits of the first sample: it does not depend
    on the order of a sum, which may differ by rank.

    Args:
        x: inputs of a batch.
        y: targets, or None.
        pipeline: the `Axis` of the pipeline.
    """
    total = tf.zeros([], tf.int32)
    for tensor in keras.tree.flatten((x, y)):
        if tensor is not None and tf.as_dtype(tensor.dtype) != tf.string:
            row = tf.cast(tensor[:1], tf.float32)
            total += tf.reduce_sum(tf.bitcast(row, tf.int32))
    return tf.one_hot(pipeline.index, pipeline.size) * tf.cast(
        total % _MODULUS, tf.float32
    )


def check_equal(numbers):
    """Raise an InvalidArgumentError on each rank if these fingerprints differ."""
    tf.debugging.assert_equal(
        numbers,
        tf.fill(tf.shape(numbers), numbers[0]),
        "The ranks of a pipeline received different samples. Give all of them the same "
        "data in the same order: pass shuffle=False to fit, or call "
        "keras.utils.set_random_seed with the same seed on each of them.",
    )
