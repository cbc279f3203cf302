"""The division of a batch into micro-batches, and of its loss."""

import keras
import tensorflow as tf

# Their mean over the batch is the weighted mean of those over micro-batches.
_REDUCTIONS = ("sum_over_batch_size", "mean")


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


def check_loss(loss):
    """Raise a ValueError for a loss that is no mean over the samples of a batch."""
    reduction = getattr(loss, "reduction", _REDUCTIONS[0])
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"A pipeline needs a loss with one of the reductions {_REDUCTIONS}. "
            f"Received: {loss!r} with reduction={reduction!r}."
        )
    if getattr(loss, "ignore_class", None) is not None:
        raise ValueError(
            "A pipeline weights micro-batches by their samples, and a loss with "
            "ignore_class is the mean over those that are not ignored. Received: "
            f"ignore_class={loss.ignore_class}. Leave it out, and give these samples "
            "the sample_weight 0: the mean is then over all samples."
        )
