"""Footers and row groups of Parquet files in object stores, read by ranges."""

import io
from collections.abc import Iterable
from typing import Any

from hvdtrain.data.sources.remote_files import Range, RemoteFile, read_ranges

# Most footers are shorter; a longer one is read by a second request.
TAIL_BYTES = 1 << 16
# The last bytes of a file: the length of the footer, and PAR1.
END_BYTES = 8


def read_footer(file: RemoteFile, tail_bytes: int = TAIL_BYTES) -> io.BytesIO:
    """Return the end of a file, with the footer.

    Args:
        tail_bytes: what is read first, as the length of the footer is not known.
    """
    tail = file.read(max(0, file.size - tail_bytes))
    length = int.from_bytes(tail[-END_BYTES:-4], "little") + END_BYTES
    if len(tail) < length <= file.size:
        tail = file.read(file.size - length)
    return io.BytesIO(tail)


def open_row_group(
    file: RemoteFile, metadata: Any, group: int, columns: Iterable[str]
) -> "PartsOfFile":
    """Return a file that contains the columns of one row group.

    Args:
        metadata: of the file, as pyarrow returns it.
    """
    row_group = metadata.row_group(group)
    chunks = [row_group.column(number) for number in range(row_group.num_columns)]
    parts = []
    for chunk in chunks:
        path = chunk.path_in_schema
        # The parts of a nested column are chunks of their own, such as x.list.element.
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            starts = (chunk.dictionary_page_offset, chunk.data_page_offset)
            start = min(start for start in starts if start)
            parts.append((file, start, start + chunk.total_compressed_size))
    return PartsOfFile(file, parts)


class PartsOfFile(io.RawIOBase):
    """A file in a store of which some ranges are in memory; others are read."""

    def __init__(self, file: RemoteFile, parts: list[Range]) -> None:
        self._file = file
        self._parts = list(zip(parts, read_ranges(parts), strict=True))
        self._position = 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = base.get(whence, 0) + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        start = self._position
        end = self._file.size if size is None or size < 0 else start + size
        self._position = end = min(end, self._file.size)
        for (_, first, last), content in self._parts:
            if first <= start and end <= last:
                return content[start - first : end - first]
        return self._file.read(start, end)
