"""A process beside each rank that ends the rank when it has been stopped for long.

A process that is stopped, by SIGSTOP for example, keeps its connections, and no thread
of it runs: the other ranks block in a collective, under MPI without limit. Its state
is visible in /proc to any process of the machine, whether the rank executes a long
TensorFlow step or Python. The state of a debugger is another one.

This file is also the program of that process, which imports the standard library only.
"""

import os
import select
import signal
import socket
import subprocess
import sys

# Less than the stall limit, so that this reason is printed before the other ranks fail.
_SHARE_OF_STALL_LIMIT = 0.5
_MAX_PERIOD_SECONDS = 1.0
_STDIN, _STDERR = 0, 2
# A signal to the whole job must not end this process before the rank has ended.
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
# Keeps the pipe to each guard open until this process ends.
_guards: list[subprocess.Popen] = []


def start(rank: int, *, stall_seconds: float) -> None:
    """Start the process that guards this one, unless `stall_seconds` is 0.

    Its limit is half of `stall_seconds`, which other ranks wait in a collective.
    """
    if stall_seconds <= 0:
        return
    limit = _SHARE_OF_STALL_LIMIT * stall_seconds
    arguments = [str(os.getpid()), str(limit), str(rank)]
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    _guards.append(guard)


def _watch(pid: int, limit_seconds: float, rank: int) -> None:
    # Ends with the rank: at the end of its input, or with another parent process where
    # a child of the rank holds the other end of the pipe.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    period = min(_MAX_PERIOD_SECONDS, limit_seconds / 10)
    # Count periods instead of seconds: a scheduler that suspends all processes
    # suspends this one, too.
    periods = 0
    while os.getppid() == pid and not select.select([_STDIN], [], [], period)[0]:
        periods = periods + 1 if _is_stopped(pid) else 0
        if periods * period >= limit_seconds:
            text = (
                f"rank {rank} on {socket.gethostname()}: was stopped, as by SIGSTOP, "
                f"for {limit_seconds:g} s, and is killed, since the other ranks wait "
                "for it.\n"
            )
            os.write(_STDERR, text.encode())
            os.kill(pid, signal.SIGKILL)
            return


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            # After the name of the program, which may contain spaces.
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
