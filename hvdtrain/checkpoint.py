"""Files of a run, written so that nobody ever sees half of one."""

import contextlib
import json
import os
import pathlib
import tempfile

from hvdtrain.job import JobError
from hvdtrain.job.files import atomic_write


def prepare_directory(model_dir, *, files, needed_bytes):
    """Create `model_dir`, and make sure that it takes these files.

    Args:
        model_dir: the directory.
        files: names of the files that will be written or replaced.
        needed_bytes: what they may take.

    Raises:
        JobError: the directory cannot be created or written, or is too full; or it
            has directories by these names.
    """
    directory = pathlib.Path(model_dir)
    with _one_line_errors(model_dir):
        for name in files:
            if (directory / name).is_dir():
                raise JobError(
                    f"{directory / name} is a directory, expected a file or nothing: "
                    "remove it or choose another --model_dir."
                )
        if os.path.lexists(directory) and not directory.is_dir():
            raise JobError(
                f"{directory} is not a directory: choose another --model_dir."
            )
        directory.mkdir(parents=True, exist_ok=True)
        # Reserved for real: neither permissions nor free space tell the whole truth.
        with tempfile.TemporaryFile(dir=model_dir) as file:
            os.posix_fallocate(file.fileno(), 0, needed_bytes)


def save_model(model, path):
    """Write `model` to `path`, which ends in `.keras`, in one piece."""
    with _one_line_errors(path), atomic_write(path) as temporary:
        model.save(temporary)


def save_json(values, path):
    """Write a dict to `path` as JSON in one piece."""
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    with _one_line_errors(path), atomic_write(path) as temporary:
        temporary.write_text(text)


@contextlib.contextmanager
def _one_line_errors(path):
    try:
        yield
    except OSError as error:
        raise JobError(
            f"Cannot write {path}: {error.strerror or error}; expected a directory "
            "with free space that this user can write: choose another --model_dir."
        ) from None
