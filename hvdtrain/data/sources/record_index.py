"""The index of a TFRecord file: the offsets of its records, kept in a cache.

A record is its length (8 bytes), the masked CRC-32C of the length (4), the data, and
the masked CRC-32C of the data (4), all little-endian. The format has no index, so that
each file is scanned once.
"""

import array
import contextlib
import fcntl
import hashlib
import os
import pathlib
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from hvdtrain.data.download import default_cache_dir
from hvdtrain.data.formats import DataError
from hvdtrain.data.sources.mapped_file import map_file
from hvdtrain.data.sources.record_files import FileVersion, reading
from hvdtrain.job.files import atomic_write

HEADER_BYTES = 12
FOOTER_BYTES = 4
_FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES
# Bounds the memory of the vectorized check.
_RECORDS_PER_CHECK = 1 << 16
# Of an npy file: 8 bytes of magic and version, and the length of the header (2), whose
# end is a multiple of 64.
_NPY_PREFIX = 10
_POLYNOMIAL = 0x82F63B78
_ALL_BITS = np.uint32(0xFFFFFFFF)


class RecordIndex:
    """The offsets of the records of files, each file scanned by one process of a node.

    Attributes:
        counts: the number of records of each file.
    """

    def __init__(self, files: Sequence[FileVersion]) -> None:
        # Of files whose index cannot be kept in the cache.
        self._in_memory: dict[FileVersion, np.ndarray] = {}
        # Each process starts at another file, and leaves those that others scan for
        # the end.
        start = os.getpid() % len(files)
        busy = [
            file
            for file in (*files[start:], *files[:start])
            if not self._prepare(file, blocking=False)
        ]
        for file in busy:
            self._prepare(file, blocking=True)
        self.counts = [len(self.offsets(file)) - 1 for file in files]

    def offsets(self, file: FileVersion) -> np.ndarray:
        """Return where each record starts and, last, the size of the file: int64.

        A memory map, unless the cache cannot be written.

        Raises:
            DataError: the file has changed, or a new scan of it fails.
        """
        offsets = self._in_memory.get(file)
        if offsets is None:
            offsets = _load(file)
        # The cache may have been emptied meanwhile.
        if offsets is None:
            file.check()
            offsets = self._in_memory[file] = scan(file.path)
        return offsets

    def _prepare(self, file: FileVersion, *, blocking: bool) -> bool:
        """Scan a file unless it has an index; return whether it has one now."""
        if _load(file) is not None:
            return True
        path = _index_path(file)
        try:
            with _locked(path, blocking=blocking):
                # Another process may have written it before the lock was acquired.
                if _load(file) is None:
                    self._in_memory[file] = scan(file.path)
                    with atomic_write(path) as temporary, open(temporary, "wb") as out:
                        np.save(out, self._in_memory[file])
                    del self._in_memory[file]
        except BlockingIOError:
            return False
        except OSError:
            # The cache cannot be written.
            if file not in self._in_memory:
                self._in_memory[file] = scan(file.path)
        return True


