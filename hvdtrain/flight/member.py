"""This process as a member of its job: its guard, and what it sends to the guard."""

import atexit
import contextlib
import faulthandler
import fcntl
import json
import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings

from hvdtrain import processes
from hvdtrain.flight.answer import Member
from hvdtrain.flight.conclusion import conclude, suspects
from hvdtrain.flight.limits import Limits
from hvdtrain.flight.shared_directory import FOLDER, SharedDirectory
from hvdtrain.flight.task import Task
from hvdtrain.open_directory import OpenDirectory

_PACKAGE = pathlib.Path(__file__).parents[2]
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from hvdtrain.flight import guard; guard.main()"
)
_REPORT_SECONDS = 30.0
_PREFIX = "hvdtrain-"
_RING = re.compile(r"-(\d+)\.ring$")
_KEPT_SECONDS = 7 * 24 * 3600
# Stacks of a hundred threads: `faulthandler` must not block in a full pipe.
_PIPE_BYTES = 1 << 20


class _Membership:
    """The guard of this process.

    Attributes:
        writer: file descriptor of the pipe to which `faulthandler` writes.
        directories: the one of this host, then the one of the job.
    """

    def __init__(self, process: subprocess.Popen, task: Task, writer: int) -> None:
        self.process = process
        self.task = task
        self.writer = writer
        self.directories = [SharedDirectory(pathlib.Path(task.directory))]

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()


class _Present:
    membership: _Membership | None = None
    reason: int | None = None


def pass_reason(file: int) -> None:
    """Let the guard write to a file why it ends the job; called before `join`."""
    _Present.reason = file


def join(rank: int, size: int, *, job: str, limits: Limits) -> None:
    """Start the guard of this process; later calls send it the rank and the size.

    SIGQUIT is handled from now on: `faulthandler` writes the stacks of all threads, and
    the guard makes a roll call.

    Args:
        job: the same text in all processes of the job on this host, in no other job.
    """
    if _Present.membership:
        _Present.membership.send(f"rank {rank} {size}")
        return
    _remove_old()
    name = f"{_PREFIX}{os.getuid()}-{job}"
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(OSError):
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    pid = os.getpid()
    host = socket.gethostname()
    task = Task(
        member=Member(
            rank, size, host, pid, str(_ring_folder() / f"{name}-{pid}.ring")
        ),
        directory=_make_directory(pathlib.Path(tempfile.gettempdir(), name)),
        stacks=reader,
        thread=_start_receiver(),
        limits=limits,
        reason=_Present.reason,
    )
    passed = [reader] if task.reason is None else [reader, task.reason]
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(_PACKAGE), task.as_text()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=passed,
            # Launchers signal the group of a rank, also when they end it.
            start_new_session=True,
        )
    except OSError as error:
        os.close(writer)
        warnings.warn(
            f"A hang of rank {rank} will not be explained: its guard cannot be started "
            f"({error}).",
            stacklevel=2,
        )
        return
    finally:
        os.close(reader)
    faulthandler.register(signal.SIGQUIT, file=writer, all_threads=True)
    _Present.membership = _Membership(process, task, writer)
    atexit.register(leave)
    os.register_at_fork(after_in_child=_leave_in_fork)


def _start_receiver() -> int:
    """Start the thread to which the guard sends SIGQUIT; return its number.

    It blocks for ever in a system call that the kernel restarts.
    """
    receiver = threading.Thread(target=threading.Event().wait, daemon=True)
    receiver.start()
    assert receiver.native_id is not None
    return receiver.native_id


def _leave_in_fork() -> None:
    """Keep the errors of a forked process out of what its parent's guard reads."""
    membership = _Present.membership
    if membership:
        faulthandler.disable()
        faulthandler.unregister(signal.SIGQUIT)
        # A launcher sends it to the whole group of a rank. This process goes on.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        os.close(membership.writer)
        assert membership.process.stdin is not None
        membership.process.stdin.close()
        _Present.membership = None


def _remove_old() -> None:
    """Remove the records of jobs of this user that failed long ago."""
    for folder in {_ring_folder(), pathlib.Path(tempfile.gettempdir())}:
        for path in folder.glob(f"{_PREFIX}{os.getuid()}-*"):
            with contextlib.suppress(OSError):
                # A link of another user may have this name: it is not followed.
                status = path.lstat()
                if time.time() - status.st_mtime < _KEPT_SECONDS:
                    continue
                # A job that has run for long changes neither of its files.
                if any(map(processes.read_state, _processes(path, status))):
                    continue
                if stat.S_ISDIR(status.st_mode):
                    SharedDirectory(path).clear()
                    path.rmdir()
                elif _RING.search(path.name) and status.st_uid == os.geteuid():
                    path.unlink()


