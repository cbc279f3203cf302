"""Cores, shared memory, temporary files and network of this machine."""

import ipaddress
import os
import shutil
import socket
import tempfile

import psutil

from hvdtrain.doctor.finding import Finding, broken, fine, warning
from hvdtrain.job import cores

_MIB = 1 << 20
# Variables of Gloo and of Open MPI that select network interfaces.
INTERFACE_VARIABLES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include")
_SHM_REMEDY = (
    "in a container: docker run --shm-size=64m; or move Open MPI's files: "
    "OMPI_MCA_btl_vader_backing_directory=/tmp"
)
_TMP_REMEDY = "set TMPDIR to a directory on this machine with free space"


def check() -> list[Finding]:
    """Return the findings on this machine."""
    # `gettempdir` falls back to another directory where TMPDIR cannot be written.
    temporary = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return [
        check_cores(),
        check_directory("/dev/shm", needed_bytes=16 * _MIB, remedy=_SHM_REMEDY),
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
    if any(quota < count for quota in cores.quotas()):
        limits.append("by a control group")
    if limits:
        detail += f" (limited {' and '.join(limits)})"
    if usable < 2:
        remedy = (
            "two ranks will share one core: ask the scheduler or Docker for more cores"
        )
        return warning("cores", detail, remedy)
    return fine("cores", detail)


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
    """Resolve the name of this machine, as Gloo and Open MPI do."""
    name = socket.gethostname()
    try:
        answers = socket.getaddrinfo(name, None, family=socket.AF_INET)
    except OSError as error:
        remedy = f"add the line '127.0.1.1 {name}' to /etc/hosts"
        detail = f"{name} has no address: {error.strerror}"
        return warning("host name", detail, remedy)
    addresses = sorted({str(answer[4][0]) for answer in answers})
    return fine("host name", f"{name}, {', '.join(addresses)}")


def check_interfaces() -> Finding:
    """List the network interfaces, and check those that variables select."""
    addresses = _interfaces()
    listed = ", ".join(f"{name} {address}" for name, address in addresses.items())
    for variable in INTERFACE_VARIABLES:
        for name in filter(None, os.environ.get(variable, "").split(",")):
            if name not in addresses and not _is_network(name):
                detail = f"{variable}={name} is not up here; there are {listed}"
                return broken("network", detail, f"unset it, or name one of {listed}")
    if all(ipaddress.ip_address(address).is_loopback for address in addresses.values()):
        return fine("network", f"{listed or 'none'}; this machine alone")
    return fine("network", listed)


def _interfaces() -> dict[str, str]:
    """Return the IPv4 addresses of the network interfaces that are up, by name."""
    running = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: address.address
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if name in running and address.family == socket.AF_INET
    }


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True
