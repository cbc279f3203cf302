"""ArrayRecord files, read by the library `array_record`."""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdtrain.data.formats import DataError
from hvdtrain.data.sources.data_files import DataFile
from hvdtrain.data.sources.local_copies import (
    check_size,
    copy_all,
    local_copy,
    reading_copy,
)
from hvdtrain.data.sources.record_files import RecordFiles
from hvdtrain.data.sources.remote_files import RemoteFile
from hvdtrain.data.sources.source import load_library
from hvdtrain.job.files import one_line_errors

# Without buffers and threads for sequential reading. Measured with 300-byte records:
# the library's default buffer of 1 MiB takes 7 times as long, and an index that is not
# in memory ("offloaded") 1,000 times.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_BUFFER_BYTES = 1 << 15
_ERRORS = (OSError, RuntimeError, ValueError)


class ArrayRecord(RecordFiles[Any]):
    """The records of ArrayRecord files, which TensorFlow Datasets and Grain write.

    Needs `pip install 'hvdtrain[arrayrecord]'`. The library checks the records, and
    keeps the index of each open file in memory. Files that were written with the option
    `group_size:1` are read fastest: of a larger group, all records are decompressed to
    read one.

    The library reads local files. Of files in a store, the source makes copies first,
    each by one process of a node, in `default_cache_dir()/files`. They stay there for
    later jobs, and are together as large as HVDTRAIN_FILE_CACHE_GB allows: of larger
    data, take another format.

    Args:
        files: as for `TFRecord`.
        parse: as for `TFRecord`.

    Raises:
        DataError: the library is not installed, no file matches, or one cannot be
            read, is truncated or of another format.
    """

    def _count_records(self, files: Sequence[DataFile]) -> Sequence[int]:
        module = load_library("array_record.python.array_record_module", "arrayrecord")
        self._reader_class = module.ArrayRecordReader
        copy_all([file for file in files if isinstance(file, RemoteFile)])
        return [self._count(file) for file in files]

    def _count(self, file: DataFile) -> int:
        count = self._open(file).num_records()
        if not count:
            raise DataError(
                f"Received {file.path} without records; expected some: write it again, "
                "or leave it out."
            )
        return count

    def _open(self, file: DataFile) -> Any:
        file.check()
        path = local_copy(file) if isinstance(file, RemoteFile) else file.path
        with _reading(file):
            reader = self._reader_class(
                str(path), _OPTIONS, file_reader_buffer_size=_BUFFER_BYTES
            )
            if not reader.ok():
                # Raises the reason.
                reader.close()
        return reader

    def _read_records(
        self, file: DataFile, opened: Any, numbers: np.ndarray
    ) -> list[bytes]:
        with _reading(file):
            records = opened.read(numbers.tolist())
            # After: the library returns empty records beyond the end of a truncated
            # file.
            if not isinstance(file, RemoteFile):
                file.check()
            elif not all(records):
                check_size(file)
        return records


def _reading(file: DataFile) -> contextlib.AbstractContextManager[None]:
    if isinstance(file, RemoteFile):
        return reading_copy(file, _ERRORS)
    return one_line_errors(
        f"read {file.path} ({file.size} bytes)",
        errors=_ERRORS,
        remedy="expected a complete ArrayRecord file: fetch or write it again",
        raises=DataError,
    )
