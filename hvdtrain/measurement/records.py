"""The files that a benchmark writes: JSON, and a plot."""

import importlib.util
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.job import JobError
from hvdtrain.job.files import (
    atomic_write,
    check_output,
    one_line_errors,
    writing_output,
)
from hvdtrain.measurement.benchmark_options import BenchmarkOptions


def check(options: BenchmarkOptions) -> None:
    """Check, before a benchmark, that its files can be written after it.

    Raises:
        JobError: a directory is missing or cannot be written, a path is a directory, or
            matplotlib is missing.
    """
    if options.json:
        check_output(options.json, "--json")
    if options.plot:
        check_plot(options.plot, "plot")


def check_plot(path: str | os.PathLike[str], flag: str) -> None:
    """Check that a PNG file can be drawn, and written for a flag.

    Raises:
        JobError: for the reasons of `check_output`, or matplotlib is missing.
    """
    check_output(path, f"--{flag}")
    if not importlib.util.find_spec("matplotlib"):
        raise JobError(
            f"matplotlib is missing; --{flag} needs it: pip install matplotlib."
        )


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


def write_plot(path: str | os.PathLike[str], result: Mapping[str, Any]) -> None:
    """Draw the file of `--plot`."""
    path = pathlib.Path(path)
    # Imported here: it loads matplotlib, which is an extra.
    plotting = importlib.import_module("hvdtrain.measurement.charts")
    with writing_output(path, "--plot"), atomic_write(path) as temporary:
        plotting.draw(result, temporary)
