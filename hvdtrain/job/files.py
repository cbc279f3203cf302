"""The atomic write of files."""

import contextlib
import os
import pathlib


@contextlib.contextmanager
def atomic_write(path):
    """Yield a temporary path beside `path` that is renamed to `path` at the end.

    A reader sees the old file or the complete new one. On an exception the temporary
    file is removed and `path` stays as it was.
    """
    path = pathlib.Path(path)
    # A fixed name: the next process overwrites what a killed one has left.
    temporary = path.with_name(f".partial-{path.name}")
    try:
        yield temporary
        # Without it a crash of the machine may leave an empty file after the rename.
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