@contextlib.contextmanager
def _locked(path: pathlib.Path, *, blocking: bool) -> Iterator[None]:
    """Hold the lock of an index, which ends with the process at the latest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock")
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            # A file system without locks: several processes may scan this file, and
            # the last rename counts.
            pass
        yield
        # A process that still acquires the removed file finds the index.
        lock.unlink(missing_ok=True)


def _index_path(file: FileVersion) -> pathlib.Path:
    key = f"{os.path.abspath(file.path)}\0{file.size}\0{file.mtime_ns}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    # Directories of few files: `atomic_write` lists the directory.
    return default_cache_dir() / "index" / name[:2] / f"{name[2:]}.npy"


def _load(file: FileVersion) -> np.ndarray | None:
    """Return the mapped index of a file, or None without a complete one."""
    # Not np.load: it takes a tenth of a millisecond, and keeps a file descriptor.
    try:
        content = map_file(_index_path(file))
    except OSError:
        return None
    start = _NPY_PREFIX + int.from_bytes(content[8:_NPY_PREFIX].tobytes(), "little")
    if len(content) % 8 or len(content) < start + 16:
        return None
    offsets = content[start:].view(np.int64)
    is_complete = (offsets[0], offsets[-1]) == (0, file.size)
    return offsets if is_complete else None


def scan(path: pathlib.Path) -> np.ndarray:
    """Return where each record of a file starts and, last, the size of the file.

    The lengths are checked by their checksums, the data is not read.

    Raises:
        DataError: the file is empty, truncated, damaged, compressed, or no TFRecord
            file.
    """
    with reading(path):
        if not path.stat().st_size:
            raise DataError(
                f"Received {path} with 0 bytes; expected records: write it again, or "
                "leave it out."
            )
        content = map_file(path)
    data, size = content.data, len(content)
    # 8 bytes a record; a list would take 40.
    starts = array.array("q")
    read_length = struct.Struct("<Q").unpack_from
    position = 0
    while position <= size - _FRAME_BYTES:
        starts.append(position)
        position += read_length(data, position)[0] + _FRAME_BYTES
    _check_headers(path, content, np.frombuffer(starts, np.int64))
    if position != size:
        cut = starts[-1] if position > size else position
        raise DataError(
            f"Received {path}, which ends at byte {size} within the record at byte "
            f"{cut}; expected a complete file: it is truncated, fetch or write it "
            "again."
        )
    starts.append(size)
    return np.frombuffer(starts, np.int64)


def _check_headers(path: pathlib.Path, content: np.ndarray, starts: np.ndarray) -> None:
    """Raise `DataError` unless each length has its checksum."""
    magic = content[:2].tobytes()
    for first in range(0, len(starts), _RECORDS_PER_CHECK):
        some = starts[first : first + _RECORDS_PER_CHECK]
        headers = content[some[:, None] + np.arange(HEADER_BYTES)]
        stored = headers[:, 8:].copy().view("<u4")[:, 0]
        [bad] = np.nonzero(stored != _masked_crcs(headers[:, :8]))
        if len(bad):
            raise _other_format(path, magic, int(some[bad[0]]))
    if not len(starts):
        raise _other_format(path, magic, 0)


def _other_format(path: pathlib.Path, magic: bytes, position: int) -> DataError:
    is_zlib = magic[:1] == b"\x78" and int.from_bytes(magic) % 31 == 0
    if position == 0 and (magic == b"\x1f\x8b" or is_zlib):
        return DataError(
            f"Received {path}, compressed with {'zlib' if is_zlib else 'gzip'}; "
            "expected a plain TFRecord file, since compressed ones cannot be read in "
            "any order: decompress it."
        )
    return DataError(
        f"Received {path} with no valid record at byte {position}; expected a TFRecord "
        "file: it is of another format, or damaged: fetch or write it again."
    )


def _crc_tables() -> np.ndarray:
    """Return the CRC-32C of each byte at each of 8 places: uint32 (8, 256).

    The byte in row `i` has `i` bytes after it.
    """
    rows = [np.arange(256, dtype=np.uint32)]
    for _ in range(8):
        odd = (rows[0] & 1).astype(bool)
        rows[0] = np.where(odd, rows[0] >> 1 ^ np.uint32(_POLYNOMIAL), rows[0] >> 1)
    for _ in range(7):
        rows.append(rows[-1] >> 8 ^ rows[0][rows[-1] & 0xFF])
    return np.stack(rows)


_CRC_TABLES = _crc_tables()


def _masked_crcs(lengths: np.ndarray) -> np.ndarray:
    """Return the masked CRC-32C of each row: uint8 (n, 8) to uint32 (n,)."""
    # The initial value of the checksum inverts the first four bytes.
    rows = lengths ^ np.array([0xFF] * 4 + [0] * 4, np.uint8)
    crcs = np.bitwise_xor.reduce(_CRC_TABLES[np.arange(7, -1, -1), rows], axis=1)
    crcs ^= _ALL_BITS
    return (crcs >> 15 | crcs << 17) + np.uint32(0xA282EAD8)
