"""The files that the script writes in its working directory."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def noted_files() -> Iterator[set[str]]:
    """Yield a set that gets the files which Python opens in the block to write anew.

    Their paths are relative to the working directory. Files that are appended to, as
    logs are, hidden ones, locks (`*.lock`) and caches of Python are left out.
    """
    written: set[str] = set()
    # Python removes no hook, and has no modules where it ends.
    is_active = [True]
    directory = pathlib.Path.cwd()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if not is_active:
            return
        # An error here would be one of the call of `open`.
        with contextlib.suppress(OSError, TypeError, ValueError):
            if event == "open" and arguments[2] & os.O_TRUNC:
                path = pathlib.Path(os.path.abspath(os.fsdecode(arguments[0])))
                parts = path.relative_to(directory).parts
                is_hidden = any(part.startswith((".", "__")) for part in parts)
                if not is_hidden and path.suffix != ".lock":
                    written.add("/".join(parts))

    sys.addaudithook(note)
    try:
        yield written
    finally:
        is_active.clear()
