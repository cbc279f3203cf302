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
    """Copy files to the cache, each by one process of a node."""
    limit = environment.file_cache_bytes()
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
    directory = default_cache_dir() / "files"
    path = directory / index_cache.digest("copy", *file.identity())
    if _touch(path):
        return path
    try:
        with index_cache.locked(path, blocking=blocking):
            # Another process may have copied it before the lock was acquired.
            if not _touch(path):
                _remove_oldest(directory, environment.file_cache_bytes() - file.size)
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


def _touch(path: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        os.utime(path)
    return path.is_file()


def _remove_oldest(directory: pathlib.Path, limit: float) -> None:
    """Remove the copies that were not used for longest, until the others fit."""
    copies = []
    # Neither locks nor what is being written.
    for path in directory.glob("[0-9a-f]*[!k]"):
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
