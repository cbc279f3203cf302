"""Token sequences packed into rows of one length, for language models.

The sequences, in their order, form one stream of tokens. Row `i` is tokens `i * length`
to `(i + 1) * length` of it: a pure function of `i` and of where each sequence starts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.data.formats import DataError
from hvdtrain.data.sources import index_cache
from hvdtrain.data.sources.source import (
    ArraySource,
    SequenceSource,
    Source,
    as_source,
    cast,
)

# Sequences that are read at a time to measure their lengths.
_CHUNK = 1024


def pack(
    sequences: Any,
    length: int,
    *,
    dtype: str | np.dtype | None = None,
    separator: int | None = None,
    shift: bool = False,
) -> Source:
    """Return a source of rows of `length` tokens, cut from a stream of sequences.

    A row is a dictionary of int32 arrays of shape (length,)::

        tokens     5 6 7 8 | 9 9 9
        segments   1 1 1 1   2 2 2    number of the sequence within the row, from 1
        positions  0 1 2 3   0 1 2    from the start of the segment in this row

    for attention masks and for embeddings of positions. A sequence that does not fit
    is continued in the next row. The last row is dropped unless it is full.

    All sequences are read once, at the start, to measure them: 8 bytes are kept for
    each. The lengths of records are kept in `data.default_cache_dir()`, and one process
    of a node measures them; each rank keeps the lengths of other sequences in memory.

    A row reads the sequences that it contains as a whole. Write records of at most some
    rows, or one array of all tokens.

    Args:
        sequences: a 1-D array of tokens, such as `np.memmap("train.bin", "uint16")`:
            one sequence; any object with `len` and `[i]` whose samples are 1-D arrays
            or lists of tokens; or a source of records without `parse`, such as
            `data.TFRecord(pattern)`, whose records are the bytes of tokens.
        dtype: of the tokens in records, such as "uint16".
        separator: a token that is appended to each sequence, such as end of text. It
            belongs to the segment of the sequence.
        shift: whether a sample is `(row, targets)`, in which `targets`, int32 of shape
            (length,), has for each token of the row the next token: what
            `training.fit` takes to predict it. At the end of a segment
            the target is the first token of the next one.

    Raises:
        DataError: there are fewer tokens than a row has, or a sequence is not of one
            dimension or not of integers.
    """
    for name, value in {"length": length, "separator": separator}.items():
        if value is not None and not isinstance(value, int | np.integer):
            raise DataError(f"Received {name}={value!r}; expected an integer.")
    if length < 1:
        raise DataError(f"Received the length {length}; expected 1 or more.")
    if isinstance(sequences, np.ndarray) and sequences.ndim == 1:
        if separator is not None:
            raise DataError(
                f"Received separator={separator} for an array of tokens; expected it "
                "for sequences: an array is one sequence."
            )
        if sequences.dtype.kind not in "iu":
            raise DataError(
                f"Received tokens of dtype {sequences.dtype}; expected integers."
            )
        return PackedArray(sequences, length, shift)
    source = as_source(sequences)
    return PackedSequences(source, length, shift, dtype, separator)


class PackedArray(Source):
    """Rows of an array of tokens. See `pack`."""

    def __init__(self, tokens: np.ndarray, length: int, shift: bool) -> None:
        self._tokens = tokens
        self._length = length
        self._shift = shift
        self._rows = _count_rows(len(tokens), length, shift)

    def __len__(self) -> int:
        return self._rows

    def read(self, indices: np.ndarray) -> Any:
        starts = indices * self._length
        window = np.arange(self._length + self._shift)
        tokens = np.asarray(self._tokens[starts[:, None] + window])
        shape = len(indices), self._length
        positions = np.broadcast_to(window[: self._length], shape)
        return _sample(tokens, np.ones(shape), positions, self._shift)

    def fingerprint(self) -> Any:
        return {
            "pack": ArraySource(self._tokens).fingerprint(),
            "length": self._length,
            "shift": self._shift,
        }


class PackedSequences(Source):
    """Rows of sequences of tokens. See `pack`."""

    def __init__(
        self,
        source: Source,
        length: int,
        shift: bool,
        dtype: str | np.dtype | None,
        separator: int | None,
    ) -> None:
        if source.parse or source.decode:
            raise DataError(
                f"Received {type(source).__name__} to pack, with `parse` or functions; "
                "expected a source whose samples are tokens alone."
            )
        self.locks = source.locks
        self.is_remote = source.is_remote
        self._length = length
        self._shift = shift
        self._dtype = None if dtype is None else np.dtype(dtype)
        self._separator = None if separator is None else int(separator)
        self._source = source
        self._get_many = _getter(source)
        self._starts = self._load_starts()
        self._rows = _count_rows(int(self._starts[-1]), length, shift)

    def __len__(self) -> int:
        return self._rows

    def read(self, indices: np.ndarray) -> Any:
        size = self._length + self._shift
        begins = indices * self._length
        firsts = np.searchsorted(self._starts, begins, side="right") - 1
        ends = np.searchsorted(self._starts, begins + size, side="left")
        spans = [np.arange(*pair) for pair in zip(firsts, ends, strict=True)]
        numbers = np.unique(np.concatenate(spans))
        pairs = zip(numbers.tolist(), self._get(numbers, is_known=True), strict=True)
        sequences = dict(pairs)
        rows = [
            self._cut(span, [sequences[number] for number in span.tolist()], begin)
            for span, begin in zip(spans, begins.tolist(), strict=True)
        ]
        tokens, segments, positions = map(np.stack, zip(*rows, strict=True))
        return _sample(tokens, segments, positions, self._shift)

    def fingerprint(self) -> Any:
        return {
            "pack": self._source.fingerprint(),
            "dtype": self._dtype_name,
            "separator": self._separator,
            "length": self._length,
            "shift": self._shift,
        }

    @property
    def _dtype_name(self) -> str | None:
        return self._dtype and self._dtype.name

    def _cut(
        self, span: np.ndarray, sequences: list[np.ndarray], begin: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens from `begin` on of sequences, segments and positions.

        Args:
            span: numbers of the sequences that the row touches.
        """
        size = self._length + self._shift
        # Relative to the row; the first sequence may start before it.
        starts = np.asarray(self._starts[span[0] : span[-1] + 2]) - begin
        tokens = np.concatenate(
            [
                sequence[max(0, -start) : size - start]
                for sequence, start in zip(sequences, starts[:-1].tolist(), strict=True)
            ]
        )
        starts = np.clip(starts, 0, self._length)
        lengths = np.diff(starts)
        # A sequence without tokens has no number.
        segments = np.repeat(np.cumsum(lengths > 0), lengths)
        positions = np.arange(self._length) - np.repeat(starts[:-1], lengths)
        return tokens, segments, positions

    def _load_starts(self) -> np.ndarray:
        """Return where each sequence starts in the stream, and where the last ends."""
        version = self._source.version()
        if version is None:
            return self._measure()
        name = index_cache.digest("pack", version, self._dtype_name, self._separator)
        return index_cache.cached(name, self._measure)

    def _measure(self) -> np.ndarray:
        starts = np.zeros(len(self._source) + 1, np.int64)
        for first in range(0, len(self._source), _CHUNK):
            numbers = np.arange(first, min(first + _CHUNK, len(self._source)))
            starts[numbers + 1] = [len(tokens) for tokens in self._get(numbers)]
        return np.cumsum(starts, out=starts)

    def _get(self, numbers: np.ndarray, *, is_known: bool = False) -> list[np.ndarray]:
        """Return sequences, with their separators.

        Args:
            is_known: whether to compare the lengths with those that were measured.
        """
        sequences = []
        read = self._get_many(numbers)
        if isinstance(read, dict | tuple):
            raise DataError(
                f"Received {type(self._source).__name__} to pack, with several arrays; "
                "expected a source whose samples are tokens alone."
            )
        for number, values in zip(numbers.tolist(), read, strict=True):
            tokens = self._as_tokens(values, number)
            if is_known:
                self._check_length(tokens, number)
            sequences.append(tokens)
        return sequences

    def _as_tokens(self, values: Any, number: int) -> np.ndarray:
        tokens = self._decoded(values, number)
        # An empty list is an array of floats.
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise DataError(
                f"Received sequence {number} of dtype {tokens.dtype} and shape "
                f"{tokens.shape}; expected integers in one dimension."
            )
        if not tokens.size:
            tokens = tokens.astype(np.int32)
        if self._separator is None:
            return tokens
        return np.append(cast(tokens, np.int32, " as a token"), self._separator)

    def _decoded(self, values: Any, number: int) -> np.ndarray:
        if not isinstance(values, bytes):
            return np.asarray(values)
        if self._dtype is None:
            raise DataError(
                f"Received sequence {number} as bytes; expected dtype=, the type of "
                'its tokens, such as dtype="uint16".'
            )
        if len(values) % self._dtype.itemsize:
            raise DataError(
                f"Received sequence {number} of {len(values)} bytes; expected a "
                f"multiple of {self._dtype.itemsize}, for {self._dtype.name}: give the "
                "dtype with which it was written."
            )
        return np.frombuffer(values, self._dtype)

    def _check_length(self, tokens: np.ndarray, number: int) -> None:
        expected = int(self._starts[number + 1] - self._starts[number])
        if len(tokens) != expected:
            raise DataError(
                f"Received sequence {number} of {len(tokens)} tokens; expected "
                f"{expected}, as when its length was measured: the source has changed, "
                "start the job again."
            )


def _getter(source: Source) -> Callable[[np.ndarray], Sequence[Any]]:
    # Sequences differ in length: `read` would stack them. A subclass pads them.
    if type(source) is SequenceSource:
        get_many = source.get_many
        return lambda numbers: get_many(numbers.tolist())
    return source.read


def _count_rows(tokens: int, length: int, shift: bool) -> int:
    rows = max(0, tokens - shift) // length
    if not rows:
        raise DataError(
            f"Received {tokens} tokens; expected {length + shift} or more, for one row."
        )
    return rows


def _sample(
    tokens: np.ndarray, segments: np.ndarray, positions: np.ndarray, shift: bool
) -> Any:
    tokens = cast(tokens, np.int32, " as a token")
    row = {
        "tokens": tokens[:, :-1] if shift else tokens,
        "segments": segments,
        "positions": positions,
    }
    row = {key: values.astype(np.int32) for key, values in row.items()}
    return (row, tokens[:, 1:]) if shift else row
