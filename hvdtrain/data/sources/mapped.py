"""A source whose samples are a function of another source's samples."""

import dataclasses
from typing import Any

import numpy as np

from hvdtrain.data.sampler import Sampler
from hvdtrain.data.sources.source import Source, TensorFunction, as_source


@dataclasses.dataclass(frozen=True)
class _Composition:
    """`second(first(sample))`. Equal to another one of the same functions."""

    first: TensorFunction | None
    second: TensorFunction

    def __call__(self, sample: Any) -> Any:
        return self.second(self.first(sample) if self.first else sample)


class MappedSource(Source):
    """The samples of `source` after a function; see `map_samples`."""

    def __init__(self, source: Source, function: TensorFunction) -> None:
        self._source = source
        self.parse = source.parse
        self.decode = _Composition(source.decode, function)
        self.is_thread_safe = source.is_thread_safe
        self.is_grouped = source.is_grouped
        self.has_order = source.has_order

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: np.ndarray) -> Any:
        return self._source.read(indices)

    def shuffle(self, sampler: Sampler, positions: np.ndarray) -> np.ndarray:
        return self._source.shuffle(sampler, positions)

    def fingerprint(self) -> Any:
        return self._source.fingerprint()


def map_samples(source: Any, function: TensorFunction) -> Source:
    """Return a source whose samples are `function(sample)`.

    Args:
        source: as for `batches`.
        function: a function of the tensors of one sample, traced by tf.data, such as
            one that returns the pair of input and target that `training.fit` needs.
            Random numbers belong into the `transform` of `batches`, which has a seed.
    """
    return MappedSource(as_source(source), function)
