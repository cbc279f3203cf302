"""Environment variables, and the CPU quotas of this process' control groups.

Importing this module loads no TensorFlow.
"""

import contextlib
import functools
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from hvdtrain.interruption import SIGNAL_FILE

STALL_CHECK = "HOROVOD_STALL_CHECK_TIME_SECONDS"
STALL_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
JOB_SECRET = "HOROVOD_JOB_SECRET"
INIT_TIMEOUT = "HVDTRAIN_INIT_TIMEOUT_SECONDS"
INIT_REPORT = "HVDTRAIN_INIT_REPORT_SECONDS"
DEADLOCK = "HVDTRAIN_DEADLOCK_SECONDS"
FILE_CACHE = "HVDTRAIN_FILE_CACHE_GB"
TERMINATION = "HOROVOD_TERMINATION_SECONDS"
# Variables with seconds.
LIMITS = (STALL_CHECK, STALL_SHUTDOWN, INIT_TIMEOUT, INIT_REPORT, DEADLOCK)
# Units of variables with numbers, 0 or more. Horovod takes other text for 0.
_UNITS = {
    **dict.fromkeys((*LIMITS, TERMINATION), "seconds"),
    FILE_CACHE: "GB",
    "HOROVOD_CYCLE_TIME": "milliseconds",
    "HOROVOD_FUSION_THRESHOLD": "bytes",
    "HOROVOD_CACHE_CAPACITY": "a number of tensors",
}
REDUCTION = "HVDTRAIN_REDUCTION"
_REDUCTIONS = ("auto", "native", "horovod")

# All variables that hvdtrain reads for itself, with their meaning for users.
VARIABLES = {
    "HVDTRAIN_ADDRESS": "Host of rank 0, or host:port, where a platform starts the "
    "ranks: for HVDTRAIN_SIZE. The port is 29310 by default. Under srun: the node of "
    "task 0, where that is not the first one of the step.",
    "HVDTRAIN_ALONE": "1: this process trains alone, although a launcher or a platform "
    "has started several. Without it, hvd.init makes a job of them, or is an error.",
    "HVDTRAIN_BIND": "0: ranks are not bound to their share of the cores of the node.",
    "HVDTRAIN_CACHE_DIR": "Directory of built wheels, data and indexes of files; by "
    "default hvdtrain in XDG_CACHE_HOME, or ~/.cache/hvdtrain.",
    "HVDTRAIN_DECLARED": "Set by hvdtrain.launch for the messages of its ranks: what "
    "has declared them.",
    DEADLOCK: "Seconds until a job ends whose ranks wait for a collective that another "
    "rank will never call, as a roll call shows; 120 by default, 0 for never.",
    FILE_CACHE: "Size of the copies of ArrayRecord files from stores that are kept in "
    "HVDTRAIN_CACHE_DIR, in GB; 100 by default.",
    INIT_REPORT: "Seconds until a line names the ranks that the others wait for in "
    "hvd.init; 60 by default, 0 for no line.",
    INIT_TIMEOUT: "Seconds that ranks wait for the others in hvd.init; 300 by default, "
    "0 for no limit.",
    "HVDTRAIN_JOB": "Text that distinguishes jobs of HVDTRAIN_SIZE at one address. "
    "Rank 0 then takes the first of 16 ports that is free.",
    SIGNAL_FILE: "Set by horovodrun, hvdtrain.launch and hvdtrain.run for their ranks: "
    "a file with the signal that they have received; they send their ranks another.",
    "HVDTRAIN_MNIST_URLS": "Addresses of mnist.npz, separated by spaces, in place of "
    "the public mirrors.",
    "HVDTRAIN_RANK": "Rank of this process, for HVDTRAIN_SIZE. By default "
    "JOB_COMPLETION_INDEX, which Kubernetes sets.",
    REDUCTION: "auto: gradients are reduced in shared memory within a "
    "host, and over TCP between hosts, else by Horovod. horovod: always by Horovod. "
    "native: an error where that is not possible without Horovod.",
    "HVDTRAIN_SIZE": "Number of ranks that a platform starts without a launcher; "
    "hvd.init makes a job of them. With HVDTRAIN_ADDRESS and HVDTRAIN_RANK.",
    "HVDTRAIN_WHEELS": "Directory, or https address, of wheels for "
    "python -m hvdtrain.install.",
}
# Variables of Horovod that users of hvdtrain set.
HOROVOD_VARIABLES = {
    "HOROVOD_CYCLE_TIME": "Milliseconds between two cycles of Horovod's thread. "
    "job.start sets 0.1.",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1: a script that calls hvd.init may make meshes.",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "Seconds that the network between hosts may be "
    "interrupted under Gloo; 30 by default.",
    "HOROVOD_GPU_OPERATIONS": "NCCL: python -m hvdtrain.install builds for GPUs.",
    JOB_SECRET: "Key that signs what the processes of a job send each other: see "
    "SECURITY.md. horovodrun, hvdtrain.run and, on one host, hvdtrain.launch set it.",
    "HOROVOD_STALL_CHECK_DISABLE": "1: no limits for stalled collectives.",
    STALL_CHECK: "Seconds until a warning names the ranks that do not call a "
    "collective.",
    STALL_SHUTDOWN: "Seconds until this collective fails on the other ranks.",
    TERMINATION: "Seconds that ranks have to save after a signal to horovodrun --gloo "
    "or hvdtrain.launch; 60 by default.",
    "HOROVOD_TIMELINE": "File of Horovod's timeline.",
    "HOROVOD_WITHOUT_MPI": "1: python -m hvdtrain.install leaves MPI out.",
}


