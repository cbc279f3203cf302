"""The end of a job that is to be continued later: signals, and a limit of time."""

import contextlib
import signal
import time

from hvdtrain.job import signals
from hvdtrain.job.agreement import gather
from hvdtrain.job.world import PreemptedError
from hvdtrain.training.requests import STOP
from hvdtrain.training.saving import complete_together
from hvdtrain.training.stepping import StepCallback

# A request may arrive twice: from a launcher, and from the sender itself where it
# signals all processes of a group or of a job of Slurm.
_SAME_REQUEST_SECONDS = 1.0


@contextlib.contextmanager
def stopping_on(numbers, requests, *, rank, clock=time.monotonic):
    """Turn these signals into requests to stop, within the block.

    The first signal asks all ranks to save at the same step and to stop there. One
    that arrives more than a second later ends this process at once, as before.

    Args:
        numbers: signals, as `signal.SIGTERM`.
        requests: the `Requests`.
        rank: number of this rank, for the message.
        clock: returns seconds.
    """
    received = []

    def postpone(number):
        received.append(clock())
        requests.stop(f"{signal.Signals(number).name} on rank {rank}")
        return received[-1] - received[0] <= _SAME_REQUEST_SECONDS

    signals.subscribe(numbers, postpone)
    try:
        yield
    finally:
        signals.unsubscribe(postpone)


class PreemptionCallback(StepCallback):
    """Ends the training on all ranks once a stop is agreed on. After all others.

    Args:
        plan: the `Plan`.
        requests: the `Requests`.
        world: the `World`.
        writer: the `BackgroundWriter` of the checkpoint of that step; None on other
            ranks, and without checkpoints.
        max_minutes: see `RunConfig`.
        is_incomplete: whether also a training that is at its end has to be continued.
        clock: returns seconds.
    """

    def __init__(
        self,
        plan,
        requests,
        world,
        writer,
        *,
        max_minutes,
        is_incomplete=lambda: False,
        clock=time.monotonic,
    ):
        super().__init__(plan)
        self._requests = requests
        self._world = world
        self._writer = writer
        self._clock = clock
        self._max_minutes = max_minutes
        self._is_incomplete = is_incomplete

    def note_step(self):
        """Asks for a stop when the time is over."""
        minutes = (self._clock() - self._requests.start_seconds) / 60
        if self._max_minutes and minutes > self._max_minutes:
            self._requests.stop(f"max_minutes={self._max_minutes:g}")

    def act(self, *, is_epoch_end):
        """Ends the training if it is agreed on; not where it ends anyway."""
        is_end = self.is_last and not self._is_incomplete()
        if STOP not in self._requests.agreed or is_end:
            return
        # A launcher kills all ranks once one has ended with 75: also a chief that is
        # still writing.
        complete_together(self._world, self._writer)
        reason = next(filter(None, gather(self._world, self._requests.stop_reason)))
        raise PreemptedError(
            f"Stopped at step {self.step} of {self.plan.max_steps} by {reason}; start "
            "the job again to continue."
        )
