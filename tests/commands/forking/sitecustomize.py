"""Lets a program of a test be a fork of a process that has imported TensorFlow.

Python imports this module when it starts. In a program, this process sends all that
defines the program to `server.py`, and stands for the fork: it forwards signals to it,
and ends as it does. If it is killed, the server kills the fork.
"""

import contextlib
import marshal
import os
import signal
import socket
import sys
import traceback

# The name of a socket without a file.
SERVER = "HVDTRAIN_TEST_SERVER"
_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT),
)


def _is_program():
    """Return whether this is a program with the three standard files, no launcher."""
    option, *_ = sys.orig_argv[1:] or ["-"]
    is_option = option.startswith("-") and option not in {"-m", "-c"}
    if SERVER not in os.environ or is_option or option.endswith("horovodrun"):
        return False
    # Helpers of multiprocessing and of engines inherit pipes.
    files = map(int, os.listdir("/proc/self/fd"))
    return not any(file > 2 and _is_inherited(file) for file in files)


def _is_inherited(file):
    try:
        return os.get_inheritable(file)
    except OSError:  # The directory that was listed.
        return False


def _wait_for_fork():
    """Return the exit code of the fork; negative: the signal that has ended it."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{os.environ[SERVER]}")
    cores = list(os.sched_getaffinity(0))
    program = (sys.orig_argv, sys.path, dict(os.environ), os.getcwd(), cores)
    message = marshal.dumps(program)
    socket.send_fds(connection, [len(message).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(message)
    fork = _receive(connection)

    def forward(number, frame):
        # It may have ended: its exit code is on the way.
        with contextlib.suppress(ProcessLookupError):
            os.kill(fork, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    return _receive(connection)


def _receive(connection):
    if not (number := connection.recv(8)):
        raise ConnectionError("the server of this fork has ended")
    return int.from_bytes(number, "big", signed=True)


def _end_as_fork():
    code = 1
    try:
        code = _wait_for_fork()
        if code < 0:
            if code != -signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    except Exception:
        traceback.print_exc()
    finally:
        # Python would go on with the program after an error here.
        os._exit(code)


if _is_program():
    _end_as_fork()
