"""Processes of this machine, as /proc describes them."""

import os
import pathlib
import time
from collections.abc import Iterator
from typing import NamedTuple

_PROC = pathlib.Path("/proc")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessStat(NamedTuple):
    """The fields of /proc/PID/stat that are used here.

    Attributes:
        name: of the program.
        state: a letter, such as "Z" of a process that its parent has not reaped.
        parent: PID of the parent.
        session: of the process.
        start_seconds: since the start of the machine.
        wait_status: of a process that ends; 0 if it is not known.
    """

    name: str
    state: str
    parent: int
    session: int
    start_seconds: float
    wait_status: int

    @property
    def age_seconds(self) -> float:
        """Seconds since the start of the process."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self.start_seconds


def read_stat(pid: int) -> ProcessStat:
    """Return what the kernel says of a process.

    Raises:
        OSError: there is no such process.
    """
    text = (_PROC / f"{pid}/stat").read_text(errors="replace")
    # The name may contain spaces and parentheses.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return ProcessStat(
        name=name,
        state=fields[0],
        parent=int(fields[1]),
        session=int(fields[3]),
        start_seconds=int(fields[19]) / _TICKS_PER_SECOND,
        # Where /proc is not the kernel's own, as in gVisor, this field may be missing.
        wait_status=int(fields[49]) if len(fields) > 49 else 0,
    )


def read_ancestors() -> Iterator[tuple[int, ProcessStat]]:
    """Yield PID and `ProcessStat` of the ancestors of this process, the nearest first.

    Ends at an ancestor that has ended, or that /proc hides.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            stat = read_stat(pid)
        except OSError:
            return
        yield pid, stat
        pid = stat.parent


def read_environment(pid: int) -> list[str]:
    """Return the names of the variables with which a process was started.

    Empty for a process that has ended, or that belongs to another user.
    """
    try:
        text = (_PROC / f"{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return []
    return [line.partition("=")[0] for line in text.split("\0") if line]


def read_state(pid: int) -> str:
    """Return the letter of the state of a process; empty if it has ended."""
    try:
        return read_stat(pid).state
    except OSError:
        return ""


def read_wait_status(pid: int) -> int:
    """Return the wait status of a process that ends; 0 if it is not known.

    The kernel removes it when the parent has reaped the process.
    """
    try:
        return read_stat(pid).wait_status
    except OSError:
        return 0
