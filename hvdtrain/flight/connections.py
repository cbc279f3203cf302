"""TCP connections of a process whose other end does not acknowledge what was sent."""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

_PROC = pathlib.Path("/proc")
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_ESTABLISHED, _NO_TIMER = "01", "00"
# Retransmissions or probes in succession. The kernel doubles the pause after each, from
# 0.2 s on in a network of short delay: these take 6 s. It counts from 0 again when
# the other end acknowledges anything.
_UNANSWERED = 5


def has_lost(pid: int) -> bool:
    """Return whether a connection of a process is lost, as after a cut of the network.

    False where the process communicates by other means than TCP, as by InfiniBand.
    """
    lost = set()
    for name in ("tcp", "tcp6"):
        # The file has the network namespace of the process.
        with contextlib.suppress(OSError):
            lost |= set(lost_sockets((_PROC / f"{pid}/net/{name}").read_text()))
    # The table has the connections of all processes.
    return bool(lost) and not lost.isdisjoint(_sockets(pid))


def lost_sockets(table: str) -> Iterator[int]:
    """Yield the inodes of lost connections in the text of /proc/net/tcp or tcp6."""
    for line in table.splitlines()[1:]:
        _, _, _, state, _, timer, retransmissions, _, probes, inode, *_ = line.split()
        # Where this host's own interface is down, data becomes a probe.
        unanswered = max(int(retransmissions, 16), int(probes))
        is_active = state == _ESTABLISHED and not timer.startswith(_NO_TIMER)
        if is_active and unanswered >= _UNANSWERED:
            yield int(inode)


def _sockets(pid: int) -> Iterator[int]:
    """Yield the inodes of the sockets that a process has open."""
    with contextlib.suppress(OSError):
        for name in os.listdir(_PROC / f"{pid}/fd"):
            # The file may have been closed since.
            with contextlib.suppress(OSError):
                target = os.readlink(_PROC / f"{pid}/fd/{name}")
                if found := _SOCKET.fullmatch(target):
                    yield int(found[1])
