"""Why a process has ended without Python's exit, as far as the machine shows it."""

import contextlib
import os
import pathlib
import re
import signal
import time
from collections.abc import Iterator

from hvdtrain.environment import control_groups

# What `faulthandler` writes first when it handles a fatal signal.
_FATAL = re.compile(r"^Fatal Python error: (.*)$", re.M)
_CGROUPS = pathlib.Path("/sys/fs/cgroup")
# The kernel writes its line just before, and the counter just after the kill.
_SECONDS_FOR_EVIDENCE = 1.0
_POLL_SECONDS = 0.05
_END_POLL_SECONDS = 0.01
# PROC_PID_INIT_INO of the kernel.
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
# The clock of the log is not exactly the monotonic one.
_SLACK_SECONDS = 1.0


class OutOfMemoryKills:
    """Kills by the out-of-memory killer.

    Evidence is a line in the kernel's log, which only root can read on most machines,
    and the counter `oom_kill` of the control group that had the limit.
    """

    def __init__(self, membership: str | os.PathLike = "/proc/self/cgroup") -> None:
        self._start = time.monotonic()
        self._counters = list(_counters(membership))
        self._before = self._last = [_count(path) for path in self._counters]

    def renew(self) -> None:
        """Count kills from the last call of this method on.

        The present ones may be of a process that has not ended yet.
        """
        self._before = self._last
        self._last = [_count(path) for path in self._counters]

    def words_for(self, pid: int) -> str:
        """Return the evidence that the killer has ended `pid`; empty without any."""
        deadline = time.monotonic() + _SECONDS_FOR_EVIDENCE
        while True:
            words = _kernel_line(pid, since=self._start) or self._counted()
            if words or time.monotonic() > deadline:
                return words
            time.sleep(_POLL_SECONDS)

    def _counted(self) -> str:
        for path, before in zip(self._counters, self._before, strict=True):
            if (now := _count(path)) > before:
                return f"oom_kill of {path} rose from {before} to {now}"
        return ""


def cause(
    pid: int, *, fatal_error: str, kills: OutOfMemoryKills, status: int = 0
) -> str:
    """Return why `pid` has ended, in words that follow "rank 1 on host".

    Args:
        fatal_error: what `faulthandler` has written when the process ended.
        status: of `processes.read_wait_status`.
    """
    number = os.WTERMSIG(status)
    if fatal := _FATAL.search(fatal_error):
        return f"died in native code: {fatal[1]}"
    if status and not number:
        code = os.WEXITSTATUS(status)
        return f"has ended with exit code {code}, without Python's exit, as by os._exit"
    if number not in (0, signal.SIGKILL):
        return f"was killed by {signal_name(number)}"
    if words := kills.words_for(pid):
        return f"was killed by the out-of-memory killer ({words})"
    if number:
        return "was killed by SIGKILL"
    return "was killed by a signal such as SIGKILL, or has called os._exit"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGTERM or signal 40."""
    try:
        return signal.Signals(number).name
    except ValueError:
        # Of the real-time signals only the first and the last one have a name.
        return f"signal {number}"


def wait_for_parent(pid: int, *, timeout_seconds: float) -> None:
    """Wait until the parent `pid` of this process has ended."""
    deadline = time.monotonic() + timeout_seconds
    while os.getppid() == pid and time.monotonic() < deadline:
        time.sleep(_END_POLL_SECONDS)


def is_fatal(text: str) -> bool:
    """Return whether `faulthandler` has handled a fatal signal in this text."""
    return bool(_FATAL.search(text))


def _kernel_line(pid: int, *, since: float) -> str:
    """Return the kernel's line on the kill of a process, without its numbers.

    Args:
        since: seconds of the monotonic clock. Earlier lines may be of another process
            with this PID.
    """
    if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
        # In a container, PIDs in the log are other ones.
        return ""
    killed = re.compile(rf"(?:[Oo]ut of memory)[^\n]*: Killed process {pid} \([^\n]*")
    with contextlib.suppress(OSError):
        file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            for record in _records(file):
                found = killed.search(record)
                # "priority,number,microseconds,flags;text"
                if found and int(record.split(",")[2]) * 1e-6 >= since - _SLACK_SECONDS:
                    return f"kernel: {found[0].strip()}"
        finally:
            os.close(file)
    return ""


def _records(file: int) -> Iterator[str]:
    while True:
        try:
            yield os.read(file, 8192).decode(errors="replace")
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The kernel has overwritten the record that was next.
            continue


def _counters(membership: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yield the files that count kills in this process' control groups, v1 and v2."""
    for directory in control_groups(_CGROUPS, membership, controller="memory"):
        for name in ("memory.oom_control", "memory.events"):
            if (file := directory / name).exists():
                yield file


def _count(path: pathlib.Path) -> int:
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)$", path.read_text(), re.M):
            return int(found[1])
    return 0
