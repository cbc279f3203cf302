"""Checkpoint files: complete or absent, named by their step, the newest ones kept.

    step-00000300.json                   header, digests of itself and the other file
    step-00000300-9f86d081.safetensors   arrays

On a disk, each file is written under a temporary name, synchronized and renamed; to a
store, it is uploaded as a whole. The JSON file comes last. The arrays get a new name in
each write, so that the JSON file alone replaces a checkpoint of the same step.

A file is deleted because newer checkpoints that are complete supersede it, and never
because another file is missing. Arrays without a JSON file may be left by a writer that
was killed, may be a copy in progress, or a store may list the JSON file late: they stay
until `keep_max` checkpoints of later steps are complete.
"""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from hvdtrain.checkpoint.directories import Directory, directory_of
from hvdtrain.checkpoint.header import (
    Arrays,
    Checkpoint,
    Header,
    JsonFile,
    check_format,
    parse,
)
from hvdtrain.job import JobError
from hvdtrain.job.files import one_line_errors
from hvdtrain.stores.object_store import DeletionDeniedError, StoreError

_NAME = re.compile(r"step-(\d{8,})\.json")
# As `write` names arrays. A date at the end of a user's own file does not match.
_ARRAYS = re.compile(r"step-(\d{8,})-[a-f][\da-f]{7}\.safetensors")
# The key of the digest of all other values in the JSON file.
_DIGEST = "digest"
_HOUR_SECONDS = 3600.0
# RecursionError: JSON of deeply nested brackets.
_DAMAGE = (
    *(OSError, LookupError, TypeError, ValueError, RecursionError),
    SafetensorError,
)
# Other errors of the system, such as EIO or EMFILE, may be temporary.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)

_Read = TypeVar("_Read")


class CheckpointError(JobError):
    """A checkpoint that cannot be used; the message names the file and the reason."""


class UnreadableError(JobError):
    """A file that cannot be read now, and may be intact."""


