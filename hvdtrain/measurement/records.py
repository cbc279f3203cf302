"""The files that a benchmark writes: JSON, and a plot."""

import importlib.util
import json
import pathlib

from hvdtrain.job import JobError
from hvdtrain.job.files import (
    atomic_write,
    check_output,
    one_line_errors,
    writing_output,
)


def check(options):
    """Check, before a benchmark, that its files can be written after it.

    Raises:
        JobError: a directory is missing or cannot be written, the path is that of a
            directory, or matplotlib is missing.
    """
    if options.json:
        check_output(options.json, "json")
    if options.plot:
        check_plot(options.plot, "plot")


def check_plot(path, flag):
    """Check that a PNG file can be drawn, and written for a flag.

    Raises:
        JobError: as `check_output`; or matplotlib is missing.
    """
    check_output(path, flag)
    if not importlib.util.find_spec("matplotlib"):
        raise JobError(
            f"matplotlib is missing; --{flag} needs it: pip install matplotlib."
        )


def read_json(paths):
    """Return the contents of JSON files, by path.

    Raises:
        JobError: a path is not that of a file, or a file cannot be read or is not JSON.
    """
    results = {}
    for path in paths:
        with one_line_errors(
            f"read {path}",
            errors=(OSError, ValueError),
            remedy="expected a file that --json wrote",
        ):
            # A pipe or a device would be read without end.
            if pathlib.Path(path).exists() and not pathlib.Path(path).is_file():
                raise ValueError("Not a regular file")
            results[path] = json.loads(pathlib.Path(path).read_text())
    return results


def write_json(path, result):
    """Write a dict as JSON."""
    path = pathlib.Path(path)
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    with writing_output(path, "json"), atomic_write(path) as temporary:
        temporary.write_text(text)


def write_plot(path, result):
    """Draw a result as a PNG file."""
    path = pathlib.Path(path)
    # Loads matplotlib, which is an extra.
    plotting = importlib.import_module("hvdtrain.measurement.charts")
    with writing_output(path, "plot"), atomic_write(path) as temporary:
        plotting.draw(result, temporary)
