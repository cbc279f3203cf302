"""Checkpoint files: complete or absent, named by their step, the newest ones kept.

    step-00000300.safetensors   arrays, in the format of the library safetensors
    step-00000300.json          digest of that file, and what is not an array

Each is written to a temporary file, synchronized to the disk and renamed. The JSON
file comes last: without it the arrays are those of a writer that was killed.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import time

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from hvdtrain.job import JobError
from hvdtrain.job.files import atomic_write, one_line_errors, remove_partial

# To be increased when an older version could not read what this one writes.
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})\.(json|safetensors)")
_HOUR_SECONDS = 3600.0


class CheckpointError(JobError):
    """A checkpoint that cannot be used; the message names the file and the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The contents of a checkpoint.

    Attributes:
        step: global steps before it.
        arrays: NumPy arrays by name.
        metadata: what JSON can hold.
    """

    step: int
    arrays: dict
    metadata: dict


class CheckpointFiles:
    """The checkpoints in a directory, which one process writes.

    Args:
        directory: created when the first checkpoint is written.
        keep_max: the newest ones that are kept, 1 or more.
        keep_every_hours: in addition, the first of every so many hours; 0 for none.
        clock: returns seconds since the epoch.
    """

    def __init__(self, directory, *, keep_max=5, keep_every_hours=0, clock=time.time):
        self._directory = pathlib.Path(directory)
        self._keep_max = keep_max
        self._keep_seconds = keep_every_hours * _HOUR_SECONDS
        self._clock = clock

    def steps(self):
        """Return the steps of all checkpoints, newest first, valid or not."""
        return sorted(self._names(".json"), reverse=True)

    def path(self, step):
        """Return the path of the arrays of a checkpoint."""
        return self._directory / f"step-{step:08}.safetensors"

    def write(self, checkpoint):
        """Write a `Checkpoint`, then delete those that are not to be kept.

        Raises:
            CheckpointError: a file cannot be written; earlier checkpoints are intact.
        """
        path = self.path(checkpoint.step)
        with _one_line_errors("write", path):
            self._directory.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                temporary.touch()
                mode = temporary.stat().st_mode
                safetensors.numpy.save_file(_storable(checkpoint.arrays), temporary)
                # The library makes a file that only this user can read.
                temporary.chmod(mode)
                digest, size = _digest(temporary), temporary.stat().st_size
            described = {
                "format": FORMAT,
                "step": checkpoint.step,
                "sha256": digest,
                "bytes": size,
                "seconds": self._clock(),
                "metadata": checkpoint.metadata,
            }
            # A metric may be NaN; Python's JSON has a word for it.
            text = json.dumps(described, indent=2) + "\n"
            with atomic_write(path.with_suffix(".json")) as temporary:
                temporary.write_text(text)
            self._delete_old(checkpoint.step)

    def read(self, step):
        """Return a `Checkpoint`.

        Raises:
            CheckpointError: it is truncated, corrupt, or of another version.
        """
        path = self.path(step)
        with _one_line_errors("read", path):
            described = self._described(step)
            if described["format"] != FORMAT:
                raise CheckpointError(
                    f"Cannot read {path}: it has the format {described['format']}, "
                    f"and this version of hvdtrain reads {FORMAT}."
                )
            size = path.stat().st_size
            if size != described["bytes"]:
                raise ValueError(f"{size} bytes, expected {described['bytes']}")
            if _digest(path) != described["sha256"]:
                raise ValueError("the digest differs from that in its JSON file")
            arrays = safetensors.numpy.load_file(path)
        return Checkpoint(step=step, arrays=arrays, metadata=described["metadata"])

    def metadata(self, step):
        """Return the metadata of a checkpoint, without its arrays.

        Raises:
            CheckpointError: its JSON file cannot be read.
        """
        with _one_line_errors("read", self.path(step)):
            return self._described(step)["metadata"]

    def delete_leftovers(self):
        """Delete what a writer that was killed has left. For the only writer."""
        if not self._directory.is_dir():
            return
        with _one_line_errors("write", self._directory):
            remove_partial(self._directory)
            for step in self._names(".safetensors") - self._names(".json"):
                self.path(step).unlink(missing_ok=True)

    def _delete_old(self, newest):
        """Delete the checkpoints that are not to be kept.

        Those of later steps are of a run before, which did not continue from them.
        """
        steps = [step for step in self.steps() if step <= newest]
        kept = {*steps[: self._keep_max], *self._hourly(steps)}
        for step in self.steps():
            if step not in kept:
                # In this order: arrays without JSON file are no checkpoint.
                self.path(step).with_suffix(".json").unlink(missing_ok=True)
                self.path(step).unlink(missing_ok=True)

    def _hourly(self, steps):
        if not self._keep_seconds:
            return
        last = None
        for step in reversed(steps):
            seconds = self._described(step)["seconds"]
            if last is None or seconds - last >= self._keep_seconds:
                last = seconds
                yield step

    def _described(self, step):
        return json.loads(self.path(step).with_suffix(".json").read_text())

    def _names(self, suffix):
        if not self._directory.is_dir():
            return set()
        matches = [_NAME.fullmatch(path.name) for path in self._directory.iterdir()]
        return {int(m[1]) for m in matches if m and m[0].endswith(suffix)}


def _digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _storable(arrays):
    """Return the arrays contiguous, and those of bfloat16 as their bits."""
    return {
        name: np.ascontiguousarray(
            array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        ).reshape(array.shape)
        for name, array in arrays.items()
    }


def _one_line_errors(action, path):
    return one_line_errors(
        f"{action} {path}",
        errors=(OSError, LookupError, TypeError, ValueError, SafetensorError),
        remedy="expected a directory with free space that this user can write"
        if action == "write"
        else "expected a complete checkpoint",
        raises=CheckpointError,
    )
