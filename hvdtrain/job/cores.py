"""The cores of a rank: how many it may use, and which ones it is bound to."""

import contextlib
import os
import pathlib

from hvdtrain.collectives.environment import quotas
from hvdtrain.job import launchers


def usable(local_size):
    """Return how many cores this rank may use, at least 1.

    The cores of its affinity mask, shared with the other ranks of the node unless
    the launcher has bound each rank to cores of its own, and no more than its part
    of the CPU quotas of its control groups.

    Args:
        local_size: number of ranks on this node.
    """
    mine = len(os.sched_getaffinity(0))
    cores = min(mine, _launcher_cores(mine) / local_size)
    shares = [quota / local_size for quota in quotas()]
    return max(1, int(min([cores, *shares])))


def bind(local_rank, local_size, *, topology="/sys/devices/system/cpu"):
    """Bind all threads of this process to its part of the node's cores.

    Ranks that migrate between cores lose some 10 % of their speed. A part is made of
    neighbouring cores. The parts of all ranks cover all cores of the job, as their
    thread pools do together: binding adds no contention with other jobs of the node.
    Nothing is bound where the launcher has bound the ranks, or where there are more
    ranks than cores.

    Args:
        local_rank: number of this rank on its node, from 0.
        local_size: number of ranks on this node.
        topology: directory in which Linux describes its cores.
    """
    mine = os.sched_getaffinity(0)
    is_bound = _launcher_cores(len(mine)) > len(mine)
    if local_size < 2 or is_bound or len(mine) < local_size:
        return
    mine = sorted(mine, key=lambda cpu: (*_place(cpu, topology), cpu))
    start, end = (
        len(mine) * rank // local_size for rank in (local_rank, local_rank + 1)
    )
    # New threads inherit the affinity; those that run, such as Horovod's, do not.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), mine[start:end])


def _place(cpu, topology):
    """Return the socket and the core of a logical CPU."""
    try:
        directory = pathlib.Path(topology, f"cpu{cpu}", "topology")
        names = ("physical_package_id", "core_id")
        return tuple(int((directory / name).read_text()) for name in names)
    except OSError:
        return 0, 0


def _launcher_cores(default):
    """Return the number of cores of the process that started the ranks."""
    for name, pid, _ in launchers.ancestors():
        if name in launchers.PROCESSES:
            with contextlib.suppress(OSError):
                return max(default, len(os.sched_getaffinity(pid)))
            break
    return default