class StallLimits(NamedTuple):
    """How long a rank waits in a collective that another rank does not call.

    Attributes:
        check_seconds: until a warning; 0 for none.
        shutdown_seconds: until the collective fails; 0 for never.
    """

    check_seconds: float
    shutdown_seconds: float


# Horovod's defaults: a rank that waits for a lost one blocks for ever.
HOROVOD_LIMITS = StallLimits(60, 0)
# Users' scripts may evaluate or save on rank 0 for long, with the other ranks blocked
# in a collective.
SCRIPT_LIMITS = StallLimits(60, 1800)
# hvdtrain's programs evaluate on all ranks.
PROGRAM_LIMITS = StallLimits(30, 60)
# The other ranks are blocked in a collective while rank 0 trains alone.
BENCHMARK_LIMITS = StallLimits(600, 1800)


def set_default_stall_limits(limits: StallLimits) -> None:
    """Set the limits that the user has not set, before Horovod starts.

    Horovod ignores the second limit where the first is longer.
    """
    os.environ.setdefault(STALL_SHUTDOWN, str(limits.shutdown_seconds))
    check_seconds = limits.check_seconds
    with contextlib.suppress(ValueError):
        shutdown_seconds = float(os.environ[STALL_SHUTDOWN])
        if shutdown_seconds > 0:
            check_seconds = min(check_seconds, shutdown_seconds / 2)
    os.environ.setdefault(STALL_CHECK, f"{check_seconds:g}")


def stall_limits() -> StallLimits:
    """Return the limits that Horovod reads."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return StallLimits(0.0, 0.0)
    return StallLimits(
        _number(STALL_CHECK, HOROVOD_LIMITS.check_seconds),
        _number(STALL_SHUTDOWN, HOROVOD_LIMITS.shutdown_seconds),
    )


class InitLimits(NamedTuple):
    """How long ranks wait in `hvd.init` for one that does not call it.

    Attributes:
        report_seconds: until a line names it; 0 for none.
        timeout_seconds: until the job ends; 0 for no limit.
    """

    report_seconds: float
    timeout_seconds: float


def init_limits() -> InitLimits:
    """Return the limits of `hvd.init`; raise a ValueError for a wrong variable."""
    return InitLimits(_number(INIT_REPORT, 60), _number(INIT_TIMEOUT, 300))


def termination_seconds() -> float:
    """Return the time of ranks after a signal; raise a ValueError for a wrong one."""
    return _number(TERMINATION, 60)


def deadlock_seconds() -> float:
    """Return how long ranks wait for what cannot come; 0 for as long as for others."""
    return _number(DEADLOCK, 120)


def file_cache_bytes() -> float:
    """Return the size of the copies of files; raise a ValueError for a wrong one."""
    return 1e9 * _number(FILE_CACHE, 100)


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        expected = f"{_UNITS[name]}, 0 or more"
        raise ValueError(f"Received {name}={text}; expected {expected}.")
    return number


def reduction_choice() -> str:
    """Return HVDTRAIN_REDUCTION, `auto` where it is unset or empty.

    Raises:
        ValueError: for an unknown value.
    """
    choice = os.environ.get(REDUCTION) or _REDUCTIONS[0]
    if choice not in _REDUCTIONS:
        expected = f"one of {', '.join(_REDUCTIONS)}"
        raise ValueError(f"Received {REDUCTION}={choice}; expected {expected}.")
    return choice


def check_numbers() -> None:
    """Raise a ValueError for a variable with a number that has another value."""
    for name in _UNITS:
        _number(name, 0)


def wrong_values() -> Iterator[str]:
    """Yield what is wrong with the variables that jobs read, as sentences."""
    numbers = (functools.partial(_number, name, 0) for name in _UNITS)
    checks: Iterable[Callable[[], object]] = (reduction_choice, *numbers)
    for check in checks:
        try:
            check()
        except ValueError as error:
            yield str(error)


def job_secret() -> bytes:
    """Return the secret of this job; empty where the launcher makes none."""
    return os.environ.get(JOB_SECRET, "").encode()


def is_elastic() -> bool:
    """Return whether the job may lose and gain ranks while it runs."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def quotas(
    root: str | os.PathLike = "/sys/fs/cgroup",
    membership: str | os.PathLike = "/proc/self/cgroup",
) -> list[float]:
    """Return the CPU quotas, in cores, of this process' control groups, v1 or v2."""
    groups = control_groups(root, membership)
    return [quota for directory in groups for quota in _quota(directory)]


def control_groups(
    root: str | os.PathLike = "/sys/fs/cgroup",
    membership: str | os.PathLike = "/proc/self/cgroup",
    *,
    controller: str = "cpu",
) -> Iterator[pathlib.Path]:
    """Yield the directories of this process' groups of a controller, v1 or v2.

    Not all of them exist.
    """
    try:
        lines = pathlib.Path(membership).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = pathlib.Path(root) / (controller if controllers else "")
        inside = pathlib.PurePath(path.lstrip("/"))
        # In a container the path may be the host's, which does not exist here. The
        # group of the container is then mounted at the root.
        for directory in (inside, *inside.parents):
            yield base / directory


def cpu_statistics(directory: pathlib.Path) -> dict[str, int]:
    """Return the counts of "cpu.stat" of a control group; empty where it has none."""
    try:
        lines = map(str.split, (directory / "cpu.stat").read_text().splitlines())
        return {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return {}


def _quota(directory: pathlib.Path) -> list[float]:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (directory / "cpu.max").read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    with contextlib.suppress(OSError, ValueError):
        microseconds = int((directory / "cpu.cfs_quota_us").read_text())
        period_us = int((directory / "cpu.cfs_period_us").read_text())
        return [microseconds / period_us] if microseconds > 0 else []
    return []
