"""The end of a job that is to be continued later: signals, and a limit of time."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from hvdtrain.job import signals
from hvdtrain.training.requests import Requests

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
