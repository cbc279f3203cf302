"""Files that appear whole or not at all."""

import contextlib
import os
import pathlib


@contextlib.contextmanager
def written_at_once(path):
    """Yields a temporary path beside `path` that becomes `path` at the end."""
    path = pathlib.Path(path)
    # Always the same: what a killed process has left is overwritten by the next.
    temporary = path.with_name(f".partial-{path.name}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