def _processes(path: pathlib.Path, status: os.stat_result) -> list[int]:
    """Return the processes whose ring or records a path has."""
    if stat.S_ISDIR(status.st_mode):
        return [member.pid for member in SharedDirectory(path).members()]
    return [int(found[1]) for found in [_RING.search(path.name)] if found]


def _make_directory(path: pathlib.Path) -> str:
    """Make the directory of this job's ranks on this host; return its path."""
    try:
        with OpenDirectory(path, make=True):
            return str(path)
    except OSError as error:
        _warn_of_foreign(path, error, "each rank")
        return tempfile.mkdtemp(prefix=f"{path.name}-")


def _warn_of_foreign(path: pathlib.Path, error: OSError, scope: str) -> None:
    warnings.warn(
        f"A hang will be explained for {scope} alone: received {path}, which cannot be "
        f"used ({error.strerror}); expected a directory of this user, or none: remove "
        "it.",
        stacklevel=2,
    )


def _ring_folder() -> pathlib.Path:
    # In memory: writing pages back to a disk would delay a rank that writes to them.
    shared = pathlib.Path("/dev/shm")
    is_writable = shared.is_dir() and os.access(shared, os.W_OK)
    return shared if is_writable else pathlib.Path(tempfile.gettempdir())


def ring_path() -> str | None:
    """Return where the guard reads the ring; None without a guard."""
    membership = _Present.membership
    return membership.task.member.ring if membership else None


def record_fatal_errors() -> None:
    """Let `faulthandler` write the stacks to the guard when native code fails.

    To be called after `hvd.init`: Open MPI installs handlers of its own.
    """
    if _Present.membership and not faulthandler.is_enabled():
        faulthandler.enable(file=_Present.membership.writer, all_threads=True)


def use_directory(model_dir: str | os.PathLike) -> None:
    """Let the guards of all ranks that see `model_dir` use its directory `flight`.

    The directory has no files of an earlier run: see `clear`.
    """
    if membership := _Present.membership:
        shared = SharedDirectory(pathlib.Path(model_dir).absolute() / FOLDER)
        membership.directories[1:] = [shared]
        membership.send(f"directory {json.dumps(str(shared.directory))}")


def clear(model_dir: str | os.PathLike) -> None:
    """Remove what an earlier run of the job has left in `model_dir`."""
    shared = SharedDirectory(pathlib.Path(model_dir) / FOLDER)
    try:
        shared.clear()
    except OSError as error:
        _warn_of_foreign(shared.directory, error, "the ranks of each host")


def leave(exit_code: int | None = None) -> None:
    """Send to the guard that this process is about to end by itself.

    By default the exit code is 1 after an uncaught exception, else 0.
    """
    if membership := _Present.membership:
        if exit_code is None:
            exit_code = int(hasattr(sys, "last_value"))
        membership.send(f"leave {exit_code}")


def note_end() -> None:
    """Send to the guard that the script has ended, unless by an uncaught exception.

    The exit of Python may take long, and collectives of other ranks fail meanwhile.
    """
    if (membership := _Present.membership) and not hasattr(sys, "last_value"):
        membership.send("end")


def note_shutdown() -> None:
    """Send to the guard that the other ranks do not depend on this process now."""
    if membership := _Present.membership:
        membership.send("shutdown")


def conclusion() -> str:
    """Return what the guards have found since a collective stalled, or nothing."""
    membership = _Present.membership
    if not membership:
        return ""
    # Drawn when the collective stalled; it fails at the limit, and is reported soon.
    seconds = membership.task.limits.shutdown_seconds + _REPORT_SECONDS
    directories = membership.directories[::-1]
    texts = [m.conclusion(within_seconds=seconds) for m in directories]
    # A rank that has ended by itself is late for all that the others call.
    texts += [_done(shared) for shared in directories]
    return next(filter(None, texts), "")


def _done(shared: SharedDirectory) -> str:
    return conclude([a for a in shared.answers("") if a.state == "done"])


def late_ranks() -> tuple[int, ...]:
    """Return the ranks that others waited for when `conclusion` was drawn, if any."""
    membership = _Present.membership
    for shared in reversed(membership.directories if membership else []):
        given = shared.answers()
        late = suspects(given)
        if len(late) < len(given) and conclusion():
            return tuple(answer.member.rank for answer in late)
    return ()
