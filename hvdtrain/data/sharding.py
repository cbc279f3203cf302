"""Which rank sees which sample when: a pure function, and streams made from it.

The training samples of a job are one endless sequence: the permutation of epoch 0,
then that of epoch 1, and so on, each drawn from (seed, epoch). Global batch `s` is
positions `s * G` to `(s + 1) * G` of it; rank `r` of `size` takes every `size`-th of
these, from the `r`-th on. Hence:

- every global batch is full, so the mean over ranks is the mean over the batch;
- a remainder at the end of an epoch opens the first batch of the next epoch;
- the samples of a global batch are the same for any number of ranks;
- a run resumed at step `s` needs the number `s` and nothing else.
"""

import dataclasses
import functools

import numpy as np

from hvdtrain.data.files import DataError

# One call into Python gathers a block of steps; larger blocks are no faster.
_MAX_BLOCK_STEPS = 64
_MAX_BLOCK_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """The training samples that one rank sees, step by step.

    Attributes:
        num_samples: samples of the whole training set.
        global_batch_size: samples per step of the whole job, a multiple of `size`.
        seed: 0 to 2**32 - 1; the same on all ranks.
        rank: this rank, 0 to `size - 1`.
        size: number of ranks.

    Raises:
        DataError: a number is out of range, or there are more ranks than samples.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    rank: int = 0
    size: int = 1

    def __post_init__(self):
        """Refuse what cannot be dealt evenly."""
        _check_rank(self.rank, size=self.size, num_samples=self.num_samples)
        if self.global_batch_size < 1 or self.global_batch_size % self.size:
            raise DataError(
                f"Received a global batch of {self.global_batch_size} for {self.size} "
                "ranks; expected a positive multiple of the number of ranks."
            )
        if not 0 <= self.seed < 2**32:
            raise DataError(
                f"Received the seed {self.seed}; expected 0 to {2**32 - 1}."
            )

    @property
    def local_batch_size(self):
        """Samples per step of this rank."""
        return self.global_batch_size // self.size

    def steps(self, epochs):
        """Steps after which every sample was seen at least `epochs` times."""
        return -(-epochs * self.num_samples // self.global_batch_size)

    def indices(self, start_step, end_step):
        """Sample numbers of this rank, int64 (end_step - start_step, local batch)."""
        first = start_step * self.global_batch_size
        last = end_step * self.global_batch_size
        positions = np.arange(first + self.rank, last, self.size)
        epochs, offsets = np.divmod(positions, self.num_samples)
        chosen = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = _permutation(self.num_samples, seed=self.seed, epoch=int(epoch))
            chosen[here] = order[offsets[here]]
        return chosen.reshape(-1, self.local_batch_size)


@functools.lru_cache(maxsize=2)
def _permutation(num_samples, *, seed, epoch):
    # RandomState, because NumPy promises never to change its stream (NEP 19): a run
    # that is resumed under another NumPy sees the same samples.
    order = np.random.RandomState([seed, epoch]).permutation(num_samples)
    order.setflags(write=False)
    return order


def stream(x, y, *, shard, start_step, end_step):
    """Return the batches of one rank for the steps from `start_step` to `end_step`.

    Args:
        x: uint8 images (n, height, width, channels); referred to, not copied.
        y: integer labels (n,).
        shard: the `Shard` of this rank.
        start_step: first step, 0 for a new run.
        end_step: the step after the last.

    Returns:
        A `tf.data.Dataset` of `end_step - start_step` pairs: images, float32 in
        [0, 1], (local batch, height, width, channels), and labels, int32
        (local batch,). The order never depends on timing.
    """
    import tensorflow as tf

    _check_lengths(x, y, num_samples=shard.num_samples)
    if not 0 <= start_step <= end_step:
        raise DataError(
            f"Received steps {start_step} to {end_step}; expected 0 <= start <= end."
        )
    step_bytes = 4 * shard.local_batch_size * x[0].size
    block_steps = min(_MAX_BLOCK_STEPS, max(1, _MAX_BLOCK_BYTES // step_bytes))

    def gather(first):
        steps = shard.indices(first, min(first + block_steps, end_step))
        return x[steps], y[steps].astype(np.int32, copy=False)

    blocks = _dataset(
        range(start_step, end_step, block_steps),
        gather,
        images=(None, shard.local_batch_size, *x.shape[1:]),
        labels=(None, shard.local_batch_size),
    )
    # What `unbatch` does, for a fifth less of the processor's time.
    batches = blocks.flat_map(lambda *block: tf.data.Dataset.from_tensor_slices(block))
    batches = batches.prefetch(block_steps)
    steps = tf.data.experimental.assert_cardinality(end_step - start_step)
    return batches.apply(steps)


def evaluation_stream(x, y, *, rank, size, local_batch_size):
    """Return this rank's part of a test set: every `size`-th image from `rank` on.

    Over all ranks each image comes exactly once. The last batch may be smaller, and a
    rank may have one batch less than another: sum metric states over ranks afterwards,
    and use no collective inside the loop.

    Args:
        x: uint8 images (n, height, width, channels); referred to, not copied.
        y: integer labels (n,).
        rank: this rank, 0 to `size - 1`.
        size: number of ranks.
        local_batch_size: images per batch of this rank.

    Returns:
        A `tf.data.Dataset` of pairs as those of `stream`.

    Raises:
        DataError: there are more ranks than images, or a number is out of range.
    """
    _check_lengths(x, y, num_samples=len(x))
    _check_rank(rank, size=size, num_samples=len(x))
    if local_batch_size < 1:
        raise DataError(f"Received a batch of {local_batch_size}; expected 1 or more.")
    my_x, my_y = x[rank::size], y[rank::size]

    def gather(first):
        part = slice(first, first + local_batch_size)
        return my_x[part].copy(), my_y[part].astype(np.int32)

    batches = _dataset(
        range(0, len(my_x), local_batch_size),
        gather,
        images=(None, *x.shape[1:]),
        labels=(None,),
    )
    return batches.prefetch(2)


def _dataset(firsts, gather, *, images, labels):
    """Return a dataset of `gather(first)` for each of `firsts`, images in [0, 1]."""
    import tensorflow as tf

    def load(first):
        # Not tf.gather on a constant: that would be a second copy of all images.
        x, y = tf.numpy_function(
            lambda first: gather(int(first)), (first,), (tf.uint8, tf.int32)
        )
        x = tf.cast(tf.ensure_shape(x, images), tf.float32) / 255.0
        return x, tf.ensure_shape(y, labels)

    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False  # nothing to tune: its thread would only cost
    return (
        tf.data.Dataset.range(firsts.start, firsts.stop, firsts.step)
        .map(load)
        .with_options(options)
    )


def _check_rank(rank, *, size, num_samples):
    if not 0 <= rank < size:
        raise DataError(f"Received rank {rank} of {size}; expected 0 to size - 1.")
    if num_samples < size:
        raise DataError(
            f"Received {num_samples} samples for {size} ranks; expected at least one "
            "sample per rank: use fewer ranks or more data."
        )


def _check_lengths(x, y, *, num_samples):
    if not len(x) == len(y) == num_samples:
        raise DataError(
            f"Received {len(x)} images and {len(y)} labels; expected {num_samples} "
            "of each."
        )
