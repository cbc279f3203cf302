"""The files that the script writes in its working directory."""

import contextlib
import os
import pathlib
import sys
from typing import Any


def note_written_files() -> set[str]:
    """Return a set that will have the files which Python opens to write them anew.

    Their paths are relative to the working directory. Files that are appended to, as
    logs are, and hidden ones are left out, and so are caches of Python.
    """
    written: set[str] = set()
    directory = pathlib.Path.cwd()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        # An error here would be one of the call of `open`.
        with contextlib.suppress(OSError, TypeError, ValueError):
            if event == "open" and arguments[2] & os.O_TRUNC:
                path = pathlib.Path(os.path.abspath(os.fsdecode(arguments[0])))
                parts = path.relative_to(directory).parts
                if not any(part.startswith((".", "__")) for part in parts):
                    written.add("/".join(parts))

    sys.addaudithook(note)
    return written
