"""Checkpoint files: complete or absent, named by their step, the newest ones kept.

    step-00000300.json                   header, digests of itself and the other file
    step-00000300-9f86d081.safetensors   arrays

Each file is written under a temporary name, synchronized to the disk and renamed. The
JSON file comes last: a file of arrays that no JSON file names was left by a writer that
was killed. The arrays get a new name in each write, so that the rename of the JSON file
alone replaces a checkpoint of the same step.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from hvdtrain.checkpoint.header import (
    FORMAT,
    Arrays,
    Checkpoint,
    Header,
    check_format,
    parse,
)
from hvdtrain.job import JobError
from hvdtrain.job.files import atomic_write, one_line_errors, remove_partial

_NAME = re.compile(r"step-(\d{8,})\.json")
# The key of the digest of all other values in the JSON file.
_DIGEST = "digest"
_HOUR_SECONDS = 3600.0
_DAMAGE = (OSError, LookupError, TypeError, ValueError, SafetensorError)
# Other errors of the system, such as EIO or EMFILE, may be temporary.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)

_Read = TypeVar("_Read")


class CheckpointError(JobError):
    """A checkpoint that cannot be used; the message names the file and the reason."""


class UnreadableError(JobError):
    """A file that cannot be read now, and may be intact."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _JsonFile:
    """The contents of the JSON file of a checkpoint.

    Attributes:
        arrays: name of the file of arrays, in the same directory; `sha256` and `bytes`
            are its digest and its size.
        bfloat16: names of the arrays of bfloat16, which are stored as uint16.
        seconds: time of writing since the epoch.
        metadata: the `Header` without its step.
    """

    arrays: str
    sha256: str
    bytes: int
    bfloat16: list[str]
    format: int = FORMAT
    step: int
    seconds: float
    metadata: dict[str, Any]

    @property
    def header(self) -> Header:
        return parse(Header, self.metadata, step=self.step)


