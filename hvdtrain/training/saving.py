"""When checkpoints are written, and in which thread."""

import concurrent.futures
import os
import time

import keras

from hvdtrain.job import JobError
from hvdtrain.training import state
from hvdtrain.training.checkpoints import Checkpoint, CheckpointFiles
from hvdtrain.training.requests import STOP

_PATIENCE_SECONDS = 10.0
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

    def submit(self, checkpoint):
        """Write a `Checkpoint`, unless an earlier one is still being written."""
        if self.is_busy:
            self._report(
                checkpoint.step,
                "not written: the one before is still being written; the disk is "
                "slower than the interval of checkpoints",
            )
        else:
            self._writing = self._thread.submit(self._write, checkpoint)

    def wait(self):
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writing is not None and (error := self._writing.result()):
            raise error

    def __enter__(self):
        """Return the writer."""
        return self

    def __exit__(self, kind, error, trace):
        """Wait for the checkpoint that is being written."""
        # After an error not without limit: the disk may be the reason.
        concurrent.futures.wait(
            [self._writing] if self._writing else [],
            timeout=_PATIENCE_SECONDS if error else None,
        )
        self._thread.shutdown(wait=False)

    def _write(self, checkpoint):
        start = self._clock()
        try:
            self._files.write(checkpoint)
        except JobError as error:
            self._report(checkpoint.step, f"not written: {error}")
            self._on_failure()
            return error
        self._report(checkpoint.step, f"written in {self._clock() - start:.1f} s")
        return None

    def _report(self, step, text):
        for observer in self._observers:
            observer.on_checkpoint(step, text)


class CheckpointCallback(keras.callbacks.Callback):
    """Takes a copy of the state when a checkpoint is due, and gives it to the writer.

    After all other callbacks: what they do at the end of an epoch is in the checkpoint.

    Args:
        writer: the `BackgroundWriter` on the chief and None elsewhere, or the
            `Commits` of each rank.
        plan: the `Plan`.
        is_due: an `Every`.
        requests: the `Requests`.
        world: the `World`.
        describe: returns the metadata of a checkpoint at this moment.
    """

    def __init__(self, writer, plan, is_due, requests, world, *, describe):
        super().__init__()
        self._writer = writer
        self._plan = plan
        self._is_due = is_due
        self._requests = requests
        self._world = world
        self._describe = describe
        self._is_pending = False

    def on_epoch_begin(self, epoch, logs=None):
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        """Saves if it is due, unless the epoch ends here as well."""
        step = self._plan.step(self._epoch, batch + 1)
        self._is_pending |= self._is_due(step) or STOP in self._requests.agreed
        if self._is_pending and not self._plan.is_epoch_end(step):
            self._save(step)

    def on_epoch_end(self, epoch, logs=None):
        """Saves if it is due, and after the last epoch."""
        step = self._plan.step(epoch + 1)
        if self._is_pending or step == self._plan.max_steps:
            self._save(step)

    def _save(self, step):
        self._is_pending = False
        state.check_finite(self.model, step)
        is_last = step == self._plan.max_steps or STOP in self._requests.agreed
        arrays = state.capture(
            self.model, self._world, is_kept=self._writer is not None
        )
        if arrays is None:
            return
        if is_last and self._writer.is_busy:
            self._writer.wait()
        metadata = self._describe()
        self._writer.submit(Checkpoint(step=step, arrays=arrays, metadata=metadata))
