"""TFRecord files, read in any order by an index of their offsets."""

import ctypes
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hvdtrain import native
from hvdtrain.data.formats import DataError, Path, changed
from hvdtrain.data.sources.data_files import DataFile, reading
from hvdtrain.data.sources.mapped_file import map_file
from hvdtrain.data.sources.record_files import RecordFiles
from hvdtrain.data.sources.record_index import (
    FOOTER_BYTES,
    HEADER_BYTES,
    RecordIndex,
)
from hvdtrain.data.sources.remote_files import (
    Range,
    RemoteFile,
    check_again,
    read_ranges,
)

_LENGTH_BYTES = np.arange(8)
# Returns the number of the first bad record, or -1: of the address of a mapped file,
# the addresses of offsets and lengths (int64), and their number.
_Check = Callable[[int, int, int, int], int]


@dataclasses.dataclass(frozen=True)
class _MappedFile:
    """A TFRecord file in memory (uint8), and the offsets of its records (int64)."""

    content: np.ndarray
    offsets: np.ndarray


class TFRecord(RecordFiles[_MappedFile]):
    """The records of TFRecord files, uncompressed.

    Each file is scanned once, by one process of a node. The offsets of its records stay
    in `default_cache_dir()/index`, 8 bytes a record, for as long as the file does not
    change. Without a directory that can be written they are kept in memory.

    Files in a store are scanned by reading all of them. Then the records of a batch are
    read by ranges, by concurrent requests; up to 16 KiB between two of them are read
    with them. Once a minute, the versions of the files that are read are compared.

    The checksums of the data are checked where hvdtrain's native library is installed;
    otherwise only the checksums of the lengths, in the scan.

    Args:
        files: a path, an address, a pattern such as "~/data/train-*.tfrecord" or
            "gs://bucket/train-*.tfrecord", or a list of these.
        parse: function of the records of several samples, a string tensor of shape
            (n,), that returns a nest of dense tensors of shape (n, ...), such as
            `lambda records: tf.io.parse_example(records, features)`. None for the
            serialized records.

    Raises:
        DataError: no file matches, or one cannot be read, is truncated, damaged,
            compressed, or of another format.
    """

    # Two mappings each, of the 65,530 that Linux allows a process.
    max_open_files = 1 << 14

    def _count_records(self, files: Sequence[DataFile]) -> Sequence[int]:
        self._index = RecordIndex(files)
        # By file in a store, when its version was last known.
        self._checked: dict[RemoteFile, float] = {}
        return self._index.counts

    def _read_parts(
        self, parts: list[tuple[DataFile, np.ndarray]]
    ) -> Iterator[list[bytes]]:
        # The ranges of all files at a time.
        ranges: list[Range] = []
        for file, numbers in parts:
            if isinstance(file, RemoteFile):
                offsets = self._index.offsets(file)
                bounds = np.stack([offsets[numbers], offsets[numbers + 1]], axis=1)
                ranges += [(file, *bound) for bound in bounds.tolist()]
        check_again(
            {file for file, _, _ in ranges}, self._checked, now=time.monotonic()
        )
        contents = iter(read_ranges(ranges) if ranges else ())
        for file, numbers in parts:
            if isinstance(file, RemoteFile):
                records = list(itertools.islice(contents, len(numbers)))
                ends = np.cumsum([len(record) for record in records])
                content = np.frombuffer(b"".join(records), np.uint8)
                yield _cut(file, content, np.append(0, ends[:-1]), ends)
            else:
                yield self._read_records(file, self._get_open(file), numbers)

    def _open(self, file: DataFile) -> _MappedFile:
        file.check()
        with reading(file.path):
            content = map_file(file.path)
        return _MappedFile(content, self._index.offsets(file))

    def _read_records(
        self, file: DataFile, opened: _MappedFile, numbers: np.ndarray
    ) -> list[bytes]:
        # Before: to read beyond the end of a truncated file would end the process.
        file.check()
        starts, ends = opened.offsets[numbers], opened.offsets[numbers + 1]
        return _cut(file, opened.content, starts, ends)


def _cut(
    file: DataFile, content: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> list[bytes]:
    """Return the data of the records at offsets in `content`, after `_check`."""
    _check(file.path, content, starts, ends)
    firsts, lasts = starts + HEADER_BYTES, ends - FOOTER_BYTES
    data = content.data
    return [
        data[first:last].tobytes()
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]


def _check(
    path: Path, content: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> None:
    """Raise `DataError` unless the records have the offsets in the index."""
    lengths = ends - starts - (HEADER_BYTES + FOOTER_BYTES)
    if check_records := _native_check():
        # Without the interpreter's lock, which a page that is read from the disk would
        # hold otherwise.
        bad = check_records(
            content.ctypes.data, starts.ctypes.data, lengths.ctypes.data, len(starts)
        )
        if bad < 0:
            return
    stored = content[starts[:, None] + _LENGTH_BYTES].view("<i8")[:, 0]
    if (stored != lengths).any():
        raise changed(path)
    if check_records:
        raise DataError(
            f"Received {path} with a record at byte {starts[bad]} that does not have "
            "its checksum; expected an undamaged file: fetch or write it again."
        )


@functools.cache
def _native_check() -> _Check | None:
    try:
        check: _Check = bind_check(native.load().functions)
    except OSError:
        return None
    return check


def bind_check(functions: ctypes.CDLL) -> _Check:
    """Return `hvdtrain_check_records` of a library, with its types."""
    check = functions.hvdtrain_check_records
    check.restype = ctypes.c_int64
    check.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
    return check
