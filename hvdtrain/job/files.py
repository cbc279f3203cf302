"""The atomic write of files and directories, and their errors as one line."""

import contextlib
import errno
import glob
import importlib.util
import os
import pathlib
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from hvdtrain.job.world import JobError

# One slash is enough: pathlib removes the other. "::" is in fsspec's chains, such as
# simplecache::s3://bucket/run.
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]*::)*[A-Za-z][\w+.-]*:/")
# A path of this machine: file:///run, or file:/run as pathlib has it.
_FILE_ADDRESS = re.compile(r"(?:file|local):(?://)?(?=/(?!/))")
# Age from which a later write removes the temporary file of a killed process. A newer
# file may belong to another job that shares the directory.
_STALE_SECONDS = 3600.0


def is_address(path: str | os.PathLike) -> bool:
    """Return whether a path is the address of a store, such as s3://bucket/run.

    file:///run is the path /run.
    """
    return bool(_ADDRESS.match(_without_file_scheme(path)))


def path_or_address(path: str | os.PathLike) -> str:
    """Return the address of a store as text, or a path with ~ expanded."""
    text = _without_file_scheme(path)
    if not is_address(text):
        return local_path(text)
    # pathlib removes a slash.
    return re.sub(":/(?!/)", "://", text, count=1)


def local_path(path: str | os.PathLike) -> str:
    """Return a path as text, with ~ expanded.

    Raises:
        JobError: it is the address of a store, such as s3://bucket/run, in whose place
            a directory `s3:` would be made here.
    """
    text = _without_file_scheme(path)
    if is_address(text):
        raise JobError(
            f"Received {text}; expected a path of a mounted file system: an address "
            "of a store is not supported here."
        )
    return os.path.expanduser(text)


def _without_file_scheme(path: str | os.PathLike) -> str:
    return _FILE_ADDRESS.sub("", os.fspath(path), count=1)


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yield a temporary path beside `path` that is renamed to `path` at the end.

    A reader sees the old file or the complete new one. On an exception the temporary
    file is removed and `path` stays as it was. Of several jobs that write the same
    path, the last rename counts.
    """
    path = pathlib.Path(path)
    _remove_stale(path)
    temporary = _temporary(path)
    try:
        yield temporary
        # Without it a crash of the machine may leave an empty file after the rename.
        _synchronize(temporary)
        temporary.replace(path)
        # The rename itself is durable only with its directory.
        _synchronize(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_directory(path: str | os.PathLike) -> None:
    """Create a directory and those above it, durably, unless it exists."""
    path = pathlib.Path(path)
    missing = [parent for parent in (path, *path.parents) if not parent.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in reversed(missing):
        # A directory is durable only with the one that contains it.
        _synchronize(directory.parent)


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yield a new directory beside `path` that is renamed to `path` at the end.

    `path` must have no other writer. A reader sees a complete directory: the old one
    or the new one, and none between two renames. On an exception the new one is
    removed.
    """
    path = pathlib.Path(path)
    temporary = _temporary(path)
    try:
        temporary.mkdir()
        yield temporary
        for directory, _, names in os.walk(temporary):
            for name in (*names, "."):
                _synchronize(os.path.join(directory, name))
        # A rename replaces an empty directory only.
        if path.is_dir():
            remove_directory(path)
        temporary.rename(path)
        _synchronize(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_directory(path: pathlib.Path) -> None:
    """Remove a directory atomically for its readers, by a rename."""
    removed = _temporary(path)
    path.rename(removed)
    # NFS refuses while a reader has a file open; the next start removes the rest.
    shutil.rmtree(removed, ignore_errors=True)


def remove_partial(directory: pathlib.Path) -> None:
    """Remove the temporary files and directories that killed processes have left.

    The directory must have no other writer.
    """
    for left in directory.glob(f".partial-{'?' * 8}-*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _temporary(path: pathlib.Path) -> pathlib.Path:
    # With the suffix of `path`, from which Keras infers the format of a model.
    return path.with_name(f".partial-{secrets.token_hex(4)}-{path.name}")


def _synchronize(path: str | os.PathLike) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        # Some network file systems, and mounted buckets, have no such operation.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(number)


def _remove_stale(path: pathlib.Path) -> None:
    names = f".partial-{'?' * 8}-{glob.escape(path.name)}"
    for left in path.parent.glob(names):
        # A concurrent job may have renamed or removed it by now.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()


@contextlib.contextmanager
def one_line_errors(
    action: str,
    *,
    remedy: str,
    errors: tuple[type[Exception], ...] = (OSError,),
    raises: type[JobError] = JobError,
    reason_of: Callable[[Any], str | None] | None = None,
) -> Iterator[None]:
    """Raise a `JobError` of one line in place of `errors` in the enclosed block.

    Args:
        action: what failed, such as "write /tmp/x".
        remedy: what was expected, and what to do.
        reason_of: returns the reason that an exception contains; by default the
            message of the system, else the first line of the exception.
    """
    try:
        yield
    except JobError:
        raise
    except errors as error:
        reason = (reason_of or _reason)(error)
        raise raises(f"Cannot {action}: {reason}; {remedy}.") from None


def check_output(path: str | os.PathLike, name: str) -> None:
    """Check, before a long computation, that a file can be written after it.

    Args:
        name: flag or variable that has the path, as `--json`.

    Raises:
        JobError: it is a directory, or its directory is missing or cannot be written.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise JobError(
            f"Received {name}={path}, a directory; expected the path of a file."
        )
    # Permissions as reported do not include quotas and read-only mounts.
    with writing_output(path, name), tempfile.TemporaryFile(dir=path.parent):
        pass


def check_picture(path: str | os.PathLike, name: str) -> None:
    """`check_output`, and that matplotlib is installed, which draws the file."""
    check_output(path, name)
    if not importlib.util.find_spec("matplotlib"):
        raise JobError(
            f"matplotlib is missing; {name} needs it: pip install matplotlib."
        )


def writing_output(
    path: str | os.PathLike, name: str
) -> contextlib.AbstractContextManager[None]:
    """Apply `one_line_errors` to the file of a flag or variable."""
    return one_line_errors(
        f"write {path}",
        remedy="expected a directory with free space that this user can write: choose "
        f"another {name}",
    )


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.splitlines()[0]
