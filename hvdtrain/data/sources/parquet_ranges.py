"""Footers and row groups of Parquet files in object stores, read by ranges."""

import io
from collections.abc import Iterable
from typing import Any

from hvdtrain.data.sources.remote_files import Range, RemoteFile, read_ranges

# The last bytes of a file: the length of the footer, and PAR1.
_END_BYTES = 8


def read_footer(file: RemoteFile) -> io.BytesIO:
    """Return the end of a file, from its footer on."""
    end = file.read(max(0, file.size - _END_BYTES))
    length = int.from_bytes(end[:4], "little")
    return io.BytesIO(file.read(max(0, file.size - _END_BYTES - length)))


class RowGroup(io.RawIOBase):
    """A file in a store, of which columns of one row group are in memory.

    Args:
        metadata: of the file, as pyarrow returns it.
        group: number of the row group.
    """

    def __init__(
        self, file: RemoteFile, metadata: Any, group: int, columns: Iterable[str]
    ) -> None:
        self._file = file
        self._position = 0
        row_group = metadata.row_group(group)
        ranges: list[Range] = []
        for chunk in map(row_group.column, range(row_group.num_columns)):
            path = chunk.path_in_schema
            # A nested column has several chunks, such as x.list.element.
            if any(path == name or path.startswith(f"{name}.") for name in columns):
                starts = (chunk.dictionary_page_offset, chunk.data_page_offset)
                start = min(start for start in starts if start)
                ranges.append((file, start, start + chunk.total_compressed_size))
        contents = read_ranges(ranges)
        self._chunks = {r[1]: c for r, c in zip(ranges, contents, strict=True)}

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}
        self._position = base.get(whence, 0) + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        start = self._position
        self._position = end = min(start + size, self._file.size)
        chunk = self._chunks.get(start, b"")
        # Of some old writers, pyarrow reads more than the chunk.
        return chunk[:size] if len(chunk) >= size else self._file.read(start, end)
