"""What formats of files of serialized records share."""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from hvdtrain.data.sources.data_files import DataFile, Pattern, find_files
from hvdtrain.data.sources.remote_files import RemoteFile
from hvdtrain.data.sources.source import Source, TensorFunction

Opened = TypeVar("Opened")


class RecordFiles(Source, Generic[Opened]):
    """Records by their number over several files, of which a few are open at a time.

    A subclass has `_count_records`, `_open` and `_read_records`.

    Attributes:
        max_open_files: beyond it, the file that was not used for longest is freed.
    """

    max_open_files = 256

    def __init__(
        self,
        files: Pattern | Iterable[Pattern],
        parse: TensorFunction | None = None,
    ) -> None:
        self.parse = parse
        self._files = find_files(files)
        self.is_remote = any(isinstance(file, RemoteFile) for file in self._files)
        self._counts = self._count_records(self._files)
        self._ends = np.cumsum(self._counts)
        self._get_open = functools.lru_cache(self.max_open_files)(self._open)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the records at `indices`: an array of `bytes` of shape (n,)."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        order = np.argsort(numbers, kind="stable")
        touched, firsts = np.unique(numbers[order], return_index=True)
        bounds = itertools.pairwise([*firsts.tolist(), len(indices)])
        places, parts = [], []
        for number, (first, last) in zip(touched.tolist(), bounds, strict=True):
            places.append(order[first:last])
            start = self._ends[number] - self._counts[number]
            parts.append((self._files[number], indices[places[-1]] - start))
        records = np.empty(len(indices), object)
        for place, found in zip(places, self._read_parts(parts), strict=True):
            records[place] = found
        return records

    def _read_parts(
        self, parts: list[tuple[DataFile, np.ndarray]]
    ) -> Iterator[list[bytes]]:
        """Yield the records of each file at some numbers (int64, of shape (n,))."""
        for file, numbers in parts:
            yield self._read_records(file, self._get_open(file), numbers)

    def fingerprint(self) -> Any:
        # Neither directories nor times: the files may be copies, on another machine.
        files = [
            (file.name, file.size, int(count))
            for file, count in zip(self._files, self._counts, strict=True)
        ]
        digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        return {"samples": len(self), "files": len(files), "digest": digest[:16]}

    def version(self) -> Any:
        return [file.identity() for file in self._files]

    def _count_records(self, files: Sequence[DataFile]) -> Sequence[int]:
        """Return the number of records of each file."""
        raise NotImplementedError

    def _open(self, file: DataFile) -> Opened:
        """Return what `_read_records` needs.

        It is freed, not closed, since another thread may read from it.
        """
        raise NotImplementedError

    def _read_records(
        self, file: DataFile, opened: Opened, numbers: np.ndarray
    ) -> list[bytes]:
        """Return the records of one file at `numbers` (int64, of shape (n,)).

        Implementations call `file.check()` once for a file on a disk: 2 µs of a batch.
        """
        raise NotImplementedError
