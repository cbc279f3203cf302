"""The end of a job that is to be continued later: signals, and a limit of time."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from hvdtrain.job import World, signals
from hvdtrain.training.checkpoint.writing import BackgroundWriter, complete_together
from hvdtrain.training.evaluation import EvaluationCallback
from hvdtrain.training.requests import STOP, Requests, StepCallback, raise_preempted
from hvdtrain.training.specs import Plan

# A request may arrive twice: from a launcher, and from the sender itself where it
# signals all processes of a group or of a job of Slurm.
_SAME_REQUEST_SECONDS = 1.0


@contextlib.contextmanager
def stopping_on(
    numbers: Sequence[signal.Signals],
    requests: Requests,
    *,
    rank: int,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Turn these signals into requests to stop, within the block.

    The first signal asks all ranks to save at the same step and to stop there. One
    that arrives more than a second later ends this process at once, as before. The
    message of the stop contains `rank`.
    """
    received: list[float] = []

    def postpone(number: int) -> bool:
        received.append(clock())
        requests.stop(f"{signal.Signals(number).name} on rank {rank}")
        return received[-1] - received[0] <= _SAME_REQUEST_SECONDS

    signals.subscribe(numbers, postpone)
    try:
        yield
    finally:
        signals.unsubscribe(postpone)


class PreemptionCallback(StepCallback):
    """Ends the training on all ranks once a stop is agreed on.

    It comes after the callbacks that save: the checkpoint of this step must be complete
    before the run ends.

    Args:
        writer: of the checkpoint of this step; None on other ranks than the chief, and
            without checkpoints.
        evaluation: if its last evaluation was interrupted, the job has to continue,
            even at the end of the training.
    """

    def __init__(
        self,
        plan: Plan,
        requests: Requests,
        world: World,
        writer: BackgroundWriter | None,
        *,
        evaluation: EvaluationCallback,
    ) -> None:
        super().__init__(plan)
        self._requests = requests
        self._world = world
        self._writer = writer
        self._evaluation = evaluation

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        # The evaluation that was due at the start was interrupted again. It stays due
        # in the checkpoint that this run has read, if no step changes the weights.
        if self._evaluation.was_interrupted:
            self.step = self._evaluation.step
            self._stop()

    def act(self, *, is_epoch_end: bool) -> None:
        is_end = self.is_last and not self._evaluation.was_interrupted
        if STOP in self._requests.agreed and not is_end:
            self._stop()

    def _stop(self) -> NoReturn:
        # A launcher kills all ranks once one has ended with exit code 75, and so would
        # kill a chief that is still writing.
        complete_together(self._world, self._writer)
        raise_preempted(
            self._requests, self._world, step=self.step, max_steps=self.plan.max_steps
        )
