"""What ranks ask of the whole job, and the step at which all ranks do it."""

import time

SAVE, COMMIT, EVALUATE, STOP = NAMES = ("save", "commit", "evaluate", "stop")


class Requests:
    """Requests of this rank, and those that all ranks have agreed on.

    A report of progress, which is a collective about every second, adds up the
    requests of all ranks. What one rank has asked for is then agreed on by all of
    them, at the same step: agreement costs no collective of its own.

    An elastic job keeps them when it changes: no request to stop is lost.

    Attributes:
        agreed: names that all ranks have agreed on at this step.
        stop_reason: why this rank has asked for a stop; empty if it has not.
        start_seconds: when the run began, by `time.monotonic`.
    """

    def __init__(self):
        self.start_seconds = time.monotonic()
        self._asked = set()
        self.agreed = frozenset()
        self.stop_reason = ""

    def ask(self, name):
        """Ask for one of `NAMES`; from any thread."""
        self._asked.add(name)

    def stop(self, reason):
        """Ask for the end of this run; from any thread. The first reason counts."""
        self.stop_reason = self.stop_reason or reason
        self.ask(STOP)

    def votes(self):
        """Return one number for each of `NAMES`: whether this rank asks for it."""
        return [int(name in self._asked) for name in NAMES]

    def agree(self, counts):
        """Take the sums of all ranks' votes; requests end, apart from one to stop."""
        self.agreed = frozenset(
            name for name, count in zip(NAMES, counts, strict=True) if count
        )
        # If the job changes before it has stopped, it is to stop afterwards.
        self._asked -= self.agreed - {STOP}


class Every:
    """Whether something that is done periodically is due, equally on all ranks.

    Args:
        name: one of `NAMES`.
        requests: the `Requests`.
        steps: number of steps between, 0 for none.
        seconds: seconds between, 0 for none; the chief's clock decides.
        world: the `World`.
        start_step: the first step of this run.
        clock: returns seconds.
    """

    def __init__(
        self,
        name,
        requests,
        *,
        steps,
        seconds,
        world,
        start_step,
        clock=time.monotonic,
    ):
        self._name = name
        self._requests = requests
        self._steps = steps
        self._seconds = seconds if world.is_chief else 0
        self._clock = clock
        self._last_step = start_step
        self._last_seconds = clock()

    def __call__(self, step):
        """Return whether it is due after `step` steps."""
        now = self._clock()
        is_due = self._name in self._requests.agreed or bool(
            self._steps and step // self._steps > self._last_step // self._steps
        )
        self._last_step = step
        if is_due:
            self._last_seconds = now
        elif self._seconds and now - self._last_seconds >= self._seconds:
            self._requests.ask(self._name)
        return is_due
