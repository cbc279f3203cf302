"""The files that a benchmark writes: JSON, and a plot."""

import importlib.util
import json
import pathlib
import tempfile

from hvdtrain.job import JobError
from hvdtrain.job.files import atomic_write, one_line_errors


def check(options):
    """Check, before a benchmark, that its files can be written after it.

    Raises:
        JobError: a directory is missing or cannot be written, the path is that of a
            directory, or matplotlib is missing.
    """
    for flag, path in (("json", options.json), ("plot", options.plot)):
        if path:
            _check_path(pathlib.Path(path), flag)
    if options.plot and not importlib.util.find_spec("matplotlib"):
        raise JobError(
            "matplotlib is missing; --plot needs it: pip install matplotlib."
        )


def _check_path(path, flag):
    if path.is_dir():
        raise JobError(
            f"Received --{flag}={path}, a directory; expected the path of a file."
        )
    # Permissions as reported do not include quotas and read-only mounts.
    with _writing(path, flag), tempfile.TemporaryFile(dir=path.parent):
        pass


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
    with _writing(path, "json"), atomic_write(path) as temporary:
        temporary.write_text(text)


def write_plot(path, result):
    """Draw a result as a PNG file."""
    path = pathlib.Path(path)
    # Loads matplotlib, which is an extra.
    plotting = importlib.import_module("hvdtrain.measurement.plotting")
    with _writing(path, "plot"), atomic_write(path) as temporary:
        plotting.draw(result, temporary)


def _writing(path, flag):
    return one_line_errors(
        f"write {path}",
        remedy="expected a directory with free space that this user can write: choose "
        f"another --{flag}",
    )
