"""Copies on this node of files in stores, for libraries that read local files."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator, Sequence

from hvdtrain import environment
from hvdtrain.data.download import default_cache_dir
from hvdtrain.data.formats import DataError
from hvdtrain.data.sources import index_cache
from hvdtrain.data.sources.remote_files import RemoteFile
from hvdtrain.job.files import atomic_write, one_line_errors

# What a process keeps in memory of a file that it copies.
_WINDOW_BYTES = 1 << 25
# Errors of the system after which a file may be intact.
_TEMPORARY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


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
    path = _path(file)
    if _touch(path, file.size):
        return path
    try:
        with index_cache.locked(path, blocking=blocking):
            # Another process may have copied it before the lock was acquired.
            if not _touch(path, file.size):
                _remove_oldest(path.parent, environment.file_cache_bytes() - file.size)
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


@contextlib.contextmanager
def reading_copy(
    file: RemoteFile, errors: tuple[type[Exception], ...]
) -> Iterator[None]:
    """Remove the copy of a file if reading it raises one of `errors`.

    Otherwise each later job would read it again, also if the file is intact. After an
    error of the system that says nothing about the content, the copy stays.

    Raises:
        DataError: for such an error, with the file and its copy.
    """
    try:
        yield
    except errors as error:
        path = _path(file)
        if not (isinstance(error, OSError) and error.errno in _TEMPORARY):
            with contextlib.suppress(OSError):
                path.unlink()
        with one_line_errors(
            f"read {file.path} ({file.size} bytes) from its copy {path}",
            errors=errors,
            remedy="expected a complete file: start again, which copies it anew; if "
            "that fails, too, write the file again",
            raises=DataError,
        ):
            raise


def check_size(file: RemoteFile) -> None:
    """Raise `OSError` if the copy of a file was truncated; return if it is removed."""
    with contextlib.suppress(FileNotFoundError):
        size = _path(file).stat().st_size
        if size != file.size:
            raise OSError(f"the copy has {size} bytes")


def _path(file: RemoteFile) -> pathlib.Path:
    name = index_cache.digest("copy", *file.identity())
    return default_cache_dir() / "files" / name


def _touch(path: pathlib.Path, size: int) -> bool:
    """Note that a copy is used, and return whether it is there and complete."""
    with contextlib.suppress(OSError):
        os.utime(path)
        return path.is_file() and path.stat().st_size == size
    return False


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
