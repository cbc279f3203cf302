"""The guard of this process, by what launcher and environment say of the job."""

import os

from hvdtrain.environment import stall_limits
from hvdtrain.flight import member
from hvdtrain.job import launchers


def join(*, rank: int, size: int) -> None:
    """Start the guard of a rank under a launcher; later, send it the rank and the size.

    See `flight.member.join`.
    """
    limits = stall_limits()
    member.join(
        rank,
        size,
        job=_job(),
        check_seconds=limits.check_seconds,
        shutdown_seconds=limits.shutdown_seconds,
    )


def _job() -> str:
    """Return a text that is equal in the processes that one launcher has started here.

    PIDs are used again: the start of the launcher, in hundredths of a second since the
    boot, is part of the text.
    """
    # First: an engine's job may run inside of another launcher's, and horovodrun starts
    # the ranks of another host one by one.
    if launchers.is_gloo(os.environ):
        return "-".join(os.environ[name] for name in launchers.GLOO_RENDEZVOUS)
    for name, pid, start in launchers.ancestors():
        if name in launchers.PROCESSES:
            return f"{pid}-{start * 100:.0f}"
    parent = os.getppid()
    return f"{parent}-{launchers.process(parent)[2] * 100:.0f}"
