"""The batches of images of one rank, as `tf.data` datasets."""

import ctypes
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvdtrain import native
from hvdtrain.data import batching
from hvdtrain.data.formats import DataError
from hvdtrain.data.sampler import Sampler, check_rank

# Images and labels, of a block of steps or of one batch.
Pair = tuple[np.ndarray, np.ndarray]


def input_wait_seconds() -> float:
    """Return for how long this process has waited for batches of any dataset.

    NaN where the native library is not installed.
    """
    try:
        functions = native.load().functions
    except OSError:
        return math.nan
    functions.hvdtrain_input_wait_microseconds.restype = ctypes.c_int64
    return 1e-6 * functions.hvdtrain_input_wait_microseconds()


def train_batches(
    x: np.ndarray,
    y: np.ndarray,
    *,
    sampler: Sampler,
    start_step: int,
    end_step: int,
) -> tf.data.Dataset:
    """Return the batches of one rank from `start_step` to before `end_step`.

    Args:
        x: uint8 images (n, height, width, channels); referred to, not copied.
        y: integer labels (n,).

    Returns:
        `end_step - start_step` pairs: images, float32 in [0, 1], (local batch, height,
        width, channels), and labels, int32 (local batch,). The order never depends on
        timing.
    """
    _check_lengths(x, y, num_samples=sampler.num_samples)
    sampler.check_steps(start_step, end_step)
    block_steps = batching.count_block_steps(sampler.local_batch_size * x[0].size)

    def read_block(first: int) -> Pair:
        steps = sampler.indices(first, min(first + block_steps, end_step))
        return x[steps], y[steps].astype(np.int32, copy=False)

    batches = _split(
        _load(
            range(start_step, end_step, block_steps),
            read_block,
            images=(None, sampler.local_batch_size, *x.shape[1:]),
            labels=(None, sampler.local_batch_size),
        )
    )
    if batching.has_spare_thread():
        batches = batches.prefetch(block_steps)
    steps = tf.data.experimental.assert_cardinality(end_step - start_step)
    return batches.apply(steps)


def evaluation_batches(
    x: np.ndarray, y: np.ndarray, *, rank: int, size: int, local_batch_size: int
) -> tf.data.Dataset:
    """Return this rank's share of a test set: every `size`-th image from `rank` on.

    Over all ranks each image occurs exactly once. The last batch may be smaller, and
    a rank may have one batch less than another: sum the states of metrics over the
    ranks afterwards. A collective in each batch would deadlock.

    Args:
        x: uint8 images (n, height, width, channels); referred to, not copied.
        y: integer labels (n,).
        rank: 0 to `size - 1`.

    Returns:
        Pairs of images and labels with the dtypes and the scale of `train_batches`.

    Raises:
        DataError: there are more ranks than images, or a number is out of range.
    """
    _check_lengths(x, y, num_samples=len(x))
    check_rank(rank, size=size, num_samples=len(x))
    if local_batch_size < 1:
        raise DataError(f"Received a batch of {local_batch_size}; expected 1 or more.")
    local_x, local_y = x[rank::size], y[rank::size]

    def read_batch(first: int) -> Pair:
        batch = slice(first, first + local_batch_size)
        return local_x[batch].copy(), local_y[batch].astype(np.int32)

    batches = _load(
        range(0, len(local_x), local_batch_size),
        read_batch,
        images=(None, *x.shape[1:]),
        labels=(None,),
    )
    return batches.map(_scale).prefetch(2)


def _split(blocks: tf.data.Dataset) -> tf.data.Dataset:
    """Return the batches of a dataset of blocks, with images in [0, 1]."""
    try:
        operations = native.load().operations
    except OSError:
        # Equal to `unbatch`, with a fifth less processor time.
        return blocks.map(_scale).flat_map(
            lambda *block: tf.data.Dataset.from_tensor_slices(block)
        )
    images, labels = (spec.shape[1:] for spec in blocks.element_spec)
    structure = tf.TensorSpec(images, tf.float32), tf.TensorSpec(labels, tf.int32)
    batches = operations.hvdtrain_batches(
        input_dataset=tf.data.experimental.to_variant(blocks),
        output_types=[spec.dtype for spec in structure],
        output_shapes=[spec.shape for spec in structure],
    )
    return tf.data.experimental.from_variant(batches, structure).with_options(
        blocks.options()
    )


def _scale(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cast(x, tf.float32) / 255.0, y


def _load(
    firsts: range,
    read: Callable[[int], Pair],
    *,
    images: tuple[int | None, ...],
    labels: tuple[int | None, ...],
) -> tf.data.Dataset:
    """Return a dataset of `read(first)` for each step or image number of `firsts`.

    `read` returns uint8 images and int32 labels of the shapes `images` and `labels`.
    """

    def load(first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Not tf.gather on a constant, which would hold a second copy of all images.
        x, y = tf.numpy_function(
            lambda first: read(int(first)), (first,), (tf.uint8, tf.int32)
        )
        return tf.ensure_shape(x, images), tf.ensure_shape(y, labels)

    numbers = tf.data.Dataset.range(firsts.start, firsts.stop, firsts.step)
    return batching.untuned(numbers.map(load))


def _check_lengths(x: np.ndarray, y: np.ndarray, *, num_samples: int) -> None:
    if not len(x) == len(y) == num_samples:
        raise DataError(
            f"Received {len(x)} images and {len(y)} labels; expected {num_samples} "
            "of each."
        )
