"""Imports TensorFlow once, without using it, and forks the programs of tests.

Each line of the standard input is the name of a socket: a fork that serves one job
listens there, and its PID is the answer. Programs arrive from `sitecustomize.py`.
"""

import contextlib
import ctypes
import marshal
import os
import pathlib
import runpy
import select
import signal
import socket
import sys
import types

import keras
import numpy as np

# Keras imports TensorFlow.
assert keras.backend.backend() == "tensorflow"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + line.rstrip("\n"))
        listener.listen()
        if not (pid := os.fork()):
            _run(*_serve(listener))
            return
        listener.close()
        print(pid, flush=True)


def _serve(listener):
    """Fork programs. Returns in a fork: its program and its three standard files."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_with_parent()
    # What a rank leaves behind is found among the descendants of this process.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # An ancestor of the ranks that has started them all: the product looks for it.
    _name("mpirun")
    events = select.poll()
    events.register(listener, select.POLLIN)
    # By the file of its connection, and by that of its process.
    forks = {}
    while True:
        for file, _ in events.poll():
            if file == listener.fileno():
                connection, _ = listener.accept()
                if (received := _receive(connection)) is None:
                    continue
                if not (pid := os.fork()):
                    return received
                for each in received[1]:
                    os.close(each)
                _send(connection, pid)
                process = os.pidfd_open(pid)
                forks[process] = forks[connection.fileno()] = pid, process, connection
                events.register(process, select.POLLIN)
                events.register(connection, select.POLLIN)
            elif file in forks:
                pid, process, connection = forks.pop(file)
                events.unregister(file)
                if file != process:  # What stands for the fork was killed.
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    continue
                _send(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                if forks.pop(connection.fileno(), None):
                    events.unregister(connection)
                connection.close()
                os.close(process)


def _receive(connection):
    """Return a program and its files; None if its process was killed meanwhile."""
    with contextlib.suppress(ConnectionError, EOFError):
        size, files, *_ = socket.recv_fds(connection, 8, 3)
        with connection.makefile("rb") as stream:
            return marshal.loads(stream.read(int.from_bytes(size, "big"))), files
    return None


def _send(connection, number):
    # Of a process that was killed meanwhile, the next event ends the fork.
    with contextlib.suppress(ConnectionError):
        connection.sendall(number.to_bytes(8, "big", signed=True))


def _run(program, standard_files):
    """Run the program in this fork as Python runs it."""
    _end_with_parent()
    _name("python")
    (_, option, *words), search_path, environment, directory, cores = program
    for number, file in enumerate(standard_files):
        os.dup2(file, number)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    os.sched_setaffinity(0, cores)
    # Ranks draw differently; Python does this by itself for `random`.
    np.random.seed()
    sys.path[:] = search_path
    sys.orig_argv = program[0]
    if option == "-m":
        sys.argv = words
        sys.path.insert(0, directory)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *words[1:]]
        sys.path.insert(0, "")
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[0], "<string>", "exec"), vars(module))
    else:
        sys.argv = [option, *words]
        sys.path.insert(0, os.path.dirname(os.path.abspath(option)))
        runpy.run_path(option, run_name="__main__")


def _name(name):
    pathlib.Path("/proc/self/comm").write_text(name)


def _end_with_parent():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