class CheckpointFiles:
    """The checkpoints in a directory, which one process writes.

    Args:
        directory: created with the first checkpoint, in a directory that exists.
        keep_max: how many of the newest checkpoints are kept, 1 or more.
        keep_every_hours: also keep the first of every so many hours; 0 for none.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_max: int = 5,
        keep_every_hours: float = 0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory = pathlib.Path(directory)
        self._keep_max = keep_max
        self._keep_seconds = keep_every_hours * _HOUR_SECONDS
        self._clock = clock
        self._sleep = sleep
        self._superseded: set[int] = set()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, valid or not, newest first.

        Raises:
            UnreadableError: the directory cannot be read now.
        """
        try:
            names = self._retried(self._directory, lambda: os.listdir(self._directory))
        except _ABSENT:
            return []
        matches = map(_NAME.fullmatch, names)
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def path(self, step: int) -> pathlib.Path:
        """Return the path of the JSON file of a checkpoint."""
        return self._directory / f"step-{step:08}.json"

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint, and delete old ones.

        Return which of them could not be deleted, and why; empty if there are none.

        Raises:
            CheckpointError: a file cannot be written; earlier checkpoints are intact.
        """
        path = self.path(checkpoint.step)
        with _one_line_errors("write", path), contextlib.ExitStack() as on_error:
            # Without parents: a run directory that was removed is not made again.
            self._directory.mkdir(exist_ok=True)
            name = f"{path.stem}-{secrets.token_hex(4)}.safetensors"
            on_error.callback(self._discard, checkpoint.step, name)
            contents = _JsonFile(
                **self._write_arrays(name, checkpoint.arrays),
                step=checkpoint.step,
                seconds=self._clock(),
                metadata=checkpoint.header.to_json(),
            )
            # A metric may be NaN, which Python writes and reads as the word NaN.
            values = {**vars(contents), _DIGEST: _digest_of(vars(contents))}
            text = json.dumps(values, indent=2) + "\n"
            with atomic_write(path) as temporary:
                temporary.write_text(text)
            on_error.pop_all()
        # The checkpoint is complete: a failed deletion is no failure of the write, and
        # the next write tries again.
        try:
            return _first_line(self._delete_old(checkpoint.step))
        except (OSError, UnreadableError) as error:
            return f"no old one deleted: {error}"

    def read(self, step: int) -> Checkpoint:
        """Return a checkpoint whose arrays have the right digest.

        Raises:
            CheckpointError: it is truncated, corrupt, or of another version.
            UnreadableError: it cannot be read now, and may be intact.
        """

        def read() -> Checkpoint:
            contents = self._verified(step)
            arrays = _load(self._directory / contents.arrays)
            for name in contents.bfloat16:
                arrays[name] = arrays[name].view("bfloat16")
            return Checkpoint(header=contents.header, arrays=arrays)

        return self._read(step, read)

    def header(self, step: int) -> Header:
        """Return the header of a checkpoint, whose arrays may be damaged."""
        return self._read(step, lambda: self._contents(step).header)

    def verify(self, step: int) -> Header:
        """Return the header of a checkpoint; check and raise as `read` does."""
        return self._read(step, lambda: self._verified(step).header)

    def _read(self, step: int, read: Callable[[], _Read]) -> _Read:
        path = self.path(step)
        with _one_line_errors("read", path):
            return self._retried(path, read)

    def _verified(self, step: int) -> _JsonFile:
        """Return the contents of a JSON file whose file of arrays is not damaged."""
        contents = self._contents(step)
        if contents.step != step:
            raise ValueError(f"it is of step {contents.step}")
        path = self._directory / contents.arrays
        size = path.stat().st_size
        if size != contents.bytes:
            raise ValueError(f"{path.name} has {size} bytes, expected {contents.bytes}")
        if _digest(path) != contents.sha256:
            raise ValueError(f"{path.name} has another digest")
        return contents

    def _contents(self, step: int, *, any_format: bool = False) -> _JsonFile:
        values = json.loads(self.path(step).read_text())
        if not any_format:
            check_format(values)
        if values.pop(_DIGEST, None) != _digest_of(values):
            raise ValueError("it has another digest than the one it contains")
        return parse(_JsonFile, values)

    def _retried(self, path: pathlib.Path, read: Callable[[], _Read]) -> _Read:
        """Return `read()`; after an error that may be temporary, try again."""
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

    def delete_leftovers(self) -> None:
        """Delete the files that a killed writer has left. For the only writer.

        Raises:
            CheckpointError: there are arrays of several checkpoints, and no JSON file.
        """
        with _one_line_errors("write", self._directory):
            if not self._directory.is_dir():
                return
            # A killed writer leaves the arrays of one checkpoint: more of them are a
            # user's work whose JSON files are lost.
            if not self.steps() and len(self._all_arrays()) > 1:
                raise CheckpointError(
                    f"{self._directory} has the arrays of {len(self._all_arrays())} "
                    "checkpoints, and no JSON file, without which they cannot be used: "
                    "restore these files, or choose another model_dir."
                )
            remove_partial(self._directory)
            for error in self._delete_arrays(but=self.steps()):
                raise error

    def supersede_after(self, step: int) -> None:
        """Let the next write delete all checkpoints of later steps than `step`.

        The training continues from `step`, since they are damaged, for example.
        """
        self._superseded = {later for later in self.steps() if later > step}

    def _write_arrays(self, name: str, arrays: Arrays) -> dict[str, Any]:
        """Write a new file; return the fields of `_JsonFile` that describe it."""
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

    def _discard(self, step: int, name: str) -> None:
        """Delete the arrays of a failed write, unless the JSON file names them."""
        with contextlib.suppress(*_DAMAGE):
            if self._contents(step).arrays == name:
                return
        (self._directory / name).unlink(missing_ok=True)

    def _delete_old(self, newest: int) -> list[OSError]:
        superseded = self._superseded - {newest}
        steps = [step for step in self.steps() if step not in superseded]
        kept = {*steps[: self._keep_max], *self._hourly(steps)}
        old = [self.path(step) for step in self.steps() if step not in kept]
        # JSON files first: if this process is killed between the two, the arrays are
        # deleted at the next start. A JSON file without arrays is a damaged checkpoint.
        errors = _delete(old)
        remaining = self.steps()
        self._superseded = superseded.intersection(remaining)
        return errors + self._delete_arrays(but=remaining)

    def _delete_arrays(self, *, but: Iterable[int]) -> list[OSError]:
        """Delete the arrays that no JSON file of the steps `but` names."""
        kept = set()
        for step in but:
            try:
                kept.add(self._contents(step, any_format=True).arrays)
            except _DAMAGE:
                # Unreadable now, or of a later version: keep all that may belong to it.
                kept |= {path.name for path in self._all_arrays(f"step-{step:08}*")}
        return _delete(path for path in self._all_arrays() if path.name not in kept)

    def _all_arrays(self, stem: str = "step-*") -> list[pathlib.Path]:
        return list(self._directory.glob(f"{stem}.safetensors"))

    def _hourly(self, steps: list[int]) -> Iterator[int]:
        if not self._keep_seconds:
            return
        last = None
        for step in reversed(steps):
            try:
                seconds = self._contents(step, any_format=True).seconds
            except _DAMAGE as error:
                # A damaged checkpoint is of no use; one behind EIO may be intact.
                if isinstance(error, OSError) and not isinstance(error, _ABSENT):
                    yield step
                continue
            if last is None or seconds - last >= self._keep_seconds:
                last = seconds
                yield step


def _delete(paths: Iterable[pathlib.Path]) -> list[OSError]:
    """Delete files; return the errors of failed deletions."""
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


def _load(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load_file(path)
    except FileNotFoundError:
        # safetensors raises it for any error of opening, EMFILE for example. The file
        # existed just before, when its digest was computed.
        raise OSError(errno.EIO, "it cannot be opened") from None


def _digest_of(values: dict[str, Any]) -> str:
    """Return the digest of a JSON file's values, whatever its white space."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _digest(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _storable(arrays: Arrays) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return contiguous arrays, bfloat16 as its bits, and the names of the latter."""
    of_bfloat16 = [name for name, a in arrays.items() if a.dtype.name == "bfloat16"]
    bits = {name: arrays[name].view(np.uint16) for name in of_bfloat16}
    # `ascontiguousarray` turns a scalar into an array of shape (1,).
    return {
        name: np.ascontiguousarray(array).reshape(array.shape)
        for name, array in {**arrays, **bits}.items()
    }, of_bfloat16


def _one_line_errors(action: str, path: pathlib.Path) -> AbstractContextManager[None]:
    return one_line_errors(
        f"{action} {path}",
        errors=_DAMAGE,
        remedy="expected a directory with free space that this user can write"
        if action == "write"
        else "expected a complete checkpoint",
        raises=CheckpointError,
    )
