"""When checkpoints are written, and in which thread."""

import concurrent.futures
import os
import time

from hvdtrain.job import JobError
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.training import state
from hvdtrain.training.checkpoints import Checkpoint, CheckpointFiles
from hvdtrain.training.requests import STOP
from hvdtrain.training.stepping import StepCallback

_PATIENCE_SECONDS = 10.0
_POLL_SECONDS = 5.0
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

    Training goes on meanwhile. A disk that is slower than the interval of the
    checkpoints, or full, costs checkpoints and no time: each is reported.

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
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._writing = None

    @property
    def is_busy(self):
        """Whether an earlier checkpoint is still being written."""
        return self._writing is not None and not self._writing.done()

    def submit(self, checkpoint, *, copy_seconds):
        """Write a `Checkpoint`, unless an earlier one is still being written.

        Args:
            checkpoint: the `Checkpoint`.
            copy_seconds: for which training has stopped, to be reported.
        """
        if self.is_busy:
            self._report(
                checkpoint.step,
                "not written: the one before is still being written; the disk is "
                "slower than the interval of checkpoints",
            )
        else:
            self._writing = self._thread.submit(self._write, checkpoint, copy_seconds)

    def is_done(self, timeout_seconds=None):
        """Wait for the checkpoint that is being written; return whether it has ended.

        Args:
            timeout_seconds: limit of the wait, None for none.
        """
        writing = [self._writing] if self._writing else []
        return not concurrent.futures.wait(writing, timeout=timeout_seconds).not_done

    def check(self):
        """Raise the `CheckpointError` of the last checkpoint, if it was not written."""
        if self._writing is not None and (error := self._writing.result()):
            raise error

    def __enter__(self):
        """Return the writer."""
        return self

    def __exit__(self, kind, error, trace):
        """Wait for the checkpoint that is being written."""
        # After an error not without limit: the disk may be the reason.
        self.is_done(_PATIENCE_SECONDS if error else None)
        self._thread.shutdown(wait=False)

    def _write(self, checkpoint, copy_seconds):
        start = self._clock()
        try:
            self._files.write(checkpoint)
        except JobError as error:
            self._report(checkpoint.step, f"not written: {error}")
            self._on_failure()
            return error
        self._report(
            checkpoint.step,
            f"copied in {copy_seconds:.3f} s, written in {self._clock() - start:.1f} s",
        )
        return None

    def _report(self, step, text):
        for observer in self._observers:
            observer.on_checkpoint(step, text)


def wait_together(world, writer):
    """Wait on all ranks until the chief has written its checkpoint. A collective.

    Args:
        world: the `World`.
        writer: the `BackgroundWriter` on the chief; None elsewhere.

    Raises:
        SharedJobError: it could not be written.
    """
    # Short waits: a long one would be taken for a rank that hangs.
    while not all(gather(world, writer is None or writer.is_done(_POLL_SECONDS))):
        pass
    with fail_together(world):
        if writer:
            writer.check()


class CheckpointCallback(StepCallback):
    """Takes a copy of the state when a checkpoint is due, and gives it to the writer.

    After all other callbacks: what they do at the end of an epoch is in the checkpoint.

    Args:
        writer: the `BackgroundWriter` on the chief and None elsewhere, or the
            `Commits` of each rank.
        plan: the `Plan`.
        is_due: an `Every`.
        requests: the `Requests`.
        world: the `World`.
        describe: `describe(is_finished)` returns the metadata at this moment.
        saves_on_stop: whether it saves where the job stops.
    """

    def __init__(
        self, writer, plan, is_due, requests, world, *, describe, saves_on_stop=True
    ):
        super().__init__(plan)
        self._writer = writer
        self._is_due = is_due
        self._requests = requests
        self._world = world
        self._describe = describe
        self._saves_on_stop = saves_on_stop
        self._is_pending = False

    @property
    def _is_stopping(self):
        return STOP in self._requests.agreed

    def note_step(self):
        """Asks whether it is due."""
        self._is_pending |= self._is_due(self.step) or self._is_stopping

    def act(self, *, is_epoch_end):
        """Saves if it is due, and at the end of the training."""
        if self._is_stopping and not self._saves_on_stop:
            return
        is_finished = is_epoch_end and self.is_last
        if self._is_pending or is_finished:
            self._is_pending = False
            self._save(is_finished)

    def _save(self, is_finished):
        start = time.perf_counter()
        state.check_finite(self.model, self.step)
        arrays = state.capture(
            self.model, self._world, is_kept=self._writer is not None
        )
        if arrays is None:
            return
        copy_seconds = time.perf_counter() - start
        if is_finished or self._is_stopping:
            # This one must not be left out.
            self._writer.is_done()
        checkpoint = Checkpoint(
            step=self.step, arrays=arrays, metadata=self._describe(is_finished)
        )
        self._writer.submit(checkpoint, copy_seconds=copy_seconds)
