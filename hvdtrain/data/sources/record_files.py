"""What formats of files of serialized records share."""

import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from hvdtrain.data.formats import DataError
from hvdtrain.data.sources.source import Source, TensorFunction
from hvdtrain.job.files import one_line_errors

Opened = TypeVar("Opened")


class FileVersion(NamedTuple):
    """A file, with what changes when it is written again."""

    path: pathlib.Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: pathlib.Path) -> "FileVersion":
        """Return the version of a file as it is now."""
        with reading(path):
            stat = path.stat()
        return cls(path, stat.st_size, stat.st_mtime_ns)

    def check(self) -> None:
        """Raise `DataError` if the file has changed."""
        if self != FileVersion.of(self.path):
            raise changed(self.path)


class RecordFiles(Source, Generic[Opened]):
    """Records by their number over several files, of which a few are open at a time.

    A subclass has `_read_records`.

    Attributes:
        max_open_files: beyond it, the file that was not used for longest is freed.
    """

    max_open_files = 256

    def __init__(
        self,
        files: Sequence[FileVersion],
        counts: Sequence[int],
        open_file: Callable[[FileVersion], Opened],
        parse: TensorFunction | None,
    ) -> None:
        """Create a source.

        Args:
            counts: the number of records of each file.
            open_file: returns what `_read_records` needs. It is freed, not closed,
                since another thread may read from it.
            parse: see `Source`; of a string tensor of shape (n,).
        """
        self.parse = parse
        self._files = files
        self._counts = counts
        self._ends = np.cumsum(counts)
        self._open = functools.lru_cache(self.max_open_files)(open_file)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> np.ndarray:
        """Return the records at `indices`: an array of `bytes` of shape (n,)."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        order = np.argsort(numbers, kind="stable")
        touched, firsts = np.unique(numbers[order], return_index=True)
        bounds = itertools.pairwise([*firsts.tolist(), len(indices)])
        records = np.empty(len(indices), object)
        for number, (first, last) in zip(touched.tolist(), bounds, strict=True):
            file = self._files[number]
            places = order[first:last]
            in_file = indices[places] - (self._ends[number] - self._counts[number])
            records[places] = self._read_records(file, self._open(file), in_file)
        return records

    def fingerprint(self) -> Any:
        # Neither directories nor times: the files may be copies, on another machine.
        files = [
            (file.path.name, file.size, int(count))
            for file, count in zip(self._files, self._counts, strict=True)
        ]
        digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        return {"samples": len(self), "files": len(files), "digest": digest[:16]}

    def _read_records(
        self, file: FileVersion, opened: Opened, numbers: np.ndarray
    ) -> list[bytes]:
        """Return the records of one file at `numbers` (int64, of shape (n,))."""
        raise NotImplementedError


def reading(path: str | os.PathLike[str]) -> Any:
    """Apply `one_line_errors` to reading a file."""
    return one_line_errors(
        f"read {path}",
        errors=(OSError, ValueError),
        remedy="expected a file that this user may read: fetch it again, or change "
        "its permissions",
        raises=DataError,
    )


def changed(path: pathlib.Path) -> DataError:
    """Return the error of a file that was written to after the source was created."""
    return DataError(
        f"Received {path}, which has changed since the job has started; expected files "
        "that stay the same: start the job again."
    )
