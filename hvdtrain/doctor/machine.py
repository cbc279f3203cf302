"""Cores, shared memory, temporary files and network of this machine."""

import ipaddress
import itertools
import os
import pathlib
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping

from hvdtrain import addresses
from hvdtrain.doctor.finding import Finding, broken, fine, warning
from hvdtrain.environment import control_groups, cpu_statistics
from hvdtrain.job import cores

_MIB = 1 << 20
_SHM_REMEDY = (
    "in a container: docker run --shm-size=64m; or move Open MPI's files: "
    "OMPI_MCA_btl_vader_backing_directory=/tmp"
)
# A process that starts threads for all visible cores is throttled in most periods.
_THROTTLED_SHARE = 0.1
_QUOTA_REMEDY = (
    "raise the CPU limit of the container, or start fewer ranks, workers and threads "
    "in it: OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS"
)
_HOME_REMEDY = (
    "horovodrun writes .horovod there: set HOME to a directory that can be written, or "
    "launch by mpirun or hvdtrain.launch"
)
_TMP_REMEDY = "set TMPDIR to a directory on this machine with free space"


def check() -> list[Finding]:
    """Return the findings on this machine."""
    # `gettempdir` falls back to another directory where TMPDIR cannot be written.
    temporary = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return [
        check_cores(),
        check_directory("/dev/shm", needed_bytes=16 * _MIB, remedy=_SHM_REMEDY),
        check_directory(os.path.expanduser("~"), needed_bytes=1, remedy=_HOME_REMEDY),
        check_directory(temporary, needed_bytes=64 * _MIB, remedy=_TMP_REMEDY),
        check_name(),
        check_interfaces(),
    ]


def check_cores() -> Finding:
    """Compare the cores of the machine with those that this process may use."""
    usable, count = cores.usable(1), os.cpu_count() or 1
    detail = f"{usable} of {count} may be used"
    limits = []
    if len(os.sched_getaffinity(0)) < count:
        limits.append("by affinity")
    if (quota := min(cores.quotas(), default=count)) < count:
        limits.append(f"by a control group to {quota:.3g}")
    if limits:
        detail += f" (limited {' and '.join(limits)})"
    if (share := _throttled_share(control_groups())) >= _THROTTLED_SHARE:
        detail += f"; processes were throttled in {share:.0%} of the quota's periods"
        return warning("cores", detail, _QUOTA_REMEDY)
    if usable < 2:
        remedy = (
            "two ranks will share one core: ask the scheduler or Docker for more cores"
        )
        return warning("cores", detail, remedy)
    return fine("cores", detail)


def _throttled_share(groups: Iterable[pathlib.Path]) -> float:
    """Return the share of periods in which a group's quota was spent, the largest."""
    counts = map(cpu_statistics, groups)
    return max((_throttled(each) for each in counts), default=0.0)


def _throttled(counts: Mapping[str, int]) -> float:
    return counts.get("nr_throttled", 0) / max(1, counts.get("nr_periods", 0))


def check_directory(path: str, *, needed_bytes: int, remedy: str) -> Finding:
    """Write a file into a directory that the launchers write to."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
        free = shutil.disk_usage(path).free
    except OSError as error:
        return broken(path, f"cannot be written: {error.strerror}", remedy)
    detail = f"{free / _MIB:,.0f} MiB free"
    if free < needed_bytes:
        detail += f", {needed_bytes // _MIB} MiB are needed"
        return broken(path, detail, remedy)
    return fine(path, detail)


def check_name() -> Finding:
    """Compare the addresses of this machine's name with its interfaces."""
    name = socket.gethostname()
    detail = addresses.resolution(name)
    if addresses.is_of_this_host(name):
        return fine("host name", detail)
    remedy = f"add the line '127.0.1.1 {name}' to /etc/hosts, or correct it there"
    detail += f", and the interfaces of this machine are {addresses.listed()}"
    return warning("host name", detail, remedy)


def check_interfaces() -> Finding:
    """List the network interfaces, and check those that variables select."""
    interfaces, listed = addresses.by_interface(), addresses.listed()
    for variable in addresses.NETWORK_VARIABLES:
        for name in filter(None, os.environ.get(variable, "").split(",")):
            if name not in interfaces and not _is_network(name):
                detail = f"{variable}={name} is not up here; there are {listed}"
                return broken("network", detail, f"unset it, or name one of {listed}")
    found = itertools.chain(*interfaces.values())
    if all(ipaddress.ip_address(address).is_loopback for address in found):
        return fine("network", f"{listed}; this machine alone")
    return fine("network", listed)


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True
