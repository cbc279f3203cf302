"""The directory of a run, or its address: checkpoints, `model.keras`, its lock."""

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import re
import socket
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, TextIO

import keras

from hvdtrain import output
from hvdtrain.checkpoint.directories import directory_of
from hvdtrain.checkpoint.header import Position
from hvdtrain.checkpoint.restoring import newest_position
from hvdtrain.checkpoint.storage import CheckpointFiles
from hvdtrain.checkpoint.tiers import TieredFiles
from hvdtrain.checkpoint.writing import wait_for_writer
from hvdtrain.job import JobError
from hvdtrain.job.agreement import fail_together
from hvdtrain.job.files import (
    atomic_write,
    is_address,
    make_directory,
    one_line_errors,
)
from hvdtrain.job.world import PreemptedError, World
from hvdtrain.keras.sharded_models import save_by_rank_0
from hvdtrain.open_directory import OpenDirectory, open_regular
from hvdtrain.parallel.replicas import Replicas
from hvdtrain.stores.lease import Lease
from hvdtrain.stores.mirror import local_directory, mirror_of
from hvdtrain.stores.object_store import (
    DeletionDeniedError,
    ObjectStore,
    StoreError,
)
from hvdtrain.training.elastic import Commits
from hvdtrain.training.specs import RunConfig

_MODEL, _SUMMARY, _LOCK, _ERRORS = "model.keras", "summary.json", ".lock", "errors"
_CHECKPOINTS = "checkpoints"
_ERROR_FILES = re.compile(r"rank-\d+\.json|stacks-step-\d+\.txt")
# The largest model with the largest optimizer state, and some logs.
_NEEDED_BYTES = 32 << 20


def prepare(model_dir: str | PathLike, *, needed_bytes: int = _NEEDED_BYTES) -> None:
    """Create `model_dir`, and check before the run that `write` will succeed.

    Raises:
        JobError: the directory cannot be created or written, lacks `needed_bytes` of
            free space, or has a directory with the name of one of the files.
    """
    directory = local_directory(model_dir)
    with _writing(directory, f"{needed_bytes / 2**20:.0f} MB of free space"):
        for path in (directory / _MODEL, directory / _SUMMARY):
            if path.is_dir():
                raise JobError(
                    f"{path} is a directory, expected a file or nothing: remove it or "
                    "choose another --model_dir."
                )
        _make(directory)
        if (directory / _LOCK).exists():
            # Raises if another job uses the directory, before anything is written.
            with locked(directory):
                pass
        # Permissions and free space as reported leave out quotas and read-only mounts;
        # an allocation fails on them.
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, needed_bytes)


def checkpoint_files(
    config: RunConfig, lease: Lease | None = None
) -> CheckpointFiles | TieredFiles | None:
    """Return the `CheckpointFiles` of a `RunConfig`, None without `model_dir`.

    With a `local_dir`, return `TieredFiles` of both places. Writing to a store needs
    the `lease`.
    """
    if not config.model_dir:
        return None
    path = os.path.join(config.model_dir, _CHECKPOINTS)
    check = lease.check if lease else None
    files = CheckpointFiles(
        directory_of(path, check_writer=check),
        keep_max=config.keep_max,
        keep_every_hours=config.keep_every_hours,
    )
    if not config.local_dir:
        return files
    disk = os.path.join(config.local_dir, _CHECKPOINTS)
    return TieredFiles(CheckpointFiles(disk, keep_max=config.keep_max), files)


def position(
    config: RunConfig,
    world: World,
    commits: Commits | None = None,
    *,
    replicas: Replicas | None = None,
) -> Position:
    """Return the `Position` from which a job continues. A collective.

    By default, each rank is a replica. For `commits`, see `train_and_evaluate`.
    """
    original_size = (replicas or Replicas.of(world)).size
    if commits:
        # The writer of the last run may still be writing a newer checkpoint.
        wait_for_writer(world, commits.writer)
        original_size = commits.original_size
    stores = [store for store in (commits, checkpoint_files(config)) if store]
    return newest_position(stores, world, original_size=original_size)


@contextlib.contextmanager
def claimed(config: RunConfig) -> Iterator[Lease | None]:
    """Keep other jobs from the `model_dir` within the block. For the chief.

    Of a store, the `Lease` is yielded; changed files other than checkpoints are
    uploaded meanwhile, and at the end.

    Raises:
        JobError: another job uses it, or it cannot be written.
    """
    assert config.model_dir
    if not is_address(config.model_dir):
        with locked(config.model_dir):
            yield None
        return
    if config.model_dir.startswith("memory:"):
        warnings.warn(
            f"{config.model_dir} is in the memory of rank 0, and ends with its "
            "process: choose another model_dir to keep the run.",
            stacklevel=2,
        )
    mirror = mirror_of(config.model_dir, config.local_dir)
    with (
        Lease(mirror.store, warn=warnings.warn) as lease,
        mirror.uploading(lease.check),
    ):
        # The job that held the lease may have written since this process has started.
        mirror.fetch()
        yield lease


