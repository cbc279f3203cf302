"""Checkpoint files: complete or absent, named by their step, the newest ones kept.

    step-00000300.json                   name and digest of the other, and the rest
    step-00000300-9f86d081.safetensors   arrays, in the format of safetensors

Each is written to a temporary file, synchronized to the disk and renamed. The JSON
file comes last: arrays that none names are those of a writer that was killed. The
arrays have a new name in each write, so that the rename of the JSON file alone
replaces a checkpoint of the same step.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import secrets
import time
from collections.abc import Callable, Iterable

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from hvdtrain.job import JobError
from hvdtrain.job.files import (
    atomic_write,
    one_line_errors,
    remove_partial,
)

# To be increased when an older version could not read what this one writes.
FORMAT = 3
# Format 2 has frozen weights once for each rank.
_READABLE = (2, FORMAT)
_NAME = re.compile(r"step-(\d{8,})\.json")
_HOUR_SECONDS = 3600.0
_DAMAGE = (OSError, LookupError, TypeError, ValueError, SafetensorError)
# Any other error of the system, such as EIO or EMFILE, may pass.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)


class CheckpointError(JobError):
    """A checkpoint that cannot be used; the message names the file and the reason."""


class UnreadableError(JobError):
    """A file that cannot be read now, and may be intact."""


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
        directory: created with the first checkpoint, in a directory that exists.
        keep_max: the newest ones that are kept, 1 or more.
        keep_every_hours: in addition, the first of every so many hours; 0 for none.
        clock: returns seconds since the epoch.
        sleep: waits for a number of seconds before a file is read again.
    """

    def __init__(
        self,
        directory,
        *,
        keep_max=5,
        keep_every_hours=0,
        clock=time.time,
        sleep=time.sleep,
    ):
        self._directory = pathlib.Path(directory)
        self._keep_max = keep_max
        self._keep_seconds = keep_every_hours * _HOUR_SECONDS
        self._clock = clock
        self._sleep = sleep
        self._superseded = set()

    def steps(self):
        """Return the steps of all checkpoints, newest first, valid or not.

        Raises:
            UnreadableError: the directory cannot be read now.
        """
        try:
            found = self._retried(self._directory, lambda: os.listdir(self._directory))
        except _ABSENT:
            return []
        matches = map(_NAME.fullmatch, found)
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def path(self, step):
        """Return the path of the JSON file of a checkpoint."""
        return self._directory / f"step-{step:08}.json"

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a `Checkpoint`, then delete those that are not to be kept.

        Returns:
            Which files could not be deleted, and why; empty if all are.

        Raises:
            CheckpointError: a file cannot be written; earlier checkpoints are intact.
        """
        path = self.path(checkpoint.step)
        with _one_line_errors("write", path), contextlib.ExitStack() as on_error:
            # Not those above it: the directory of the run may have been removed.
            self._directory.mkdir(exist_ok=True)
            name = f"{path.stem}-{secrets.token_hex(4)}.safetensors"
            on_error.callback(self._discard, checkpoint.step, name)
            described = self._write_arrays(name, checkpoint.arrays) | {
                "format": FORMAT,
                "step": checkpoint.step,
                "seconds": self._clock(),
                "metadata": checkpoint.metadata,
            }
            # A metric may be NaN, which Python writes and reads as the word NaN.
            text = json.dumps(described, indent=2) + "\n"
            with atomic_write(path) as temporary:
                temporary.write_text(text)
            on_error.pop_all()
        # The checkpoint is complete: what cannot be deleted now is so after the next.
        try:
            return _first_line(self._delete_old(checkpoint.step))
        except (OSError, UnreadableError) as error:
            return f"no old one deleted: {error}"

    def read(self, step: int) -> Checkpoint:
        """Return a `Checkpoint`.

        Raises:
            CheckpointError: it is truncated, corrupt, or of another version.
            UnreadableError: it cannot be read now, which need not be damage.
        """

        def read():
            described = self._checked(step)
            path = self._directory / described["arrays"]
            arrays = _load(path)
            for name in described["bfloat16"]:
                arrays[name] = arrays[name].view("bfloat16")
            return Checkpoint(step=step, arrays=arrays, metadata=described["metadata"])

        with _one_line_errors("read", self.path(step)):
            return self._retried(self.path(step), read)

    def verify(self, step: int) -> dict:
        """Return the metadata of a checkpoint whose arrays have the right digest.

        Errors are those of `read`.
        """
        path = self.path(step)
        with _one_line_errors("read", path):
            return self._retried(path, lambda: self._checked(step))["metadata"]

    def _checked(self, step: int) -> dict:
        """Return what the JSON file has of arrays that are as they were written."""
        path, described = self.path(step), self._described(step)
        if described["step"] != step:
            raise ValueError(f"it is that of step {described['step']}")
        if described["format"] not in _READABLE:
            raise CheckpointError(
                f"Cannot read {path}: it has the format {described['format']}, "
                f"and this version of hvdtrain reads {_READABLE[0]} to {FORMAT}."
            )
        arrays_path = self._directory / described["arrays"]
        size = arrays_path.stat().st_size
        if size != described["bytes"]:
            raise ValueError(
                f"{arrays_path.name} has {size} bytes, expected {described['bytes']}"
            )
        if _digest(arrays_path) != described["sha256"]:
            raise ValueError(f"{arrays_path.name} has another digest")
        return described

    def _retried(self, path: pathlib.Path, read: Callable):
        """Return `read()`; after an error that may pass, wait and read again."""
        for seconds in (*_RETRY_SECONDS, None):
            try:
                return read()
            except _ABSENT:
                raise
            except OSError as error:
                reason = error.strerror
            if seconds is not None:
                self._sleep(seconds)
        raise UnreadableError(
            f"Cannot read {path}: {reason}, {len(_RETRY_SECONDS) + 1} times in "
            f"{sum(_RETRY_SECONDS):g} s. It may be intact, and is kept: start the job "
            "again when it can be read."
        )

    def delete_leftovers(self):
        """Delete what a writer that was killed has left. For the only writer.

        Raises:
            CheckpointError: there are arrays of several checkpoints, and no JSON file.
        """
        with _one_line_errors("write", self._directory):
            if not self._directory.is_dir():
                return
            # A killed writer leaves the arrays of one checkpoint.
            if not self.steps() and len(self._all_arrays()) > 1:
                raise CheckpointError(
                    f"{self._directory} has the arrays of {len(self._all_arrays())} "
                    "checkpoints, and no JSON file, without which they cannot be used: "
                    "restore these files, or choose another model_dir."
                )
            remove_partial(self._directory)
            for error in self._delete_arrays(but=self.steps()):
                raise error

    def supersede_after(self, step):
        """Let the next write delete all checkpoints of later steps than `step`.

        They were passed over: the training goes on from `step`.
        """
        self._superseded = {each for each in self.steps() if each > step}

    def _write_arrays(self, name, arrays):
        """Write them to a new file; return what the JSON file has of it."""
        arrays, of_bfloat16 = _storable(arrays)
        with atomic_write(self._directory / name) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode
            safetensors.numpy.save_file(arrays, temporary)
            # The library makes a file that only this user can read.
            temporary.chmod(mode)
            digest, size = _digest(temporary), temporary.stat().st_size
        return {
            "arrays": name,
            "sha256": digest,
            "bytes": size,
            "bfloat16": of_bfloat16,
        }

    def _discard(self, step, name):
        """Delete the arrays of a failed write, unless the JSON file names them."""
        with contextlib.suppress(*_DAMAGE):
            if self._described(step)["arrays"] == name:
                return
        (self._directory / name).unlink(missing_ok=True)

    def _delete_old(self, newest: int) -> list[OSError]:
        """Delete what is not to be kept; return the errors of what remains."""
        superseded = self._superseded - {newest}
        steps = [step for step in self.steps() if step not in superseded]
        kept = {*steps[: self._keep_max], *self._hourly(steps)}
        old = [self.path(step) for step in self.steps() if step not in kept]
        errors = _delete(old)
        remaining = self.steps()
        # The next write tries again.
        self._superseded = superseded.intersection(remaining)
        # After the JSON files: arrays that none names are no checkpoint.
        return errors + self._delete_arrays(but=remaining)

    def _delete_arrays(self, *, but: Iterable[int]) -> list[OSError]:
        """Delete the arrays that no JSON file of the steps `but` names."""
        kept = set()
        for step in but:
            try:
                kept.add(self._described(step)["arrays"])
            except _DAMAGE:
                # Also of another version: all that may belong to it is kept.
                kept |= {path.name for path in self._all_arrays(f"step-{step:08}*")}
        return _delete(path for path in self._all_arrays() if path.name not in kept)

    def _all_arrays(self, stem="step-*"):
        return list(self._directory.glob(f"{stem}.safetensors"))

    def _hourly(self, steps):
        if not self._keep_seconds:
            return
        last = None
        for step in reversed(steps):
            try:
                seconds = self._described(step)["seconds"]
            except _DAMAGE as error:
                # Resuming passes over a damaged one, too.
                if _may_pass(error):
                    yield step
                continue
            if last is None or seconds - last >= self._keep_seconds:
                last = seconds
                yield step

    def _described(self, step):
        return json.loads(self.path(step).read_text())


def _may_pass(error: Exception) -> bool:
    return isinstance(error, OSError) and not isinstance(error, _ABSENT)


def _delete(paths: Iterable[pathlib.Path]) -> list[OSError]:
    """Delete files; return the errors of those that remain."""
    errors = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    return errors


def _first_line(errors: list[OSError]) -> str:
    if not errors:
        return ""
    more = f" and {len(errors) - 1} more" if errors[1:] else ""
    return f"cannot delete {errors[0].filename}{more}: {errors[0].strerror}"


def _load(path: pathlib.Path) -> dict:
    try:
        return safetensors.numpy.load_file(path)
    except FileNotFoundError:
        # The library raises it for any error of opening, EMFILE for example. That
        # the file exists was seen just before.
        raise OSError(errno.EIO, "it cannot be opened") from None


def _digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _storable(arrays):
    """Return contiguous arrays, bfloat16 as its bits, and the names of the latter."""
    of_bfloat16 = [name for name, a in arrays.items() if a.dtype.name == "bfloat16"]
    bits = {name: arrays[name].view(np.uint16) for name in of_bfloat16}
    # The shape of a scalar is lost otherwise.
    return {
        name: np.ascontiguousarray(array).reshape(array.shape)
        for name, array in (arrays | bits).items()
    }, of_bfloat16


def _one_line_errors(action, path):
    return one_line_errors(
        f"{action} {path}",
        errors=_DAMAGE,
        remedy="expected a directory with free space that this user can write"
        if action == "write"
        else "expected a complete checkpoint",
        raises=CheckpointError,
    )
