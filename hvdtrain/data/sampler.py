"""Which rank sees which sample at which step: a pure function.

The training samples of a job are one endless sequence: the permutation of epoch 0,
then the permutation of epoch 1, and so on, each a function of (seed, epoch). Global
batch `s` is positions `s * G` to `(s + 1) * G` of the sequence; rank `r` of `size`
takes every `size`-th of these positions, from the `r`-th on. Hence:

- every global batch is full; where its size is a multiple of the number of ranks, the
  mean over ranks is the mean over the batch;
- a batch may contain the end of one epoch and the start of the next;
- the samples of a global batch are the same for any number of ranks;
- a run resumed at step `s` needs the number `s` and nothing else.

Where the global batch has changed at step `s0`, after `p0` positions, global batch `s`
starts at position `p0 + (s - s0) * G`: no position is left out or repeated.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from hvdtrain.data.formats import DataError
from hvdtrain.data.index_shuffle import index_shuffle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """The training samples that one rank sees, step by step.

    Attributes:
        num_samples: samples of the training set.
        global_batch_size: samples per step of the job, `size` or more.
        seed: 0 to 2**32 - 1; the same on all ranks.
        rank: 0 to `size - 1`; of a sharded model the index of the replica.
        size: number of ranks, or of replicas of a sharded model.
        start_step: the step from which the global batch has this size.
        start_sample: position in the sequence of samples at that step.

    Raises:
        DataError: a number is out of range, or there are more ranks than samples.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    rank: int = 0
    size: int = 1
    start_step: int = 0
    start_sample: int = 0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int | np.integer):
                raise DataError(f"Received {name}={value!r}; expected an integer.")
        check_rank(self.rank, size=self.size, num_samples=self.num_samples)
        if self.global_batch_size < self.size:
            raise DataError(
                f"Received a global batch of {self.global_batch_size} for {self.size} "
                "ranks; expected at least one sample per rank."
            )
        if not 0 <= self.seed < 2**32:
            raise DataError(
                f"Received the seed {self.seed}; expected 0 to {2**32 - 1}."
            )
        if min(self.start_step, self.start_sample) < 0:
            raise DataError(
                f"Received the start_step {self.start_step} and the start_sample "
                f"{self.start_sample}; expected 0 or more."
            )

    @property
    def local_batch_size(self) -> int:
        """Samples per step of this rank; the numbers of two ranks may differ by one."""
        return -(-(self.global_batch_size - self.rank) // self.size)

    @property
    def pass_steps(self) -> int:
        """Steps of a pass over the data."""
        return -(-self.num_samples // self.global_batch_size)

    def steps(self, epochs: int) -> int:
        """Return the step after which every sample was seen `epochs` times or more."""
        return self.steps_to(epochs * self.num_samples)

    def steps_to(self, position: int) -> int:
        """Return the step after which the job has reached a position of its samples."""
        left = max(0, position - self.start_sample)
        return self.start_step + -(-left // self.global_batch_size)

    def check_steps(self, start_step: int, end_step: int) -> None:
        """Raise `DataError` unless the global batch has this size in these steps."""
        if not self.start_step <= start_step <= end_step:
            raise DataError(
                f"Received steps {start_step} to {end_step}; expected "
                f"{self.start_step} <= start <= end."
            )

    def positions(self, start_step: int, end_step: int) -> np.ndarray:
        """Return positions in the endless sequence, in the shape of `indices`."""
        if start_step < self.start_step:
            raise DataError(
                f"Received the step {start_step}; expected {self.start_step} or more, "
                "from which the global batch has this size."
            )
        steps = np.arange(start_step, end_step) - self.start_step
        firsts = self.start_sample + steps * self.global_batch_size
        in_batch = np.arange(self.rank, self.global_batch_size, self.size)
        return firsts[:, None] + in_batch

    def indices(self, start_step: int, end_step: int) -> np.ndarray:
        """Return sample numbers, int64 of shape (end_step - start_step, local batch).

        They are computed in constant memory; a resumed run does not replay the steps
        before.
        """
        return self.shuffle(self.positions(start_step, end_step))

    def shuffle(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the samples at positions in the endless sequence."""
        return by_epoch(positions, self.num_samples, self._permute)

    def _permute(self, offsets: np.ndarray, epoch: int) -> np.ndarray:
        return index_shuffle(
            offsets, num_samples=self.num_samples, seed=self.seed, epoch=epoch
        )


def by_epoch(
    positions: np.ndarray,
    num_samples: int,
    permute: Callable[[np.ndarray, int], np.ndarray],
) -> np.ndarray:
    """Return `permute(offsets, epoch)` for positions in the endless sequence."""
    epochs, offsets = np.divmod(positions, num_samples)
    samples = np.empty_like(positions)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        samples[in_epoch] = permute(offsets[in_epoch], int(epoch))
    return samples


def check_rank(rank: int, *, size: int, num_samples: int) -> None:
    """Raise `DataError` unless each of `size` ranks gets a sample."""
    if not 0 <= rank < size:
        raise DataError(f"Received rank {rank} of {size}; expected 0 to size - 1.")
    if num_samples < size:
        raise DataError(
            f"Received {num_samples} samples for {size} ranks; expected at least one "
            "sample per rank: use fewer ranks or more data."
        )
