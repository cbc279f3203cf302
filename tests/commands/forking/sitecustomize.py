"""Lets a program of a test be a fork of a process that has imported TensorFlow.

Python imports this module when it starts. In a program, this process sends all that
defines the program to `server.py`, and stands for the fork: it forwards signals to it,
and ends as it does. If it is killed, the server kills the fork.
"""

import marshal
import os
import signal
import socket
import sys

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
    return not any(
        int(file) > 2 and _is_inherited(int(file))
        for file in os.listdir("/proc/self/fd")
    )


def _is_inherited(file):
    try:
        return os.get_inheritable(file)
    except OSError:  # The directory that was listed.
        return False


def _stand_for_fork():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[SERVER])
    cores = list(os.sched_getaffinity(0))
    program = (sys.orig_argv, sys.path, dict(os.environ), os.getcwd(), cores)
    message = marshal.dumps(program)
    socket.send_fds(connection, [len(message).to_bytes(8, "big")], [0, 1, 2])
    connection.sendall(message)
    fork = int.from_bytes(connection.recv(8), "big")
    for number in _FORWARDED:
        signal.signal(number, lambda number, _: os.kill(fork, number))
    status = connection.recv(8)
    code = int.from_bytes(status, "big", signed=True) if status else 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if _is_program():
    _stand_for_fork()
