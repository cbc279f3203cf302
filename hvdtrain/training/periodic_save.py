"""Copies of the state of a training when they are due, for a checkpoint or a commit.

`due` decides when.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Protocol

import keras
import numpy as np

from hvdtrain.checkpoint.header import Checkpoint, Header
from hvdtrain.checkpoint.snapshot import capture, check_finite
from hvdtrain.checkpoint.step_variables import StepVariables
from hvdtrain.checkpoint.writing import Writer, wait_for_writer
from hvdtrain.job import World
from hvdtrain.native import recorder
from hvdtrain.training.due import Interval


class Receiver(Protocol):
    """What a checkpoint is given to: a `Writer` or `Commits`."""

    def submit(
        self,
        checkpoint: Checkpoint,
        *,
        copy_seconds: float,
        is_reported: bool = True,
        is_last: bool = False,
    ) -> None: ...


class PeriodicSave:
    """Copies the state when a checkpoint is due, and gives the copy to the writer.

    Args:
        writer: the `Writer` on the chief and None elsewhere, or the `Commits` of each
            rank.
        make_header: `make_header(step, is_finished, logs)` returns the header at this
            moment; `logs` belong to an epoch that is not in the history yet, or are
            empty.
        read_callbacks: returns the `callbacks` of `snapshot.capture`.
        is_commit: whether all ranks keep the state. There is no commit at the end of
            a run: the ranks would leave it for hosts that have come.
        directory: see `snapshot.capture`.
    """

    def __init__(
        self,
        writer: Receiver | None,
        is_due: Interval,
        *,
        model: keras.Model,
        world: World,
        make_header: Callable[[int, bool, dict], Header],
        step_variables: StepVariables,
        read_callbacks: Callable[[], dict[str, np.ndarray] | None],
        is_commit: bool = False,
        directory: pathlib.Path | None = None,
    ) -> None:
        self._writer = writer
        self._is_due = is_due
        self._model = model
        self._world = world
        self._make_header = make_header
        self._step_variables = step_variables
        self._read_callbacks = read_callbacks
        self._is_commit = is_commit
        self._directory = directory
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
            self._save(step, is_finished, is_last=is_end)

    def save_before_evaluation(self, step: int, logs: dict) -> None:
        """Save a training that ends here, before its last evaluation. A collective.

        The evaluation calls code of users, which may fail. A checkpoint with its
        results replaces this one. The logs belong to the last epoch.
        """
        self._wait_for_writer()
        self._save(step, True, logs)

    def _wait_for_writer(self) -> None:
        # Commits are in memory at once. All ranks have one, or none has.
        if isinstance(self._writer, Writer | None):
            with recorder.phase("saving"):
                wait_for_writer(self._world, self._writer)

    @recorder.phase("saving")
    def _save(
        self,
        step: int,
        is_finished: bool,
        logs: dict | None = None,
        *,
        is_last: bool = False,
    ) -> None:
        start = time.perf_counter()
        check_finite(self._model, self._world, step)
        unlisted = self._step_variables.unlisted(self._model)
        captured = capture(
            self._model,
            self._world,
            everywhere=self._is_commit,
            unlisted=unlisted,
            callbacks=self._read_callbacks(),
            directory=self._directory,
        )
        copy_seconds = time.perf_counter() - start
        if captured is None or self._writer is None:
            return
        header = self._make_header(step, is_finished, logs or {})
        header = dataclasses.replace(header, unlisted=captured.unlisted)
        checkpoint = Checkpoint(header=header, arrays=captured.arrays)
        # A checkpoint before the last evaluation is soon replaced, and not reported.
        self._writer.submit(
            checkpoint,
            copy_seconds=copy_seconds,
            is_reported=logs is None,
            is_last=is_last,
        )
