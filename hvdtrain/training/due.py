"""When something is due, and how all ranks agree on it at the same step.

    Interval        whether something is due, such as a checkpoint: by steps, which are
                    equal on all ranks, or by seconds, for which it makes a request
    Requests        the requests of this rank, and what all ranks have agreed on
    Votes           adds up the requests of all ranks, at steps that are equal on all
    stopping_on     turns signals into requests to stop

A clock or a signal of one rank must never decide alone: the other ranks would block
in the collectives of a checkpoint or an evaluation that one rank enters.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import numpy as np

from hvdtrain.interruption import SIGNALS, launcher_signal
from hvdtrain.job import World, signals
from hvdtrain.job.agreement import gather
from hvdtrain.job.world import PreemptedError
from hvdtrain.keras import Sum, allreduce
from hvdtrain.training.specs import Plan

NAMES = ("save", "commit", "evaluate", "report", "stop")
SAVE, COMMIT, EVALUATE, REPORT, STOP = NAMES

# A vote is a collective: 0.2 ms in shared memory, 0.8 ms and more through Horovod.
_MAX_VOTE_SHARE = 0.002
_MAX_PAUSE_SECONDS = 1.0
# Calls of the train function should take at least so long: Python's part of a call,
# about 0.5 ms, is then 1 % of it.
_CALL_SECONDS = 0.05
# A pause between two votes is at most so many times the one before.
MAX_GROWTH = 4
# A request may arrive twice: from a launcher, and from the sender itself where it
# signals all processes of a group or of a job of Slurm.
_SAME_REQUEST_SECONDS = 1.0
# By which batch systems ask for a checkpoint, before they end the job.
_REQUESTS = frozenset({signal.SIGUSR1, signal.SIGUSR2})


class Requests:
    """Requests of this rank, and the requests that all ranks have agreed on.

    `Votes` add up the requests of all ranks. What one rank has
    asked for is then agreed on by all of them, at the same step.

    An elastic job keeps them when it changes: no request to stop is lost.

    Attributes:
        agreed: names that all ranks have agreed on at this step.
        stop_reason: empty if this rank has not asked for a stop.
        max_minutes: see `RunConfig`. They begin with this object. `votes` asks for a
            stop once they are over.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_seconds = clock()
        self.max_minutes = 0.0
        self._asked: set[str] = set()
        self.agreed: frozenset[str] = frozenset()
        self.stop_reason = ""

    def ask(self, name: str) -> None:
        """Ask for one of `NAMES`; from any thread."""
        self._asked.add(name)

    def stop(self, reason: str) -> None:
        """Ask for the end of this run; from any thread. The first reason counts."""
        self.stop_reason = self.stop_reason or reason
        self.ask(STOP)

    def votes(self) -> list[int]:
        """Return 0 or 1 for each of `NAMES`: whether this rank asks for it."""
        minutes = (self._clock() - self._start_seconds) / 60
        if self.max_minutes and minutes > self.max_minutes:
            self.stop(f"max_minutes={self.max_minutes:g}")
        return [int(name in self._asked) for name in NAMES]

    def agree(self, counts: Sequence[int]) -> None:
        """Take the sums of all ranks' votes; requests end, apart from one to stop."""
        self.agreed = frozenset(
            name for name, count in zip(NAMES, counts, strict=True) if count
        )
        # A job that changes before it has stopped has to stop after the change.
        self._asked -= self.agreed - {STOP}


