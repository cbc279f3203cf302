"""The end of a job that is to be continued later: signals, and a limit of time."""

import contextlib
import signal
import time
from typing import NoReturn

from hvdtrain.job import signals
from hvdtrain.training.checkpoint.writing import complete_together
from hvdtrain.training.requests import STOP, StepCallback, raise_preempted

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
        evaluation: the `EvaluationCallback`. If its last evaluation was interrupted,
            the job has to continue, even at the end of the training.
    """

    def __init__(self, plan, requests, world, writer, *, evaluation):
        super().__init__(plan)
        self._requests = requests
        self._world = world
        self._writer = writer
        self._evaluation = evaluation

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Ends the training before its first step, in an interrupted evaluation.

        The evaluation stays due in the checkpoint that this run has read. A step would
        change the weights to evaluate.
        """
        super().on_epoch_begin(epoch, logs)
        if self._evaluation.was_interrupted:
            self.step = self._evaluation.step
            self._stop()

    def act(self, *, is_epoch_end):
        """Ends the training if it is agreed on; not where it ends anyway."""
        is_end = self.is_last and not self._evaluation.was_interrupted
        if STOP in self._requests.agreed and not is_end:
            self._stop()

    def _stop(self) -> NoReturn:
        # A launcher kills all ranks once one has ended with 75: also a chief that is
        # still writing.
        complete_together(self._world, self._writer)
        raise_preempted(
            self._requests, self._world, step=self.step, max_steps=self.plan.max_steps
        )
