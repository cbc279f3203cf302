"""Cores, memory, shared memory, temporary files, network and clock of this machine."""

import ipaddress
import os
import pathlib
import shutil
import socket
import tempfile
import time

import psutil

from hvdtrain.diagnosis.finding import broken, fine, warning
from hvdtrain.job import cores

_GIB = 1 << 30
_MIB = 1 << 20
# A rank of MNIST's program was measured at 0.6 GiB.
_RANK_BYTES = 0.7 * _GIB
# Bridges that exist on every host with the same address: useless between hosts.
_BRIDGES = ("docker", "br-", "virbr", "podman", "cni", "lxc")
# Variables that choose interfaces, of Gloo and of Open MPI.
INTERFACE_VARIABLES = ("HOROVOD_GLOO_IFACE", "OMPI_MCA_btl_tcp_if_include")


def check():
    """Return the findings on this machine."""
    return [
        check_cores(),
        check_memory(),
        check_directory("/dev/shm", needed_bytes=16 * _MIB, remedy=_SHM_REMEDY),
        check_directory(_temporary(), needed_bytes=64 * _MIB, remedy=_TMP_REMEDY),
        check_name(),
        check_interfaces(),
        check_clock(),
    ]


_SHM_REMEDY = (
    "in a container: docker run --shm-size=64m; or move Open MPI's files: "
    "OMPI_MCA_btl_vader_backing_directory=/tmp"
)
_TMP_REMEDY = "set TMPDIR to a directory on this machine that has room"


def _temporary():
    # Not tempfile.gettempdir, which turns to another directory without a word.
    return os.environ.get("TMPDIR") or tempfile.gettempdir()


def check_cores():
    """Compare the cores of the machine with those that this process may use."""
    usable = cores.usable(1)
    detail = f"{usable} of {os.cpu_count()} may be used"
    limits = []
    if len(os.sched_getaffinity(0)) < os.cpu_count():
        limits.append("by affinity")
    if any(quota < os.cpu_count() for quota in cores.quotas()):
        limits.append("by a control group")
    if limits:
        detail += f" (limited {' and '.join(limits)})"
    if usable < 2:
        remedy = "two ranks will take turns; ask the scheduler or Docker for more cores"
        return warning("cores", detail, remedy)
    return fine("cores", detail)


def check_memory():
    """Say how many ranks of a small model the memory is enough for."""
    limit = _memory_limit()
    free = psutil.virtual_memory().available
    if limit is not None:
        free = min(free, limit)
    detail = f"{free / _GIB:.1f} GiB, enough for {int(free / _RANK_BYTES)} small ranks"
    if limit is not None:
        detail += " (limited by a control group)"
    remedy = "free some, or ask the scheduler or Docker for more"
    if free < _RANK_BYTES:
        return broken("memory", detail, remedy)
    if free < 2 * _RANK_BYTES:
        return warning("memory", detail, remedy)
    return fine("memory", detail)


def _memory_limit():
    """Return the memory that the control group leaves, in bytes; None if unlimited."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        root = pathlib.Path("/sys/fs/cgroup")
        try:
            bytes_left = int((root / limit).read_text())
            bytes_left -= int((root / usage).read_text())
        except (OSError, ValueError):
            continue
        # Version 1 writes a number beyond any memory for "unlimited".
        return bytes_left if bytes_left < 1 << 60 else None
    return None


def check_directory(path, *, needed_bytes, remedy):
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


def check_name():
    """Look up the name of this machine, as Gloo and Open MPI do."""
    name = socket.gethostname()
    try:
        answers = socket.getaddrinfo(name, None, family=socket.AF_INET)
    except OSError as error:
        remedy = f"add the line '127.0.1.1 {name}' to /etc/hosts"
        detail = f"{name} has no address: {error.strerror}"
        return warning("host name", detail, remedy)
    addresses = sorted({answer[4][0] for answer in answers})
    return fine("host name", f"{name}, {', '.join(addresses)}")


def interfaces():
    """Return the IPv4 addresses of the network interfaces that are up, by name."""
    running = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: address.address
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if name in running and address.family == socket.AF_INET
    }


def check_interfaces():
    """Say which network interfaces there are and which ones will be used."""
    found = interfaces()
    listed = ", ".join(f"{name} {address}" for name, address in found.items())
    for variable in INTERFACE_VARIABLES:
        for name in filter(None, os.environ.get(variable, "").split(",")):
            if name not in found and not _is_network(name):
                detail = f"{variable}={name} is not up here; there are {listed}"
                return broken("network", detail, f"unset it, or name one of {listed}")
    outward = [name for name in found if not _is_loopback(found[name])]
    bridges = [name for name in outward if name.startswith(_BRIDGES)]
    is_chosen = INTERFACE_VARIABLES[1] in os.environ
    if len(outward) > len(bridges) > 0 and not is_chosen:
        chosen = next(name for name in outward if name not in bridges)
        detail = (
            f"{listed}; across hosts Open MPI may try {', '.join(bridges)} and hang"
        )
        remedy = (
            f"for several hosts: horovodrun --network-interface {chosen}, "
            f"mpirun --mca btl_tcp_if_include {chosen}"
        )
        return warning("network", detail, remedy)
    if not outward:
        return fine("network", f"{listed or 'none'}; this machine alone")
    return fine("network", f"{listed}; across hosts {outward[0]}")


def _is_network(text):
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def _is_loopback(address):
    return ipaddress.ip_address(address).is_loopback


def check_clock():
    """Hold the clock to the time when this file was installed."""
    now, installed = time.time(), pathlib.Path(__file__).stat().st_mtime
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    if now < installed - 60:
        remedy = "set it by NTP: logs and certificates need the time"
        return warning("clock", f"{shown}, before hvdtrain was installed", remedy)
    return fine("clock", shown)
