"""The files of a source: from glob patterns, and whether they have changed."""

import glob
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hvdtrain.data.formats import DataError, changed
from hvdtrain.data.sources.remote_files import RemoteFile, find_remote_files
from hvdtrain.job.files import is_address, local_path, one_line_errors

Pattern = str | os.PathLike[str]


class FileVersion(NamedTuple):
    """A file on a disk, with what changes when it is written again."""

    path: pathlib.Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: pathlib.Path) -> "FileVersion":
        """Return the version of a file as it is now."""
        with reading(path):
            stat = path.stat()
        return cls(path, stat.st_size, stat.st_mtime_ns)

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.name

    def identity(self) -> tuple[str, int, int]:
        """Return what names the content on this machine, as values for JSON."""
        return os.path.abspath(self.path), self.size, self.mtime_ns

    def check(self) -> None:
        """Raise `DataError` if the file has changed."""
        # Not `of`: a batch of 1,000 files would take a tenth longer.
        try:
            stat = os.stat(self.path)
        except OSError:
            with reading(self.path):
                raise
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
            raise changed(self.path)


DataFile = FileVersion | RemoteFile


def find_files(patterns: Pattern | Iterable[Pattern]) -> list[DataFile]:
    """Return the files that paths, addresses or glob patterns name, as they are now.

    The matches of one pattern are sorted; several patterns keep their order. A file
    whose name contains `*`, `?` or `[` is found by its name.

    Args:
        patterns: a path, a pattern such as "~/data/train-*.tfrecord" or
            "gs://bucket/train-*.tfrecord", or a list of these.

    Raises:
        DataError: nothing matches, a file occurs twice, is not a regular file, or
            cannot be read.
    """
    if isinstance(patterns, str | os.PathLike):
        patterns = [patterns]
    files = [file for pattern in patterns for file in _match(pattern)]
    if not files:
        raise DataError("Received no files; expected a path, a pattern, or a list.")
    seen: dict[str, DataFile] = {}
    for file in files:
        other = seen.setdefault(_resolved(file), file)
        if other is not file:
            raise DataError(
                f"Received one file as {other.path} and as {file.path}; expected each "
                "file once: change the patterns."
            )
    return files


def _resolved(file: DataFile) -> str:
    """Return what two paths of one file have in common, links included."""
    return file.path if isinstance(file, RemoteFile) else os.path.realpath(file.path)


def _match(pattern: Pattern) -> Sequence[DataFile]:
    if is_address(pattern):
        return find_remote_files(os.fspath(pattern))
    path = local_path(pattern)
    exists = os.path.lexists(path)
    matches = [path] if exists else sorted(glob.glob(path, recursive=True))
    if not matches:
        raise DataError(
            f"Received {path}, which matches no file; expected the path of a file or a "
            "pattern such as train-*: check the directory and the name."
        )
    return [_check(pathlib.Path(match)) for match in matches]


def _check(file: pathlib.Path) -> FileVersion:
    if file.is_dir():
        raise DataError(
            f"Received the directory {file}; expected files: name them by a pattern "
            f"such as {file / '*'}."
        )
    # To open a pipe would block.
    if not file.is_file():
        raise DataError(f"Received {file}; expected a regular file.")
    if not os.access(file, os.R_OK):
        raise DataError(
            f"Cannot read {file}: Permission denied; expected a file that this user "
            "may read: change its permissions."
        )
    return FileVersion.of(file)


def reading(path: str | os.PathLike[str]) -> Any:
    """Apply `one_line_errors` to reading a file."""
    return one_line_errors(
        f"read {path}",
        errors=(OSError, ValueError),
        remedy="expected a file that this user may read: fetch it again, or change "
        "its permissions",
        raises=DataError,
    )
