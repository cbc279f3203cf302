"""The guard of this process, by what launcher and environment say of the job."""

import os

from hvdtrain import environment, processes
from hvdtrain.flight import member
from hvdtrain.flight.limits import Limits
from hvdtrain.job import launchers
from hvdtrain.job.world import JobError


def join(*, rank: int, size: int) -> None:
    """Start the guard of a rank under a launcher; later, send it the rank and the size.

    See `flight.member.join`.

    Raises:
        JobError: a variable with a number has another value.
    """
    try:
        environment.check_numbers()
    except ValueError as error:
        raise JobError(str(error)) from None
    member.join(rank, size, job=_job(), limits=_limits())


def _limits() -> Limits:
    stall = environment.stall_limits()
    # Hosts may join an elastic job late, and it goes on without a rank that fails.
    is_static = not environment.is_elastic()
    init = environment.init_limits().timeout_seconds if is_static else 0.0
    has_deadlocks = is_static and any(stall)
    deadlock = environment.deadlock_seconds() if has_deadlocks else 0.0
    return Limits(*stall, init_seconds=init, deadlock_seconds=deadlock)


def _job() -> str:
    """Return a text that is equal in the processes that one launcher has started here.

    PIDs are used again: the start of the launcher, in hundredths of a second since the
    boot, is part of the text.
    """
    # First: an engine's job may run inside of another launcher's, and horovodrun starts
    # the ranks of another host one by one.
    if launchers.is_gloo(os.environ):
        return "-".join(os.environ[name] for name in launchers.GLOO_RENDEZVOUS)
    parent = os.getppid()
    pid, stat = launchers.find_process() or (parent, processes.read_stat(parent))
    return f"{pid}-{stat.start_seconds * 100:.0f}"
