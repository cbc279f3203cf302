"""The JSON files of a benchmark."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.job import launchers
from hvdtrain.job.files import (
    atomic_write,
    check_output,
    one_line_errors,
    writing_output,
)


def check_json(path: str | None) -> None:
    """Raise a `JobError` on rank 0 if the file of `--json` cannot be written."""
    if path and launchers.launch().rank == 0:
        check_output(path, "--json")


def read_json(paths: Sequence[str]) -> dict[str, Any]:
    """Return the contents of JSON files, by path.

    Raises:
        JobError: a path is not a regular file, cannot be read, or is not JSON.
    """
    results = {}
    for path in paths:
        with one_line_errors(
            f"read {path}",
            errors=(OSError, ValueError),
            remedy="expected a file that --json wrote",
        ):
            # Reading a pipe or a device may never end.
            if pathlib.Path(path).exists() and not pathlib.Path(path).is_file():
                raise ValueError("Not a regular file")
            results[path] = json.loads(pathlib.Path(path).read_text())
    return results


def write_json(path: str | os.PathLike[str], result: Mapping[str, Any]) -> None:
    """Write the file of `--json`."""
    path = pathlib.Path(path)
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    with writing_output(path, "--json"), atomic_write(path) as temporary:
        temporary.write_text(text)