@contextlib.contextmanager
def locked(model_dir: str | PathLike) -> Iterator[None]:
    """Lock the directory within the block. For the chief.

    The kernel releases the lock when the process ends, even by SIGKILL.

    Raises:
        JobError: another process holds it, or the directory cannot be written.
    """
    path = pathlib.Path(model_dir) / _LOCK
    with _writing(path):
        _make(path.parent)
        file = _open_lock(path)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise JobError(
                f"{model_dir} is in use by another job ({file.read().strip()}): wait "
                "for its end, or choose another --model_dir."
            ) from None
        except OSError as error:
            warnings.warn(
                f"Cannot lock {path}: {error.strerror}. A second job in this directory "
                "would not be detected: start one at a time, or choose another "
                "--model_dir (for a mounted bucket, its address: s3://bucket/run).",
                stacklevel=2,
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def _open_lock(path: pathlib.Path) -> TextIO:
    # A link is not followed: other users may write in the directory of a shared run.
    return open(path, "a+", opener=open_regular)


def _make(directory: pathlib.Path) -> None:
    if os.path.lexists(directory) and not directory.is_dir():
        raise JobError(f"{directory} is not a directory: choose another --model_dir.")
    make_directory(directory)


def write(
    world: World,
    model_dir: str | PathLike,
    *,
    model: keras.Model,
    summary: Mapping[str, Any],
) -> None:
    """Write the model, then the summary, on the chief. A collective.

    Raises:
        JobError: on all ranks, if the chief cannot write them.
    """

    def save(full: keras.Model) -> None:
        if not world.is_chief:
            return
        directory = local_directory(model_dir)
        upload = mirror_of(model_dir).sync if is_address(model_dir) else lambda: None
        # A summary implies the model of the same run: the old one is removed first,
        # the new one is written last.
        with _writing(directory / _SUMMARY):
            (directory / _SUMMARY).unlink(missing_ok=True)
        upload()
        save_model(full, directory / _MODEL)
        save_json(summary, directory / _SUMMARY)
        upload()

    with fail_together(world):
        save_by_rank_0(model, save)


def save_model(model: keras.Model, path: pathlib.Path) -> None:
    """Write `model` to `path`, which ends in `.keras`."""
    with _writing(path), atomic_write(path) as temporary:
        model.save(temporary)


def save_json(values: Mapping[str, Any], path: pathlib.Path) -> None:
    """Write `values` to `path` as JSON."""
    text = json.dumps(values, indent=2, allow_nan=False) + "\n"
    with _writing(path), atomic_write(path) as temporary:
        temporary.write_text(text)


def _writing(
    path: pathlib.Path, free: str = "free space"
) -> AbstractContextManager[None]:
    return one_line_errors(
        f"write {path}",
        remedy=f"expected a directory with {free} that this user can write: choose "
        "another --model_dir",
    )


@contextlib.contextmanager
def recorded(model_dir: str | PathLike, world: World) -> Iterator[None]:
    """Write an error file of this rank, if the block raises an exception.

    The file `errors/rank-1.json` has rank, host, time, the error, and its traceback.
    The chief first deletes the error files and stacks of an earlier run. A rank that
    does not see the directory, or cannot write, leaves no file; the block's exception
    is raised.
    """
    if world.is_chief:
        directory = local_directory(model_dir) / _ERRORS
        if is_address(model_dir):
            _delete_errors(mirror_of(model_dir).store)
        with (
            _writing(directory),
            contextlib.suppress(FileNotFoundError),
            OpenDirectory(directory, is_private=False) as files,
        ):
            files.remove_all(_ERROR_FILES)
    try:
        yield
    except PreemptedError:
        raise
    except Exception as error:
        with contextlib.suppress(OSError, StoreError):
            _write_error(model_dir, world, error)
        raise


def _delete_errors(store: ObjectStore) -> None:
    try:
        store.delete(
            name
            for name in store.sizes(_ERRORS)
            if _ERROR_FILES.fullmatch(os.path.basename(name))
        )
    except DeletionDeniedError as error:
        warnings.warn(f"{error} It is of an earlier run.", stacklevel=3)


def _write_error(model_dir: str | PathLike, world: World, error: Exception) -> None:
    last_lines, traceback = output.describe(error)
    values = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "error": last_lines,
        "traceback": traceback,
    }
    name, text = f"rank-{world.rank}.json", json.dumps(values, indent=2) + "\n"
    if is_address(model_dir):
        # Once: the job is to end soon.
        store = ObjectStore(os.fspath(model_dir), pauses=())
        store.write(f"{_ERRORS}/{name}", text.encode())
        return
    directory = pathlib.Path(model_dir) / _ERRORS
    with OpenDirectory(directory, make=True, is_private=False) as files:
        files.write(name, text)
