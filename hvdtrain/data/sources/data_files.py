"""The files of a source: from glob patterns, and whether they have changed."""

import glob
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from hvdtrain.data.formats import DataError
from hvdtrain.job.files import local_path, one_line_errors
from hvdtrain.job.world import JobError

Pattern = str | os.PathLike[str]


def find_files(patterns: Pattern | Iterable[Pattern]) -> list[pathlib.Path]:
    """Return the files that paths or glob patterns name.

    The matches of one pattern are sorted; several patterns keep their order. A file
    whose name contains `*`, `?` or `[` is found by its name.

    Args:
        patterns: a path, a pattern such as "~/data/train-*.tfrecord", or a list of
            these.

    Raises:
        DataError: nothing matches, a file occurs twice, is not a regular file, or
            cannot be read, or a path is an address such as gs://bucket/file.
    """
    if isinstance(patterns, str | os.PathLike):
        patterns = [patterns]
    files = [file for pattern in patterns for file in _match(pattern)]
    if not files:
        raise DataError("Received no files; expected a path, a pattern, or a list.")
    seen: set[pathlib.Path] = set()
    for file in files:
        if file in seen:
            raise DataError(
                f"Received {file} twice; expected each file once: change the patterns."
            )
        seen.add(file)
        _check(file)
    return files


def _match(pattern: Pattern) -> list[pathlib.Path]:
    try:
        path = local_path(pattern)
    except JobError as error:
        raise DataError(str(error)) from None
    if os.path.lexists(path):
        return [pathlib.Path(path)]
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
        raise DataError(
            f"Received {path}, which matches no file; expected the path of a file or a "
            "pattern such as train-*: check the directory and the name."
        )
    return [pathlib.Path(match) for match in matches]


def _check(file: pathlib.Path) -> None:
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

    def identity(self) -> tuple[str, int, int]:
        """Return what names the content on this machine, as values for JSON."""
        return os.path.abspath(self.path), self.size, self.mtime_ns

    def check(self) -> None:
        """Raise `DataError` if the file has changed."""
        if self != FileVersion.of(self.path):
            raise changed(self.path)


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
