"""When checkpoints are written, and in which thread."""

import os
import threading
import time

from hvdtrain.job import agreement
from hvdtrain.training.checkpoint import state
from hvdtrain.training.checkpoint.storage import Checkpoint, CheckpointFiles
from hvdtrain.training.observers import notify
from hvdtrain.training.requests import STOP, StepCallback

_LIMIT_AFTER_ERROR_SECONDS = 10.0
_CHECKPOINTS = "checkpoints"


def checkpoint_files(config):
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

    Training goes on meanwhile, also where the disk is full, or slower than the
    interval of the checkpoints: those that are not written are reported.

    Args:
        files: the `CheckpointFiles`.
        observers: see `train_and_evaluate`; `on_checkpoint(step, text)` is called.
        on_failure: called in the thread when a checkpoint could not be written.
        clock: returns seconds.
    """

    def __init__(self, files, observers, *, on_failure, clock=time.monotonic):
        self._files = files
        self._observers = observers
        self._on_failure = on_failure
        self._clock = clock
        self._thread = None
        self._error = None

    def submit(
        self, checkpoint: Checkpoint, *, copy_seconds: float, is_reported: bool = True
    ) -> None:
        """Write a `Checkpoint`, unless an earlier one is still being written.

        Args:
            checkpoint: the `Checkpoint`.
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
            # A daemon: the exit of Python does not wait for a disk that hangs.
            self._thread = threading.Thread(
                target=self._write,
                args=(checkpoint, copy_seconds, is_reported),
                daemon=True,
            )
            self._thread.start()

    def is_done(self, timeout_seconds=None):
        """Wait for the checkpoint that is being written; return whether it has ended.

        Args:
            timeout_seconds: limit of the wait, None for none.
        """
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def check(self):
        """Raise the error of the last checkpoint, if it was not written."""
        if self._error:
            raise self._error

    def __enter__(self):
        """Return the writer."""
        return self

    def __exit__(self, kind, error, trace):
        """Wait for the checkpoint that is being written."""
        # After an error not without limit: the disk may be the reason.
        self.is_done(_LIMIT_AFTER_ERROR_SECONDS if error else None)

    def _write(
        self, checkpoint: Checkpoint, copy_seconds: float, is_reported: bool
    ) -> None:
        start = self._clock()
        self._error = None
        try:
            left = self._files.write(checkpoint)
        # Of any kind, MemoryError for example: a thread has no other way to report it.
        except Exception as error:
            self._error = error
            # First: an observer of the user may raise an exception.
            self._on_failure()
            self._report(checkpoint.step, f"not written: {error}")
            return
        if is_reported:
            seconds = self._clock() - start
            text = f"copied in {copy_seconds:.3f} s, written in {seconds:.1f} s"
            self._report(checkpoint.step, f"{text}; {left}" if left else text)

    def _report(self, step, text):
        notify(self._observers, "on_checkpoint", step, text)


def wait_together(world, writer):
    """Wait on all ranks until the chief has written its checkpoint. A collective.

    Args:
        world: the `World`.
        writer: the `BackgroundWriter` on the chief; None elsewhere.
    """
    agreement.wait_together(
        world, lambda seconds: writer is None or writer.is_done(seconds)
    )


def complete_together(world, writer):
    """`wait_together`, and raise `SharedJobError` if it could not be written."""
    wait_together(world, writer)
    with agreement.fail_together(world):
        if writer:
            writer.check()


class CheckpointCallback(StepCallback):
    """Takes a copy of the state when a checkpoint is due, and gives it to the writer.

    After all other callbacks: what they do at the end of an epoch is in the checkpoint.

    Args:
        writer: the `BackgroundWriter` on the chief and None elsewhere, or the
            `Commits` of each rank.
        plan: the `Plan`.
        is_due: an `Interval`.
        requests: the `Requests`.
        world: the `World`.
        describe: `describe(step, is_finished, logs)` returns the metadata at this
            moment; `logs` are those of an epoch that is not in the history yet, or
            empty.
        is_commit: whether all ranks keep the state; there is none at the end, where
            the ranks are not to leave the training for hosts that have come.
    """

    def __init__(
        self, writer, plan, is_due, requests, world, *, describe, is_commit=False
    ):
        super().__init__(plan)
        self._writer = writer
        self._is_due = is_due
        self._requests = requests
        self._world = world
        self._describe = describe
        self._is_commit = is_commit
        # A worker that has just joined has no state of the job yet: were the others
        # lost, it would start from the beginning.
        self._is_pending = is_commit

    def note_step(self):
        """Asks whether it is due."""
        self._is_pending |= self._is_due(self.step)

    def act(self, *, is_epoch_end):
        """Saves if it is due, and at the end of the training."""
        is_finished = is_epoch_end and self.is_last
        is_end = is_finished or STOP in self._requests.agreed
        if self._is_commit and is_end:
            return
        if is_end:
            # This one must not be left out.
            wait_together(self._world, self._writer)
        if self._is_pending or is_end:
            self._is_pending = False
            self._save(is_finished)

    def save_before_evaluation(self, logs: dict) -> None:
        """Save a training that ends here, before its last evaluation. A collective.

        That evaluation calls code of users. The checkpoint is replaced after it.

        Args:
            logs: of the last epoch.
        """
        wait_together(self._world, self._writer)
        self._save(True, logs)

    def _save(self, is_finished: bool, logs: dict | None = None) -> None:
        start = time.perf_counter()
        state.check_finite(self.model, self._world, self.step)
        arrays = state.capture(self.model, self._world, everywhere=self._is_commit)
        copy_seconds = time.perf_counter() - start
        if arrays is None:
            return
        metadata = self._describe(self.step, is_finished, logs or {})
        checkpoint = Checkpoint(step=self.step, arrays=arrays, metadata=metadata)
        # One before the last evaluation is soon replaced.
        self._writer.submit(
            checkpoint, copy_seconds=copy_seconds, is_reported=logs is None
        )