class CheckpointFiles:
    """The checkpoints in a directory, which one process writes.

    Args:
        directory: a path, an address, or a `Directory`. It is created by `prepare`, or
            with the first checkpoint, in a directory that exists.
        keep_max: how many of the newest checkpoints are kept, 1 or more.
        keep_every_hours: also keep the first of every so many hours; 0 for none.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Directory,
        *,
        keep_max: int = 5,
        keep_every_hours: float = 0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if isinstance(directory, str | os.PathLike):
            directory = directory_of(directory)
        self._directory = directory
        self._keep_max = keep_max
        self._keep_seconds = keep_every_hours * _HOUR_SECONDS
        self._clock = clock
        self._sleep = sleep
        self._superseded: set[int] = set()
        # The names of arrays, by step, as far as this process has read or written them.
        self._arrays: dict[int, str] = {}
        # Files that the store does not let this process delete: one attempt each.
        self._denied: set[str] = set()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, valid or not, newest first.

        Raises:
            UnreadableError: the directory cannot be read now.
        """
        try:
            names = self._retried(self._directory, self._directory.names)
        except _ABSENT:
            return []
        matches = map(_NAME.fullmatch, names)
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def path(self, step: int) -> pathlib.Path | str:
        """Return the path of the JSON file of a checkpoint, or its address."""
        return self._directory.path(_json_name(step))

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint, and delete old ones.

        Return which of them could not be deleted, and why; empty if there are none.

        Raises:
            CheckpointError: a file cannot be written; earlier checkpoints are intact.
        """
        step = checkpoint.step
        with (
            _one_line_errors("write", self.path(step)),
            contextlib.ExitStack() as on_error,
        ):
            self._directory.make()
            unique = secrets.choice("abcdef") + secrets.token_hex(4)[1:]
            name = f"step-{step:08}-{unique}.safetensors"
            on_error.callback(self._discard, step, name)
            contents = JsonFile(
                **self._write_arrays(name, checkpoint.arrays),
                step=step,
                seconds=self._clock(),
                metadata=checkpoint.header.to_json(),
            )
            # A metric may be NaN, which Python writes and reads as the word NaN.
            values = {**vars(contents), _DIGEST: _digest_of(vars(contents))}
            text = json.dumps(values, indent=2) + "\n"
            with self._directory.write(_json_name(step)) as temporary:
                temporary.write_text(text)
            on_error.pop_all()
        replaced = self._arrays.get(step)
        self._arrays[step] = name
        # The checkpoint is complete: a failed deletion is no failure of the write, and
        # the next write tries again, unless the store has denied it.
        try:
            errors = self._delete([replaced] if replaced else [])
            return _first_line(errors + self._delete_old(step))
        except (OSError, StoreError, UnreadableError) as error:
            return f"no old one deleted: {error}"

    def read(self, step: int) -> Checkpoint:
        """Return a checkpoint whose arrays have the right digest.

        Raises:
            CheckpointError: it is truncated, corrupt, or of another version.
            UnreadableError: it cannot be read now, and may be intact.
        """

        def read() -> Checkpoint:
            with self._verified(step) as (contents, path):
                arrays = _load(path)
            for name in contents.bfloat16:
                arrays[name] = arrays[name].view("bfloat16")
            return Checkpoint(header=contents.header, arrays=arrays)

        return self._read(step, read)

    def header(self, step: int) -> Header:
        """Return the header of a checkpoint, whose arrays may be damaged."""
        return self._read(step, lambda: self._contents(step).header)

    def verify(self, step: int) -> Header:
        """Return the header of a checkpoint; check and raise as `read` does."""

        def read() -> Header:
            with self._verified(step) as (contents, _):
                return contents.header

        return self._read(step, read)

    def _read(self, step: int, read: Callable[[], _Read]) -> _Read:
        path = self.path(step)
        with _one_line_errors("read", path):
            try:
                return self._retried(path, read)
            except FileNotFoundError:
                # A store or a cache may report what was just written as missing.
                self._sleep(_RETRY_SECONDS[0])
                return self._retried(path, read)

    @contextlib.contextmanager
    def _verified(self, step: int) -> Iterator[tuple[JsonFile, pathlib.Path]]:
        """Yield the contents of a JSON file, and its file of arrays, not damaged."""
        contents = self._contents(step)
        if contents.step != step:
            raise ValueError(f"it is of step {contents.step}")
        name = contents.arrays
        try:
            with self._directory.open(name) as path:
                size = path.stat().st_size
                if size != contents.bytes:
                    expected = f"expected {contents.bytes}"
                    raise ValueError(f"{name} has {size} bytes, {expected}")
                if _digest(path) != contents.sha256:
                    raise ValueError(f"{name} has another digest")
                yield contents, path
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, f"{name} is missing") from None

    def _contents(self, step: int, *, any_format: bool = False) -> JsonFile:
        values = json.loads(self._directory.read(_json_name(step)))
        if not any_format:
            check_format(values)
        if values.pop(_DIGEST, None) != _digest_of(values):
            raise ValueError("it has another digest than the one it contains")
        contents = parse(JsonFile, values)
        self._arrays[step] = contents.arrays
        return contents

    def _retried(self, path: object, read: Callable[[], _Read]) -> _Read:
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

    def prepare(self) -> None:
        """Create the directory, and warn of arrays without a JSON file.

        For the only writer.

        Raises:
            CheckpointError: the directory cannot be created, or there are arrays of
                several checkpoints, and no JSON file.
        """
        with _one_line_errors("write", self._directory):
            self._directory.prepare()
            arrays, steps = self._all_arrays(), self.steps()
        # A killed writer leaves the arrays of one checkpoint: more of them are a user's
        # work whose JSON files are lost.
        if (count := len({step for step, _ in arrays})) > 1 and not steps:
            raise CheckpointError(
                f"{self._directory} has the arrays of {count} checkpoints, and no "
                "JSON file, without which they cannot be used: restore these "
                "files, or choose another model_dir."
            )
        for name in sorted(name for step, name in arrays if step not in steps):
            warnings.warn(
                f"{self._directory.path(name)} is not used, since it has no JSON file: "
                "its writer was killed, or a copy is not complete. It is kept until "
                f"there are {self._keep_max} newer checkpoints.",
                stacklevel=2,
            )

    def supersede_after(self, step: int) -> None:
        """Note that the training continues from `step`, before later checkpoints.

        These are damaged, for example, or are a copy in progress. They count as no
        checkpoints, and a write of a later step than theirs deletes them.
        """
        self._superseded = {later for later in self.steps() if later > step}

    def _write_arrays(self, name: str, arrays: Arrays) -> dict[str, Any]:
        """Write a new file; return the fields of `JsonFile` that describe it."""
        arrays, of_bfloat16 = _storable(arrays)
        with self._directory.write(name) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode
            safetensors.numpy.save_file(arrays, temporary)
            # The library makes a file that only this user can read. A mounted bucket
            # may have no modes.
            with contextlib.suppress(OSError):
                temporary.chmod(mode)
            digest, size = _digest(temporary), temporary.stat().st_size
        return {
            "arrays": name,
            "sha256": digest,
            "bytes": size,
            "bfloat16": of_bfloat16,
        }

    def _discard(self, step: int, name: str) -> None:
        """Delete the arrays of a failed write, unless the JSON file may name them."""
        # A store that does not respond keeps them.
        with contextlib.suppress(StoreError):
            try:
                if self._contents(step).arrays == name:
                    return
            except _ABSENT:
                if self._directory.reads_late:
                    return
            except _DAMAGE:
                pass
            self._directory.delete(name)

    def _delete_old(self, newest: int) -> list[Exception]:
        """Delete what the newest checkpoints supersede; return errors."""
        listed = self.steps()
        self._superseded = self._superseded.intersection(listed) - {newest}
        steps = [step for step in listed if step not in self._superseded]
        last = steps[: self._keep_max]
        kept = {*last, *self._hourly(steps), *(s for s in listed if s > newest)}
        errors: list[Exception] = []
        for step in listed:
            if step not in kept and _json_name(step) not in self._denied:
                errors += self._delete_checkpoint(step)
        # A checkpoint of an hour is kept, and a store may list its JSON file late.
        is_listed_late = self._keep_seconds and self._directory.reads_late
        if len(last) == self._keep_max and not is_listed_late:
            listed = self.steps()
            errors += self._delete(
                name
                for step, name in self._all_arrays()
                if step < last[-1] and step not in listed and name not in self._denied
            )
        return errors

    def _delete_checkpoint(self, step: int) -> list[Exception]:
        """Delete the JSON file, then the arrays that it names."""
        if step not in self._arrays:
            with contextlib.suppress(*_DAMAGE, StoreError):
                self._contents(step, any_format=True)
        if errors := self._delete([_json_name(step)]):
            # Without its arrays, it would be a damaged checkpoint.
            return errors
        name = self._arrays.pop(step, "")
        # A JSON file that is not of this package could name any file.
        is_own = re.fullmatch(rf"step-{step:08}-\w+\.safetensors", name)
        return self._delete([name]) if is_own else []

    def _all_arrays(self) -> set[tuple[int, str]]:
        """Return the step and the name of each file of arrays."""
        matches = map(_ARRAYS.fullmatch, self._directory.names())
        return {(int(match[1]), match[0]) for match in matches if match}

    def _delete(self, names: Iterable[str]) -> list[Exception]:
        """Delete files; return the errors of failed deletions."""
        errors: list[Exception] = []
        for name in names:
            try:
                self._directory.delete(name)
            except (OSError, StoreError) as error:
                errors.append(error)
                if isinstance(error, DeletionDeniedError):
                    self._denied.add(name)
        return errors

    def _hourly(self, steps: list[int]) -> Iterator[int]:
        if not self._keep_seconds:
            return
        last = None
        for step in reversed(steps):
            try:
                seconds = self._contents(step, any_format=True).seconds
            except _DAMAGE as error:
                # A damaged checkpoint is of no use; one that cannot be read now, or
                # that is listed and missing, may be intact.
                if isinstance(error, OSError):
                    yield step
                continue
            if last is None or seconds - last >= self._keep_seconds:
                last = seconds
                yield step


def _json_name(step: int) -> str:
    return f"step-{step:08}.json"


def _first_line(errors: list[Exception]) -> str:
    if not errors:
        return ""
    more = f" and {len(errors) - 1} more" if errors[1:] else ""
    if isinstance(error := errors[0], OSError):
        return f"cannot delete {error.filename}{more}: {error.strerror}"
    return f"{error}{more}"


def _load(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file of safetensors as views of the file.

    The library copies all of them, and the full model may not fit in memory. Pages that
    were read stay in the cache of the system, which frees them.
    """
    content = np.memmap(path, np.uint8, "r")
    start = 8 + int(content[:8].view("<u8")[0])
    entries = json.loads(content[8:start].tobytes())
    arrays = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            values = content[start + first : start + last].view(_dtype(entry["dtype"]))
            arrays[name] = np.asarray(values).reshape(entry["shape"])
    return arrays


def _dtype(name: str) -> np.dtype:
    """Return the dtype of a name of safetensors, such as F32, U16 or BOOL."""
    if name == "BOOL":
        return np.dtype(bool)
    return np.dtype(f"<{name[0].lower()}{int(name[1:]) // 8}")


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


def _one_line_errors(action: str, path: object) -> AbstractContextManager[None]:
    return one_line_errors(
        f"{action} {path}",
        errors=_DAMAGE,
        remedy="expected a directory with free space that this user can write, on a "
        "file system with renames (for a mounted bucket, its address: s3://bucket/run)"
        if action == "write"
        else "expected a complete checkpoint",
        raises=CheckpointError,
    )
