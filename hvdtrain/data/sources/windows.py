"""A shuffle for samples that are stored in groups, of which each is read as a whole.

The groups are permuted. Each `window` consecutive groups of this order form a window,
and the samples of a window are permuted. Hence the samples of a batch are in `window`
groups, or in twice as many where the batch contains the end of a window, and a reader
that keeps so many groups reads each of them once an epoch.
"""

import dataclasses
import functools

import numpy as np

from hvdtrain.data.index_shuffle import index_shuffle
from hvdtrain.data.sampler import Sampler, by_epoch


@dataclasses.dataclass(frozen=True)
class _Epoch:
    """The groups in the order of an epoch, and where they start in it.

    Attributes:
        starts: position of the first sample of each group, and the number of samples.
        firsts: number of the first sample of each group.
        windows: position of the first sample of each window, and the number of samples.
    """

    starts: np.ndarray
    firsts: np.ndarray
    windows: np.ndarray


class WindowedOrder:
    """The order of the samples of groups; a pure function of (seed, epoch, position).

    Args:
        sizes: number of samples of each group, 1 or more. Sample numbers count through
            the groups.
        window: number of groups whose samples are permuted together.
    """

    def __init__(self, sizes: np.ndarray, window: int) -> None:
        self._sizes = sizes.astype(np.int64)
        self._window = window
        # Two: a global batch may contain the end of one epoch and the start of the
        # next. The cache belongs to this object, and ends with it.
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def shuffle(self, sampler: Sampler, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the samples at positions in the endless sequence."""
        permute = functools.partial(self._permute, seed=sampler.seed)
        return by_epoch(positions, sampler.num_samples, permute)

    def _permute(self, offsets: np.ndarray, epoch: int, *, seed: int) -> np.ndarray:
        order = self._epoch(seed, epoch)
        windows = np.searchsorted(order.windows, offsets, side="right") - 1
        shuffled = np.empty_like(offsets)
        for window in np.unique(windows):
            in_window = windows == window
            start, end = order.windows[window : window + 2]
            # A seed is less than 2**32: no two windows have one permutation.
            shuffled[in_window] = start + index_shuffle(
                offsets[in_window] - start,
                num_samples=int(end - start),
                seed=seed + (int(window + 1) << 32),
                epoch=epoch,
            )
        groups = np.searchsorted(order.starts, shuffled, side="right") - 1
        return order.firsts[groups] + shuffled - order.starts[groups]

    def _make_epoch(self, seed: int, epoch: int) -> _Epoch:
        count = len(self._sizes)
        groups = index_shuffle(
            np.arange(count), num_samples=count, seed=seed, epoch=epoch
        )
        starts = np.concatenate([[0], np.cumsum(self._sizes[groups])])
        firsts = np.cumsum(self._sizes) - self._sizes
        windows = np.append(starts[: -1 : self._window], starts[-1])
        return _Epoch(starts, firsts[groups], windows)
