"""The thread that writes checkpoints while training goes on."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from hvdtrain.checkpoint.header import Checkpoint
from hvdtrain.checkpoint.storage import CheckpointFiles
from hvdtrain.job import World, agreement

_LIMIT_AFTER_ERROR_SECONDS = 10.0


class BackgroundWriter:
    """Writes checkpoints in a thread, one at a time.

    Training goes on meanwhile, also if the disk is full, or slower than the interval
    of checkpoints: checkpoints that are not written are reported. Those that are due
    during a write are left out: the first one is reported, then their number.

    Args:
        report: `report(step, text)` is called when a checkpoint was written, or was
            not.
        on_failure: called in the thread when a checkpoint could not be written.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        report: Callable[[int, str], object],
        *,
        on_failure: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._report = report
        self._on_failure = on_failure
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._left_out = 0
        # Of the write in progress; the seconds are of the one before.
        self._step, self._start, self._seconds = 0, 0.0, 0.0
        self._is_wait_reported = False

    def submit(
        self,
        checkpoint: Checkpoint,
        *,
        copy_seconds: float,
        is_reported: bool = True,
        is_last: bool = False,
    ) -> None:
        """Write a checkpoint, unless an earlier one is still being written.

        Args:
            checkpoint: not changed after this.
            copy_seconds: for which training has stopped, to be reported.
            is_reported: whether its success is reported; a failure always is.
            is_last: whether the run ends here.
        """
        if not self.is_done(0):
            self._left_out += 1
            if self._left_out == 1:
                self._report(
                    checkpoint.step,
                    "not written: the one before is still being written; the disk or "
                    "the store is slower than the interval of checkpoints",
                )
            return
        text = f"copied in {copy_seconds:.3f} s, written in {{seconds:.1f}} s"
        if self._left_out > 1:
            text += f", after {self._left_out} were left out"
        self._left_out = 0
        self._step, self._start = checkpoint.step, self._clock()
        self._is_wait_reported = False
        # A daemon: a disk that hangs does not block the exit of Python.
        self._thread = threading.Thread(
            target=self._write,
            args=(checkpoint, text if is_reported else ""),
            daemon=True,
        )
        self._thread.start()

    def report_wait(self) -> None:
        """Report, once for a write, that the job waits for its end."""
        if self.is_done(0) or self._is_wait_reported:
            return
        self._is_wait_reported = True
        seconds = self._clock() - self._start
        before = f"; the one before took {self._seconds:.0f} s" if self._seconds else ""
        self._report(
            self._step,
            f"is being written for {seconds:.0f} s, and the job waits for it{before}",
        )

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
        # After an error, wait with a limit: a disk that hangs may have caused it.
        self.is_done(_LIMIT_AFTER_ERROR_SECONDS if error else None)

    def _write(self, checkpoint: Checkpoint, text: str) -> None:
        """Write a checkpoint, and report `text`, unless it is empty."""
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
        self._seconds = self._clock() - self._start
        if text:
            text = text.format(seconds=self._seconds)
            self._report(checkpoint.step, f"{text}; {left}" if left else text)


class TieredWriter:
    """Writes each checkpoint to a local directory, and some of them to a store.

    Each of the two has a thread, so that an upload delays no write to the disk.

    Args:
        every_steps: steps between two uploads, 0 for none.
        every_seconds: seconds between two uploads, 0 for none. A checkpoint that is due
            while an upload is in progress waits for the next write to the disk.
        start_step: the step from which the run has continued.
    """

    def __init__(
        self,
        disk: BackgroundWriter,
        store: BackgroundWriter,
        *,
        every_steps: int,
        every_seconds: float,
        start_step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk = disk
        self._store = store
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._last_step = start_step
        self._clock = clock
        self._last_seconds = clock()

    def submit(
        self,
        checkpoint: Checkpoint,
        *,
        copy_seconds: float,
        is_reported: bool = True,
        is_last: bool = False,
    ) -> None:
        """Write a checkpoint to the disk, and to the store if an upload is due."""
        self._disk.submit(
            checkpoint, copy_seconds=copy_seconds, is_reported=is_reported
        )
        if (is_last or self._is_due(checkpoint.step)) and self._store.is_done(0):
            self._last_step, self._last_seconds = checkpoint.step, self._clock()
            self._store.submit(checkpoint, copy_seconds=copy_seconds)

    def _is_due(self, step: int) -> bool:
        steps, seconds = self._every_steps, self._every_seconds
        is_due_by_steps = steps > 0 and step // steps > self._last_step // steps
        elapsed = self._clock() - self._last_seconds
        return is_due_by_steps or 0 < seconds <= elapsed

    def is_done(self, timeout_seconds: float | None = None) -> bool:
        """Wait, by default without a limit; return whether no write is in progress."""
        return self._disk.is_done(timeout_seconds) and self._store.is_done(
            timeout_seconds
        )

    def report_wait(self) -> None:
        """See `BackgroundWriter.report_wait`."""
        self._disk.report_wait()
        self._store.report_wait()

    def check(self) -> None:
        """Raise the error of the last checkpoint, if it was not written."""
        self._disk.check()
        self._store.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._disk.__exit__(*error)
        self._store.__exit__(*error)


Writer = BackgroundWriter | TieredWriter


def wait_for_writer(world: World, writer: Writer | None) -> None:
    """Wait on all ranks until the chief has written its checkpoint. A collective.

    The writer is None on all ranks but the chief.
    """

    def report(ranks: list[int]) -> None:
        # After some seconds: a signal may be followed by a kill.
        if writer:
            writer.report_wait()

    agreement.wait_together(
        world,
        lambda seconds: writer is None or writer.is_done(seconds),
        on_wait=report,
    )


def complete_together(world: World, writer: Writer | None) -> None:
    """`wait_for_writer`, and raise `SharedJobError` if it could not be written."""
    wait_for_writer(world, writer)
    with agreement.fail_together(world):
        if writer:
            writer.check()
