"""The index of a TFRecord file: the offsets of its records, kept in a cache.

A record is its length (8 bytes), the masked CRC-32C of the length (4), the data, and
the masked CRC-32C of the data (4), all little-endian. The format has no index, so that
each file is scanned once.
"""

import array
import struct
from collections.abc import Sequence

import numpy as np

from hvdtrain.data.formats import DataError, Path
from hvdtrain.data.sources import index_cache
from hvdtrain.data.sources.data_files import DataFile, reading
from hvdtrain.data.sources.mapped_file import map_file
from hvdtrain.data.sources.remote_files import RemoteFile

HEADER_BYTES = 12
FOOTER_BYTES = 4
_FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES
# Bounds the memory of the vectorized check.
_RECORDS_PER_CHECK = 1 << 16
# Of a file in a store that is scanned: what a process keeps of it.
_WINDOW_BYTES = 1 << 25
_POLYNOMIAL = 0x82F63B78
_ALL_BITS = np.uint32(0xFFFFFFFF)


class RecordIndex:
    """The offsets of the records of files, each file scanned by one process of a node.

    Attributes:
        counts: the number of records of each file.
    """

    def __init__(self, files: Sequence[DataFile]) -> None:
        # Of files whose index cannot be kept in the cache.
        self._in_memory: dict[DataFile, np.ndarray] = {}
        index_cache.each_by_one_process(files, self._prepare)
        self.counts = [len(self.offsets(file)) - 1 for file in files]

    def offsets(self, file: DataFile) -> np.ndarray:
        """Return where each record starts and, last, the size of the file: int64.

        A memory map, unless the cache cannot be written.

        Raises:
            DataError: the file has changed, or a new scan of it fails.
        """
        offsets = self._in_memory.get(file)
        if offsets is None:
            offsets = index_cache.load(_name(file))
        # The cache may have been emptied meanwhile, or be damaged.
        if offsets is None or (offsets[0], offsets[-1]) != (0, file.size):
            file.check()
            offsets = self._in_memory[file] = scan(file)
        return offsets

    def _prepare(self, file: DataFile, blocking: bool) -> None:
        """Scan a file unless it has an index."""
        name = _name(file)
        offsets = index_cache.cached(name, lambda: scan(file), blocking=blocking)
        if index_cache.load(name) is None:
            self._in_memory[file] = offsets


def _name(file: DataFile) -> str:
    return index_cache.digest("tfrecord", *file.identity())


def scan(file: DataFile) -> np.ndarray:
    """Return where each record of a file starts and, last, the size of the file.

    The lengths are checked by their checksums, the data is not read.

    Raises:
        DataError: the file is empty, truncated, damaged, compressed, or no TFRecord
            file.
    """
    path, size = file.path, file.size
    if not size:
        raise DataError(
            f"Received {path} with 0 bytes; expected records: write it again, or "
            "leave it out."
        )
    first, content = 0, _content_from(file, 0)
    magic = content[:2].tobytes()
    # 8 bytes a record; a list would take 40.
    starts = array.array("q")
    read_length = struct.Struct("<Q").unpack_from
    position = 0
    while position <= size - _FRAME_BYTES:
        if position > first + len(content) - HEADER_BYTES:
            first, content = position, _content_from(file, position)
        last = min(size - _FRAME_BYTES, first + len(content) - HEADER_BYTES)
        data, known = content.data, len(starts)
        while position <= last:
            starts.append(position)
            position += read_length(data, position - first)[0] + _FRAME_BYTES
        found = np.array(starts[known:], np.int64)
        if (bad := _find_bad_header(content, found - first)) is not None:
            raise _other_format(path, magic, int(found[bad]))
    if not starts:
        raise _other_format(path, magic, 0)
    if position != size:
        cut = starts[-1] if position > size else position
        raise DataError(
            f"Received {path}, which ends at byte {size} within the record at byte "
            f"{cut}; expected a complete file: it is truncated, fetch or write it "
            "again."
        )
    if isinstance(file, RemoteFile):
        # It may have been written again since it was found.
        file.check()
    starts.append(size)
    return np.frombuffer(starts, np.int64)


def _content_from(file: DataFile, position: int) -> np.ndarray:
    """Return bytes of a file from `position` on: uint8; all of a file on a disk."""
    if isinstance(file, RemoteFile):
        end = min(file.size, position + _WINDOW_BYTES)
        return np.frombuffer(file.read(position, end), np.uint8)
    with reading(file.path):
        return map_file(file.path)


def _find_bad_header(content: np.ndarray, starts: np.ndarray) -> int | None:
    """Return the first of the records whose length does not have its checksum."""
    for first in range(0, len(starts), _RECORDS_PER_CHECK):
        some = starts[first : first + _RECORDS_PER_CHECK]
        headers = content[some[:, None] + np.arange(HEADER_BYTES)]
        stored = headers[:, 8:].copy().view("<u4")[:, 0]
        [bad] = np.nonzero(stored != _masked_crcs(headers[:, :8]))
        if len(bad):
            return first + int(bad[0])
    return None


def _other_format(path: Path, magic: bytes, position: int) -> DataError:
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