class Interval:
    """Whether a periodic action is due, equally on all ranks.

    Args:
        name: one of `NAMES`.
        steps: number of steps between, 0 for none. All ranks count the same steps, so
            these need no vote.
        seconds: seconds between, 0 for none. The chief's clock decides, and asks for
            the action in the next vote.
    """

    def __init__(
        self,
        name: str,
        requests: Requests,
        *,
        steps: int,
        seconds: float,
        world: World,
        start_step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._requests = requests
        self._steps = steps
        self._seconds = seconds if world.is_chief else 0
        self._clock = clock
        self._last_step = start_step
        self._last_seconds = clock()

    def next_step(self, step: int) -> float:
        """Return the next step after `step` that is due by its number, or infinity."""
        return (step // self._steps + 1) * self._steps if self._steps else math.inf

    def __call__(self, step: int) -> bool:
        """Return whether the action is due after `step` steps."""
        now = self._clock()
        is_due = self._name in self._requests.agreed or step >= self.next_step(
            self._last_step
        )
        self._last_step = step
        if is_due:
            self._last_seconds = now
        elif self._seconds and now - self._last_seconds >= self._seconds:
            self._requests.ask(self._name)
        return is_due


class Votes:
    """The steps at which all ranks exchange their requests.

    An exchange is a collective, so all ranks vote after the same steps. Clocks of
    ranks differ, and the chief's decides: each vote has the number of steps until the
    next one. The ranks vote after the first step, which contains the tracing, and after
    the second, which gives the speed. The first vote after steps slow down comes late,
    since its pause was computed from the old speed.
    """

    def __init__(
        self,
        requests: Requests,
        plan: Plan,
        world: World,
        *,
        start_step: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._requests = requests
        self._plan = plan
        self._world = world
        self._clock = clock
        self._cost_seconds = math.inf if world.size > 1 else 0.0
        self._last: tuple[int, float] | None = None
        self.next_step = start_step + 1

    def __call__(self, step: int) -> None:
        """Agree on requests, if a vote is due after `step` steps."""
        self._requests.agreed = frozenset()
        if step >= min(self.next_step, self._plan.max_steps):
            pause = self._next_step(step) - step
            before, votes = self._clock(), self._requests.votes()
            pause, counts = agree_on_pause(self._world, pause, votes, name="Votes")
            # The minimum is the cost of the exchange: other votes contain the time in
            # which this rank waited for a slower one.
            self._cost_seconds = min(self._cost_seconds, self._clock() - before)
            self._requests.agree(counts)
            self.next_step = step + pause

    def _next_step(self, step: int) -> int:
        """Return the next step to vote at, by the speed since the last vote."""
        now, last = self._clock(), self._last
        self._last = (step, now)
        if last is None or step == last[0]:
            return step + 1
        # Over all the time, with evaluations and checkpoints.
        speed = (step - last[0]) / max(now - last[1], 1e-9)
        # The first steps may be faster than the input, which was read ahead.
        limit = MAX_GROWTH * (step - last[0])
        pause_seconds = min(self._cost_seconds / _MAX_VOTE_SHARE, _MAX_PAUSE_SECONDS)
        pause = min(int(speed * pause_seconds), limit)
        call = max(1, min(int(speed * _CALL_SECONDS), limit))
        end = self._plan.execution(step)[1]
        next_step = step + max(pause, min(call, end - step))
        # A vote within an execution cuts it in two: only where its steps are slow.
        is_full = end <= next_step < self._plan.max_steps
        return self._plan.execution(next_step)[0] if is_full else next_step


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

    After the block SIGUSR1 and SIGUSR2, if they are among `numbers` and would end the
    process, are held for the next block: they only ask for a checkpoint.
    """
    received: list[float] = []

    def postpone(number: int) -> bool:
        received.append(clock())
        requests.stop(f"{_name(number)} on rank {rank}")
        return received[-1] - received[0] <= _SAME_REQUEST_SECONDS

    signals.subscribe(numbers, postpone)
    signals.unsubscribe(_hold)
    if _held and numbers:
        requests.stop(f"{_held[0]} on rank {rank}")
        _held.clear()
    try:
        yield
    finally:
        held = filter(signals.ends_process, _REQUESTS.intersection(numbers))
        signals.subscribe(held, _hold)
        signals.unsubscribe(postpone)


# Names of the signals that arrived when no training ran.
_held: list[str] = []


def _hold(number: int) -> bool:
    # A launcher that is to end sends SIGUSR1 in place of the signal that it received.
    if launcher_signal() in (each.name for each in set(SIGNALS) - _REQUESTS):
        return False
    _held.append(_name(number))
    return True


def _name(number: int) -> str:
    return launcher_signal() or signal.Signals(number).name


def agree_on_pause(
    world: World, pause: int, counts: Sequence[int], *, name: str
) -> tuple[int, list[int]]:
    """Return the chief's pause, and the sums of `counts` over the ranks. A collective.

    A pause is a number of steps, or of batches, until the next exchange.
    """
    if world.size == 1:
        return pause, list(counts)
    # A sum in which only the chief's pause is not zero broadcasts it.
    sent = [pause if world.is_chief else 0, *counts]
    sums = allreduce(np.array(sent, "float64"), name=name, op=Sum).numpy()
    pause, *totals = sums.astype(int).tolist()
    return pause, totals


def raise_preempted(
    requests: Requests, world: World, *, step: int, max_steps: int
) -> NoReturn:
    """Raise `PreemptedError` on all ranks, with the first reason. A collective."""
    reason = next(filter(None, gather(world, requests.stop_reason)))
    raise PreemptedError(
        f"Stopped at step {step} of {max_steps} by {reason}; start the job again to "
        "continue."
    )
