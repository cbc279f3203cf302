"""Copies of the state, and the thread that writes them as checkpoints.

`training.requests` decides when a checkpoint is due.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import keras
import numpy as np

from hvdtrain.job import World, agreement
from hvdtrain.native import recorder
from hvdtrain.training.checkpoint.header import Checkpoint, Header
from hvdtrain.training.checkpoint.snapshot import capture, check_finite
from hvdtrain.training.checkpoint.step_variables import StepVariables
from hvdtrain.training.checkpoint.storage import CheckpointFiles
from hvdtrain.training.observers import notify
from hvdtrain.training.requests import Interval
from hvdtrain.training.specs import RunConfig

_LIMIT_AFTER_ERROR_SECONDS = 10.0
_CHECKPOINTS = "checkpoints"


class Writer(Protocol):
    """What a checkpoint is given to: a `BackgroundWriter` or `Commits`."""

    def submit(
        self, checkpoint: Checkpoint, *, copy_seconds: float, is_reported: bool = True
    ) -> None: ...


def checkpoint_files(config: RunConfig) -> CheckpointFiles | None:
    """Return the `CheckpointFiles` of a `RunConfig`, None without `model_dir`."""
    if not config.model_dir:
        return None
    return CheckpointFiles(
        os.path.join(config.model_dir, _CHECKPOINTS),
        keep_max=config.keep_max,
        keep_every_hours=config.keep_every_hours,
    )


class BackgroundWriter:
    """Writes checkpoints in a thread, one at a time.

    Training goes on meanwhile, also if the disk is full, or slower than the interval
    of checkpoints: checkpoints that are not written are reported.

    Args:
        observers: see `train_and_evaluate`; `on_checkpoint(step, text)` is called.
        on_failure: called in the thread when a checkpoint could not be written.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        observers: Sequence[object],
        *,
        on_failure: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._observers = observers
        self._on_failure = on_failure
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(
        self, checkpoint: Checkpoint, *, copy_seconds: float, is_reported: bool = True
    ) -> None:
        """Write a checkpoint, unless an earlier one is still being written.

        Args:
            checkpoint: not changed after this.
            copy_seconds: for which training has stopped, to be reported.
            is_reported: whether its success is reported; a failure always is.
        """
        if not self.is_done(0):
            self._report(
                checkpoint.step,
                "not written: the one before is still being written; the disk is "
                "slower than the interval of checkpoints",
            )
        else:
            # A daemon: a disk that hangs does not block the exit of Python.
            self._thread = threading.Thread(
                target=self._write,
                args=(checkpoint, copy_seconds, is_reported),
                daemon=True,
            )
            self._thread.start()

    def is_done(self, timeout_seconds: float | None = None) -> bool:
        """Wait, by default without a limit; return whether no write is in progress."""
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of the last checkpoint, if it was not written."""
        if self._error:
            raise self._error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error with a limit: the disk may be its cause, and hang.
        self.is_done(_LIMIT_AFTER_ERROR_SECONDS if error else None)

    def _write(
        self, checkpoint: Checkpoint, copy_seconds: float, is_reported: bool
    ) -> None:
        start = self._clock()
        self._error = None
        try:
            left = self._files.write(checkpoint)
        # Any error, MemoryError for example, would otherwise end the thread unnoticed.
        except Exception as error:
            self._error = error
            # Before the report: an observer of the user may raise an exception.
            self._on_failure()
            self._report(checkpoint.step, f"not written: {error}")
            return
        if is_reported:
            seconds = self._clock() - start
            text = f"copied in {copy_seconds:.3f} s, written in {seconds:.1f} s"
            self._report(checkpoint.step, f"{text}; {left}" if left else text)

    def _report(self, step: int, text: str) -> None:
        notify(self._observers, "on_checkpoint", step, text)


def wait_for_writer(world: World, writer: BackgroundWriter | None) -> None:
    """Wait on all ranks until the chief has written its checkpoint. A collective.

    The writer is None on all ranks but the chief.
    """
    agreement.wait_together(
        world, lambda seconds: writer is None or writer.is_done(seconds)
    )


def complete_together(world: World, writer: BackgroundWriter | None) -> None:
    """`wait_for_writer`, and raise `SharedJobError` if it could not be written."""
    wait_for_writer(world, writer)
    with agreement.fail_together(world):
        if writer:
            writer.check()


class PeriodicSave:
    """Copies the state when a checkpoint is due, and gives the copy to the writer.

    Args:
        writer: the `BackgroundWriter` on the chief and None elsewhere, or the
            `Commits` of each rank.
        make_header: `make_header(step, is_finished, logs)` returns the header at this
            moment; `logs` belong to an epoch that is not in the history yet, or are
            empty.
        read_callbacks: returns the `callbacks` of `snapshot.capture`.
        is_commit: whether all ranks keep the state. There is no commit at the end of
            a run: the ranks would leave it for hosts that have come.
    """

    def __init__(
        self,
        writer: Writer | None,
        is_due: Interval,
        *,
        model: keras.Model,
        world: World,
        make_header: Callable[[int, bool, dict], Header],
        step_variables: StepVariables,
        read_callbacks: Callable[[], dict[str, np.ndarray] | None],
        is_commit: bool = False,
    ) -> None:
        self._writer = writer
        self._is_due = is_due
        self._model = model
        self._world = world
        self._make_header = make_header
        self._step_variables = step_variables
        self._read_callbacks = read_callbacks
        self._is_commit = is_commit
        # Commit after the first step: a worker that has just joined has no state of the
        # job, and would start from the beginning if the others were lost.
        self._is_pending = is_commit

    def note(self, step: int) -> None:
        """Note whether a checkpoint is due after `step` steps; called for each stop."""
        self._is_pending |= self._is_due(step)

    def save_if_due(self, step: int, *, is_finished: bool, is_stopped: bool) -> None:
        """Save the state if a checkpoint is due, or if the run ends. A collective.

        Args:
            is_finished: whether the training ends here.
            is_stopped: whether the run ends here, to be continued.
        """
        is_end = is_finished or is_stopped
        if self._is_commit and is_end:
            return
        if is_end:
            # `submit` leaves out a checkpoint while the one before is being written.
            self._wait_for_writer()
        if self._is_pending or is_end:
            self._is_pending = False
            self._save(step, is_finished)

    def save_before_evaluation(self, step: int, logs: dict) -> None:
        """Save a training that ends here, before its last evaluation. A collective.

        The evaluation calls code of users, which may fail. A checkpoint with its
        results replaces this one. The logs belong to the last epoch.
        """
        self._wait_for_writer()
        self._save(step, True, logs)

    def _wait_for_writer(self) -> None:
        # Commits are in memory at once. All ranks have one, or none has.
        if isinstance(self._writer, BackgroundWriter | None):
            with recorder.phase("saving"):
                wait_for_writer(self._world, self._writer)

    @recorder.phase("saving")
    def _save(self, step: int, is_finished: bool, logs: dict | None = None) -> None:
        start = time.perf_counter()
        check_finite(self._model, self._world, step)
        unlisted = self._step_variables.unlisted(self._model)
        captured = capture(
            self._model,
            self._world,
            everywhere=self._is_commit,
            unlisted=unlisted,
            callbacks=self._read_callbacks(),
        )
        copy_seconds = time.perf_counter() - start
        if captured is None or self._writer is None:
            return
        header = self._make_header(step, is_finished, logs or {})
        header = dataclasses.replace(header, unlisted=captured.unlisted)
        checkpoint = Checkpoint(header=header, arrays=captured.arrays)
        # A checkpoint before the last evaluation is soon replaced, and not reported.
        self._writer.submit(
            checkpoint, copy_seconds=copy_seconds, is_reported=logs is None
        )
