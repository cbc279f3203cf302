"""Sequences of unequal length, padded to one length."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdtrain.data.formats import DataError
from hvdtrain.data.sources.source import (
    Readable,
    SequenceSource,
    Source,
    as_array,
    cast,
    stack,
)

# Of a key of a dictionary, or of a place in a tuple.
Key = str | int

# Samples in which arrays that are not empty are looked for.
_TYPED_SAMPLES = 100


def pad(
    sequence: Readable,
    length: int | Mapping[Any, int],
    *,
    value: float | Mapping[Any, float] = 0,
    truncate: bool = False,
) -> Source:
    """Return a source whose samples are padded at their end to one length.

    All batches then have one shape, on all ranks and for every number of ranks.

    Args:
        sequence: an object with `len` and `[i]`. A sample is a 1-D array or a list of
            numbers, or a dictionary or tuple with such.
        length: of every 1-D array of a sample. Other arrays and numbers are left as
            they are. With a mapping, such as `{"tokens": 128}`, or `{0: 128}` for
            tuples, only the arrays of these keys are padded.
        value: number that is appended, or a mapping such as `{"labels": -100}`, in
            which 0 is the number of keys that are missing.
        truncate: whether a longer array loses its end. By default it is an error.

    Raises:
        DataError: a length is less than 1. Reading raises it for a sample that is
            longer, or does not have a key of `length`.
    """
    return PaddedSource(sequence, length, value=value, truncate=truncate)


class PaddedSource(SequenceSource):
    """Any object with `len` and `[i]`, whose samples are padded. See `pad`."""

    def __init__(
        self,
        sequence: Readable,
        length: int | Mapping[Any, int],
        *,
        value: float | Mapping[Any, float],
        truncate: bool,
    ) -> None:
        if isinstance(sequence, Source):
            raise DataError(
                f"Received {type(sequence).__name__} to pad; expected an object with "
                "len and [i]: pad what `parse` returns."
            )
        super().__init__(sequence)
        lengths = length.values() if isinstance(length, Mapping) else [length]
        if not lengths or min(lengths) < 1:
            raise DataError(f"Received the length {length}; expected 1 or more.")
        self._length = length
        self._value = value
        self._truncate = truncate
        self._dtypes = self._find_dtypes()

    def read(self, indices: np.ndarray) -> Any:
        samples = self.get_many(indices.tolist())
        pairs = zip(samples, indices.tolist(), strict=True)
        return stack([self._pad(sample, index) for sample, index in pairs], indices)

    def fingerprint(self) -> Any:
        lengths, values = (
            {str(key): number for key, number in choice.items()}
            if isinstance(choice, Mapping)
            else choice
            for choice in (self._length, self._value)
        )
        return {
            "pad": super().fingerprint(),
            "length": lengths,
            "value": values,
            "truncate": self._truncate,
        }

    def _pad(self, sample: Any, index: int) -> Any:
        if not isinstance(sample, Mapping | tuple):
            if isinstance(self._length, Mapping):
                raise self._missing(next(iter(self._length)), index)
            return self._pad_array(sample, None, index)
        items = _items(sample)
        if isinstance(self._length, Mapping):
            for key in self._length.keys() - items.keys():
                raise self._missing(key, index)
        padded = {k: self._pad_array(v, k, index) for k, v in items.items()}
        return padded if isinstance(sample, Mapping) else tuple(padded.values())

    def _pad_array(self, values: Any, key: Key | None, index: int) -> Any:
        length: int | None
        if isinstance(self._length, Mapping):
            length = self._length.get(key)
        else:
            length = self._length
        array = _as_array(values)
        if length is None or array is None or array.ndim != 1:
            return values
        if len(array) > length:
            if not self._truncate:
                raise DataError(
                    f"Received sample {index} of length {len(array)}{_at(key)}; "
                    f"expected {length} or less: give a greater length, or "
                    "truncate=True."
                )
            array = array[:length]
        dtype = self._dtypes.get(key, array.dtype)
        if array.size and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise DataError(
                f"Received sample {index} of dtype {array.dtype}{_at(key)}; expected "
                f"{dtype}, as of the first samples: convert them to one type."
            )
        value = self._value
        if isinstance(value, Mapping):
            value = value.get(key, 0)
        padding = np.full(length - len(array), value)
        return np.concatenate(
            [
                cast(array, dtype, f" in sample {index}{_at(key)}"),
                cast(padding, dtype, f" as the value{_at(key)}"),
            ]
        )

    def _find_dtypes(self) -> dict[Any, np.dtype]:
        """Return the types of the arrays of a sample, by key."""
        dtypes: dict[Any, np.dtype] = {}
        for index in range(min(len(self), _TYPED_SAMPLES)):
            sample = self.get_many([index])[0]
            is_nest = isinstance(sample, Mapping | tuple)
            items = _items(sample) if is_nest else {None: sample}
            arrays = {key: _as_array(value) for key, value in items.items()}
            # An empty list has no type.
            found = {k: a.dtype for k, a in arrays.items() if a is not None and a.size}
            dtypes = found | dtypes
            if len(dtypes) == sum(array is not None for array in arrays.values()):
                break
        return dtypes

    def _missing(self, key: Key, index: int) -> DataError:
        return DataError(
            f"Received sample {index} without {key!r}; expected the keys of "
            f"length={self._length} in each sample."
        )


def _items(sample: Any) -> dict[Any, Any]:
    return dict(sample.items() if isinstance(sample, Mapping) else enumerate(sample))


def _as_array(values: Any) -> np.ndarray | None:
    """Return a list or an array as an array of numbers; None for others."""
    # Tensors have __array__.
    if not isinstance(values, list) and not hasattr(values, "__array__"):
        return None
    try:
        array = as_array(values)
    except DataError:
        return None
    return array if array.dtype.kind in "biuf" else None


def _at(key: Key | None) -> str:
    return "" if key is None else f" of {key!r}"
