"""Split batches into micro-batches, and weight their losses."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.keras.loss_reductions import MEANS


def count_samples(x: tf.Tensor) -> tf.Tensor:
    """Return the number of samples in a batch, as a scalar tensor."""
    return tf.shape(keras.tree.flatten(x)[0])[0]


def split_sizes(size: tf.Tensor, count: int) -> list[tf.Tensor]:
    """Return the sizes of `count` micro-batches; the first ones may be larger by 1."""
    return [(size + count - 1 - m) // count for m in range(count)]


def split(
    batch: tf.Tensor | None, sizes: Sequence[tf.Tensor]
) -> list[tf.Tensor | None]:
    """Return micro-batches of these sizes; a list of None if the batch is None.

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


def weight_loss(
    losses: Sequence[tf.Tensor], count: tf.Tensor, size: tf.Tensor
) -> tf.Tensor | None:
    """Return the term of a micro-batch in the mean loss of its batch.

    Args:
        losses: means over the samples of the micro-batch; None is returned for none.
        count: number of samples of the micro-batch.
        size: number of samples of the batch.
    """
    if not losses:
        return None
    # In mixed precision, losses differ in dtype. The loss of no samples may not be a
    # scalar.
    total = tf.add_n([tf.cast(tf.reduce_sum(loss), tf.float32) for loss in losses])
    weight = tf.cast(count, tf.float32) / tf.cast(size, tf.float32)
    # A mean over no samples may be NaN: multiply_no_nan makes its term 0.
    return tf.math.multiply_no_nan(total, weight)


def check_loss(loss: Any) -> None:
    """Raise a ValueError for a loss that is no mean over the samples of a batch."""
    reduction = getattr(loss, "reduction", MEANS[0])
    if reduction not in MEANS:
        # The loss of a batch is the weighted mean of the losses of micro-batches.
        raise ValueError(
            f"A pipeline needs a loss with one of the reductions {MEANS}. "
            f"Received: {loss!r} with reduction={reduction!r}."
        )
    # Keras 3.16 has it in the config only.
    config = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
    ignored = getattr(loss, "ignore_class", config.get("ignore_class"))
    if ignored is not None:
        raise ValueError(
            "A pipeline weights micro-batches by their samples, and a loss with "
            "ignore_class is the mean over the samples that are not ignored. Received: "
            f"ignore_class={ignored}. Leave it out, and give these samples "
            "the sample_weight 0: the mean is then over all samples."
        )
