"""Copies on this node of files in stores, for libraries that read local files."""

import contextlib
import os
import pathlib
from collections.abc import Sequence

from hvdtrain import environment
from hvdtrain.data.download import default_cache_dir
from hvdtrain.data.formats import DataError
from hvdtrain.data.sources import index_cache
from hvdtrain.data.sources.remote_files import RemoteFile
from hvdtrain.job.files import atomic_write

# What a process keeps in memory of a file that it copies.
_WINDOW_BYTES = 1 << 25


def copy_all(files: Sequence[RemoteFile]) -> None:
    """Copy files to the cache, each by one process of a node.

    Raises:
        DataError: they are larger than the cache, or one cannot be read or written.
    """
    limit = _limit_bytes()
    size = sum(file.size for file in files)
    if size > limit:
        raise DataError(
            f"Received {len(files)} files of {size / 1e9:.3g} GB in a store; expected "
            f"{limit / 1e9:g} GB or less, since this format is read from local copies: "
            f"set {environment.FILE_CACHE} to more, or write another format."
        )
    index_cache.each_by_one_process(files, local_copy)


def local_copy(file: RemoteFile, blocking: bool = True) -> pathlib.Path:
    """Return the copy of a file in the cache, and copy the file unless it is there.

    Raises:
        BlockingIOError: another process copies it, and `blocking` is False.
        DataError: the file has changed, cannot be read, or cannot be written here.
    """
    name = index_cache.digest("copy", *file.identity())
    path = _directory() / name
    if _touch(path):
        return path
    try:
        with index_cache.locked(path, blocking=blocking):
            # Another process may have copied it before the lock was acquired.
            if not _touch(path):
                _remove_oldest(_limit_bytes() - file.size)
                with atomic_write(path) as partial, open(partial, "wb") as copy:
                    for start in range(0, file.size, _WINDOW_BYTES):
                        end = min(start + _WINDOW_BYTES, file.size)
                        copy.write(file.read(start, end))
                    # It may have been written again since it was found.
                    file.check()
    except BlockingIOError:
        raise
    except OSError as error:
        raise DataError(
            f"Cannot copy {file.path} to {path}: {error.strerror or error}; expected "
            f"{file.size} free bytes: set HVDTRAIN_CACHE_DIR to another directory."
        ) from None
    return path


def _directory() -> pathlib.Path:
    return default_cache_dir() / "files"


def _limit_bytes() -> float:
    try:
        return environment.file_cache_bytes()
    except ValueError as error:
        raise DataError(str(error)) from None


def _touch(path: pathlib.Path) -> bool:
    """Set the time of the last use of a copy; return whether it exists."""
    with contextlib.suppress(OSError):
        os.utime(path)
    return path.is_file()


def _remove_oldest(limit: float) -> None:
    """Remove the copies that were not used for longest, until the others fit."""
    copies = []
    # Neither locks nor what is being written.
    for path in _directory().glob("[0-9a-f]*[!k]"):
        # Another process may remove it, too.
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            copies.append((stat.st_mtime, stat.st_size, path))
    size = sum(size for _, size, _ in copies)
    for _, freed, path in sorted(copies):
        if size <= limit:
            break
        # A process that reads it keeps it open.
        path.unlink(missing_ok=True)
        size -= freed
