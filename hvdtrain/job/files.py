"""The atomic write of files, and their errors as one line."""

import contextlib
import glob
import os
import pathlib
import secrets
import time

from hvdtrain.job.world import JobError

# The temporary file of a killed process is removed by a later write. Not sooner:
# another job that shares the directory may still write to it.
_STALE_SECONDS = 3600.0


@contextlib.contextmanager
def atomic_write(path):
    """Yield a temporary path beside `path` that is renamed to `path` at the end.

    A reader sees the old file or the complete new one. On an exception the temporary
    file is removed and `path` stays as it was. Of several jobs that write the same
    path, the last rename counts.
    """
    path = pathlib.Path(path)
    _remove_stale(path)
    # With the suffix of `path`, from which Keras infers the format of a model.
    temporary = path.with_name(f".partial-{secrets.token_hex(4)}-{path.name}")
    try:
        yield temporary
        # Without it a crash of the machine may leave an empty file after the rename.
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        # The rename itself is durable only with its directory.
        _synchronize_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_partial(directory):
    """Remove all temporary files of `atomic_write`. For the only writer of a directory.

    They are those of processes that were killed.
    """
    for left in directory.glob(f".partial-{'?' * 8}-*"):
        left.unlink(missing_ok=True)


def _synchronize_directory(directory):
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove_stale(path):
    names = f".partial-{'?' * 8}-{glob.escape(path.name)}"
    for left in path.parent.glob(names):
        # A concurrent job may have renamed or removed it by now.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()


@contextlib.contextmanager
def one_line_errors(
    action, *, remedy, errors=(OSError,), raises=JobError, reason_of=None
):
    """Turn errors of files in the enclosed block into a `JobError` of one line.

    Args:
        action: what failed, such as "write /tmp/x".
        remedy: what was expected, and what to do.
        errors: exceptions of files.
        raises: subclass of `JobError` to raise in their place.
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


def _reason(error):
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.splitlines()[0]
