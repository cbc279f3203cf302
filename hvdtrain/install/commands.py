"""Commands of an installation: one line each, their output in a log.

Where a command fails, the error has the lines of the log that name the cause: the first
errors of a compiler, linker or CMake, if there are any. What make and pip print after
them only repeats that a command failed.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from hvdtrain import processes

_COMPILER = re.compile(
    r": (fatal )?error: |\bld: .*(cannot|not recognized|undefined)|^ *nvcc fatal"
)
_CMAKE = re.compile(r"^ *CMake Error")
_OTHER = re.compile(r"(error|fatal|killed|no space left)\b", re.IGNORECASE)
# pip repeats a connection; the last failure says why.
_RETRY = re.compile(r"Retrying \(Retry\(total=[1-9]")
_BUILD_DIRECTORY = re.compile(r"\S*/build-horovod\.[^/]*/")
_MAX_WIDTH = 300
_TERMINATION_SECONDS, _POLL_SECONDS = 10.0, 0.02

# Sessions of the commands that run.
_running: set[int] = set()
_is_aborted = threading.Event()


class InstallError(Exception):
    """What a user can correct: received, expected, what to do."""


class Steps:
    """Runs the commands of an installation, and prints one line for each step."""

    def __init__(self, log: pathlib.Path) -> None:
        """Start an empty log."""
        self._log = log
        log.write_text("")

    def report(self, text: str) -> None:
        """Print a line, also in the log."""
        with self._log.open("a") as log:
            log.write(f"{text}\n")
        print(text, flush=True)

    def run(
        self,
        text: str,
        command: Sequence[str | os.PathLike[str]],
        *,
        environment: Mapping[str, str] | None = None,
        directory: pathlib.Path | None = None,
        timeout_seconds: float = 3600,
    ) -> None:
        """Run a command, whose output goes to the log; print its time.

        Args:
            text: the name of the step, such as "building Horovod".
            environment: of the command, in place of this process's.
            directory: the working directory.

        Raises:
            InstallError: with the cause, if the command fails.
        """
        start = time.monotonic()
        with self._log.open("a") as log:
            log.write(f"== {text}: {' '.join(map(str, command))}\n")
        first = self._log.stat().st_size
        with _Ticker(f"{text} ... "):
            code = self._call(command, environment, directory, timeout_seconds)
        seconds = time.monotonic() - start
        if code != 0:
            print("failed", flush=True)
            raise InstallError(self._failure(text, code, first))
        print(f"{seconds:.0f} s", flush=True)

    def _call(
        self,
        command: Sequence[str | os.PathLike[str]],
        environment: Mapping[str, str] | None,
        directory: pathlib.Path | None,
        timeout_seconds: float,
    ) -> int | str:
        """Return the exit code, or the reason why there is none."""
        with self._log.open("ab") as log:
            try:
                # A session of its own: all its processes are killed together.
                done = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                log.write(f"error: {error}\n".encode())
                return "not started"
            _running.add(done.pid)
            if _is_aborted.is_set():  # after the start, and before the line above
                _kill(done.pid)
            try:
                return done.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                _kill(done.pid)
                done.wait()
                return f"timed out after {timeout_seconds:.0f} s"
            finally:
                _running.discard(done.pid)

    def _failure(self, text: str, code: int | str, first: int) -> str:
        output = self._log.read_bytes()[first:].decode(errors="replace")
        reason = f"exit code {code}" if isinstance(code, int) else code
        return "\n".join(
            [
                f"{text} failed ({reason}); the whole output is in {self._log}:",
                *first_errors(output),
            ]
        )


def abort() -> None:
    """End the commands that run, with all their processes, and those that start.

    By SIGTERM first: horovodrun ends its ranks, some of which have sessions of their
    own, and removes their files.
    """
    _is_aborted.set()
    sessions = tuple(_running)
    for session in sessions:
        with contextlib.suppress(ProcessLookupError):
            os.kill(session, signal.SIGTERM)
    deadline = time.monotonic() + _TERMINATION_SECONDS
    while _running.intersection(sessions) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for session in sessions:
        _kill(session)


def _kill(session: int) -> None:
    """Kill all processes of a session.

    Not a process group: mpirun gives each rank one of its own.
    """
    killed: set[int] = set()
    # Until there is no other one: a process may start another before it is killed.
    while found := _processes(session) - killed:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def _processes(session: int) -> set[int]:
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        # A process may end meanwhile.
        with contextlib.suppress(OSError):
            if processes.read_stat(int(path.name)).session == session:
                found.add(int(path.name))
    return found


class _Ticker:
    """Shows the seconds of a step on a terminal, from a thread."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> None:
        print(self._text, end="", flush=True)
        if sys.stdout.isatty():
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
            print(f"\r{self._text}", end="", flush=True)

    def _tick(self) -> None:
        start = time.monotonic()
        while not self._ended.wait(1):
            seconds = time.monotonic() - start
            print(f"\r{self._text}{seconds:.0f} s", end="", flush=True)


def first_errors(output: str) -> list[str]:
    """Return the lines with the cause of a failure, five to eight of them at most.

    Args:
        output: of pip, CMake and compilers.
    """
    lines = [
        line.replace("\0", "")
        for line in output.splitlines()
        if not _RETRY.search(line)
    ]
    found = [line for line in lines if _COMPILER.search(line)][:5]
    if not found:
        found = _with_following(lines, _CMAKE, count=4)
    if not found:
        found = [line for line in lines if _OTHER.search(line)][-8:]
    return [
        _BUILD_DIRECTORY.sub("", line.strip())[:_MAX_WIDTH]
        for line in found or lines[-8:]
    ]


def _with_following(
    lines: list[str], pattern: re.Pattern[str], *, count: int
) -> list[str]:
    for index, line in enumerate(lines):
        if pattern.search(line):
            return [line for line in lines[index : index + 1 + count] if line.strip()]
    return []
