"""The cores of a rank: how many it may use, and which ones it is bound to."""

import contextlib
import os
import pathlib

from hvdtrain.environment import quotas
from hvdtrain.job import launchers


def usable(local_size: int) -> int:
    """Return how many cores this rank may use, at least 1.

    It may use the cores of its affinity mask, shared with the other ranks of the node
    unless the launcher has bound each rank to cores of its own, and no more than its
    share of the CPU quotas of its control groups.
    """
    allowed = len(os.sched_getaffinity(0))
    cores = min(allowed, _launcher_cores(allowed) / local_size)
    shares = [quota / local_size for quota in quotas()]
    return max(1, int(min([cores, *shares])))


def describe_quota() -> str:
    """Return the CPU quota of this process, such as "1.5 of 16 cores"; "" for none."""
    count = os.cpu_count() or 1
    quota = min(quotas(), default=count)
    return f"{quota:.3g} of {count} cores" if quota < count else ""


def bind(
    local_rank: int,
    local_size: int,
    *,
    topology: str | os.PathLike = "/sys/devices/system/cpu",
) -> None:
    """Bind all threads of this process to its share of the node's cores.

    Ranks that migrate between cores lose some 10 % of their speed. A rank gets
    neighbouring cores. All ranks together get all cores of the job, as many as their
    thread pools use: binding adds no contention with other jobs of the node. Nothing is
    bound where the launcher has bound the ranks, or where there are more ranks than
    cores.
    """
    allowed = os.sched_getaffinity(0)
    is_bound = _launcher_cores(len(allowed)) > len(allowed)
    if local_size < 2 or is_bound or len(allowed) < local_size:
        return
    cpus = sorted(allowed, key=lambda cpu: (*_socket_and_core(cpu, topology), cpu))
    start, end = (
        len(cpus) * rank // local_size for rank in (local_rank, local_rank + 1)
    )
    # New threads inherit the affinity; running ones, such as Horovod's, do not.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cpus[start:end])


def _socket_and_core(cpu: int, topology: str | os.PathLike) -> tuple[int, int]:
    directory = pathlib.Path(topology, f"cpu{cpu}", "topology")
    try:
        socket = int((directory / "physical_package_id").read_text())
        return socket, int((directory / "core_id").read_text())
    except OSError:
        return 0, 0


def _launcher_cores(default: int) -> int:
    """Return the number of cores of the process that started the ranks."""
    if launcher := launchers.find_process():
        with contextlib.suppress(OSError):
            return max(default, len(os.sched_getaffinity(launcher[0])))
    return default
