"""The division of a batch into micro-batches."""

import keras
import tensorflow as tf


def size_of(x):
    """Return the number of samples in a batch, as a scalar tensor."""
    return tf.shape(keras.tree.flatten(x)[0])[0]


def sizes_of(size, count):
    """Return the sizes of `count` micro-batches, of which the first may be larger."""
    return [(size + count - 1 - m) // count for m in range(count)]


def split(batch, sizes):
    """Return micro-batches of these sizes; None for each of a batch that is None.

    Raises:
        ValueError: the batch is more than one tensor.
    """
    tensors = [] if batch is None else keras.tree.flatten(batch)
    if not tensors:
        return [None] * len(sizes)
    if len(tensors) > 1:
        raise ValueError(
            "A pipeline takes one input and one target. Received: "
            f"{len(tensors)} tensors."
        )
    return tf.split(tensors[0], tf.stack(sizes), num=len(sizes))


def share_of(losses, count, size):
    """Return the part of `count` samples in means over `size`; None for no losses."""
    if not losses:
        return None
    # Losses of mixed precision differ in dtype. One of no samples may have no sum.
    total = tf.add_n([tf.cast(tf.reduce_sum(each), tf.float32) for each in losses])
    share = tf.cast(count, tf.float32) / tf.cast(size, tf.float32)
    # The mean over no samples is NaN, or 0.
    return tf.math.multiply_no_nan(total, share)
