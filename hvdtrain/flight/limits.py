"""How long a rank may wait for others before its guard makes a roll call or ends it."""

import dataclasses
import math
import time

from hvdtrain.environment import DEADLOCK, INIT_TIMEOUT, STALL_SHUTDOWN

# Less than the stall limit, so that this reason is printed before the other ranks fail.
_SHARE_OF_STALL_LIMIT = 0.5
# For a launcher to end the job of a rank that has failed.
_LAUNCHER_SECONDS = 5.0
_MAX_PERIOD_SECONDS = 1.0
# More than a guard takes between two looks at its rank: the rest, it was suspended.
_MAX_GAP_SECONDS = 10.0
# From one examination that has found no reason to end the job until the next.
_SHARE_OF_FIRST_EXAMINATION = 0.5


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a job in seconds; 0 for none.

    Attributes:
        check_seconds: in a collective until a roll call.
        shutdown_seconds: in a collective until it fails.
        init_seconds: in `hvd.init` until the job ends.
        deadlock_seconds: in a collective that another rank will never call.
        grace_seconds: for a collective to fail by itself after its limit, which runs
            the script's `except` and `finally`.
    """

    check_seconds: float = 0.0
    shutdown_seconds: float = 0.0
    init_seconds: float = 0.0
    deadlock_seconds: float = 0.0
    grace_seconds: float = 10.0

    @property
    def failed_seconds(self) -> float:
        """How long a rank waits for one that has failed until a roll call."""
        return self.check_seconds + min(self.check_seconds, _LAUNCHER_SECONDS)

    @property
    def stop_seconds(self) -> float:
        """How long a rank may be stopped, as by SIGSTOP."""
        return _SHARE_OF_STALL_LIMIT * self.shutdown_seconds

    @property
    def period_seconds(self) -> float:
        """The time between two looks at the rank."""
        limits = (self.check_seconds, self.stop_seconds, self.deadlock_seconds)
        return min([_MAX_PERIOD_SECONDS, *(limit / 10 for limit in limits if limit)])

    def examination(self, operation: str, last: float) -> float:
        """Return when it is examined next whether an operation can end.

        Args:
            last: when that was examined last; 0 for never.
        """
        limit_seconds, _ = self.end(operation)
        first = min(self.deadlock_seconds or math.inf, limit_seconds)
        following = max(first, last + _SHARE_OF_FIRST_EXAMINATION * first)
        return min(following, limit_seconds) if last < limit_seconds else following

    def end(self, operation: str) -> tuple[float, str]:
        """Return when a rank that waits in an operation may be ended, and why."""
        if operation == "join":
            # For as long as the others have batches.
            return math.inf, ""
        if operation == "init":
            limit, slack, name = self.init_seconds, self.grace_seconds, INIT_TIMEOUT
        elif operation == "shutdown" and self.deadlock_seconds:
            # No rank has to call it: the others answer in Horovod's thread.
            limit, slack, name = self.deadlock_seconds, 0.0, DEADLOCK
        else:
            # Horovod compares with its limit once in each `check_seconds`.
            limit, name = self.shutdown_seconds, STALL_SHUTDOWN
            slack = self.check_seconds + self.grace_seconds
        return (limit + slack if limit else math.inf), f"{name}={limit:g}"


class Wait:
    """How long a rank has been in its present collective, by the guard's own clock.

    Time in which the guard did not run is left out: a scheduler that suspends all
    processes of a job suspends the guard, too.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._entered: float | None = None
        self._last = time.monotonic()

    def renew(self, entered: float | None) -> None:
        """Count the time since the last call, given when the collective was entered."""
        now = time.monotonic()
        elapsed = min(now - self._last, _MAX_GAP_SECONDS)
        self._last = now
        if entered is None or entered != self._entered:
            self.seconds = 0.0
        else:
            self.seconds += elapsed
        self._entered = entered
