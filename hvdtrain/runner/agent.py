"""An agent: the process that an engine places, which starts and ends ranks.

The ranks are processes of their own. They can be killed while they are blocked in
native code, and leave nothing in the engine's process, which may be used again.
"""

import contextlib
import dataclasses
import hmac
import os
import pathlib
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import IO

import psutil

from hvdtrain import output
from hvdtrain.environment import JOB_SECRET
from hvdtrain.flight import descendants
from hvdtrain.interruption import SIGNAL_FILE
from hvdtrain.job import launchers
from hvdtrain.job.formation import host_identity
from hvdtrain.runner import channel

_CONNECT_SECONDS = 60.0
_POLL_SECONDS = 0.1
_READ_BYTES = 1 << 16
# As horovodrun: from SIGTERM to SIGKILL.
_GRACE_SECONDS = 5.0
# Time for the guard of a killed process to print why.
_LAST_LINES_SECONDS = 5.0
# Time for a process to end after its function has returned.
_EXIT_SECONDS = 60.0
_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_REMOVED = (
    f"hvdtrain.run: {_LEGACY_KERAS} is removed from the environment of the ranks: they "
    "train with Keras 3.\n"
)


def serve(address: channel.Address, slots: int = 1, *, caller: int = 0) -> None:
    """Start the ranks that the caller assigns; return when the job has ended.

    Args:
        slots: number of ranks that this agent can start.
        caller: PID of the caller, if it is the parent of this process.

    Raises:
        OSError: the caller has ended, or is not reached within a minute.
    """
    hello = channel.Hello(host_identity(), socket.gethostname(), slots)
    with channel.connect(
        *(address, hello), timeout_seconds=_CONNECT_SECONDS, caller=caller
    ) as connection:
        start = _receive(connection)
        if not isinstance(start, channel.StartRanks):
            return
        derived = job_secret(address)
        # Ranks of other hosts have the secret of the platform, if any, and no other.
        given = os.environ.get(JOB_SECRET, "")
        with_secret = {
            rank: each | {JOB_SECRET: given if "HVDTRAIN_SIZE" in each else derived}
            for rank, each in start.environments.items()
        }
        is_over = False
        try:
            started = dataclasses.replace(start, environments=with_secret)
            is_over = _run_ranks(connection, started)
        except OSError as error:
            _send(connection, channel.Failed(str(error)))
        if not is_over:
            # Block until the caller ends the job or closes the connection.
            _receive(connection)


def job_secret(address: channel.Address) -> str:
    """Return the secret of the ranks, which is derived from the key and never sent."""
    return hmac.digest(address.key, b"secret of the ranks", "sha256").hex()


def _run_ranks(connection: Connection, start: channel.StartRanks) -> bool:
    """Start ranks and wait for them; return whether the caller has ended the job."""
    deadline = float("inf")
    with contextlib.ExitStack() as stack:
        stack.callback(descendants.end, lambda: _programs(start))
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(connection, selectors.EVENT_READ)
        signal_file = _memory_file(b"")
        stack.callback(os.close, signal_file)
        path = f"/proc/{os.getpid()}/fd/{signal_file}"
        running = []
        for number, environment in start.environments.items():
            environment[SIGNAL_FILE] = path
            rank = stack.enter_context(contextlib.closing(_Rank(start, number)))
            running.append(rank)
            for stream in rank.streams:
                selector.register(stream.file, selectors.EVENT_READ, (rank, stream))
        is_removed = start.payload and os.environ.get(_LEGACY_KERAS, "0") != "0"
        if running and is_removed:
            _send(connection, channel.Output(running[0].rank, 2, _REMOVED))
        while running and time.monotonic() < deadline:
            for key, _ in selector.select(_POLL_SECONDS):
                if key.data:
                    _forward(connection, selector, *key.data)
                    continue
                if isinstance(request := _receive(connection), channel.AskRanks):
                    os.write(signal_file, signal.Signals(request.number).name.encode())
                    for rank in running:
                        rank.ask(signal.SIGTERM)
                    continue
                # The caller has ended, or ends the job.
                selector.unregister(connection)
                deadline = time.monotonic() + _GRACE_SECONDS
                for rank in running:
                    rank.signal(signal.SIGTERM)
            for rank in [rank for rank in running if rank.is_over()]:
                running.remove(rank)
                for stream in rank.streams:
                    if text := stream.read_rest():
                        _send(connection, rank.output(stream, text))
                _send(connection, rank.ended())
    return deadline < float("inf")


def _programs(start: channel.StartRanks) -> Iterator[int]:
    """Yield what the ranks have started outside of their groups, and their guards."""
    # A job that a rank has submitted has inherited the variables of the rank as well.
    # Its parent is a process of the batch system, and none of these.
    parents = {1, os.getpid(), *(each.pid for each in psutil.Process().parents())}
    for environment in start.environments.values():
        for pid in descendants.find(descendants.identity(environment)):
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).ppid() in parents:
                    yield pid


def _forward(
    connection: Connection,
    selector: selectors.BaseSelector,
    rank: "_Rank",
    stream: "_Stream",
) -> None:
    text = stream.read()
    if not stream.is_open:
        selector.unregister(stream.file)
    if text:
        _send(connection, rank.output(stream, text))


def _send(connection: Connection, message: object) -> None:
    # Ignore a closed connection: the ranks still get the time until SIGKILL.
    with contextlib.suppress(OSError):
        connection.send(message)


def _receive(
    connection: Connection,
) -> channel.StartRanks | channel.AskRanks | None:
    """Return a message of the caller; None if it ends the job or has ended."""
    with contextlib.suppress(EOFError, OSError):
        return connection.recv()
    return None


@dataclasses.dataclass
class _Stream:
    """The read end of a pipe, whose text is forwarded in complete lines."""

    number: int
    file: IO[bytes]
    has_noise: bool
    rest: bytes = b""
    is_open: bool = True

    def read(self) -> str:
        """Return the lines that are complete."""
        data = os.read(self.file.fileno(), _READ_BYTES)
        self.is_open = bool(data)
        data = self.rest + data
        end = data.rfind(b"\n") + 1
        # A line of a progress bar has no end, and may be long.
        if not self.is_open or len(data) > 2 * _READ_BYTES:
            end = len(data)
        self.rest = data[end:]
        lines = output.drop_noise(data[:end]) if self.has_noise else data[:end]
        return lines.decode(errors="replace")

    def read_rest(self) -> str:
        """Return what has been written, without waiting for the pipe's end."""
        os.set_blocking(self.file.fileno(), False)
        texts = []
        with contextlib.suppress(BlockingIOError):
            while self.is_open:
                texts.append(self.read())
        rest, self.rest = self.rest, b""
        return "".join([*texts, rest.decode(errors="replace")])

    def append(self, line: str) -> None:
        """Add a line to what has been read."""
        end = b"\n" if self.rest else b""
        self.rest += end + f"{line}\n".encode()


class _Rank:
    """A process that calls the function, or is the program."""

    def __init__(self, start: channel.StartRanks, rank: int) -> None:
        self.rank = rank
        self._payload = _memory_file(start.payload)
        self._outcome = _memory_file(b"")
        self._reason = _memory_file(b"")
        self._returned = self._ended = 0.0
        files = (self._payload, self._outcome, self._reason)
        # A function may import TensorFlow before hvdtrain.keras, which sets it as well.
        level = os.environ.get(output.LOG_LEVEL, "1")
        given = os.environ.get("PYTHONPATH", "")
        own = map(str, (os.getpid(), *files))
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "hvdtrain.runner.rank"),
                *own,
                given,
                *start.command,
            ],
            env=_base_environment(is_function=not start.command)
            | {output.LOG_LEVEL: level}
            | start.environments[rank],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=files,
            # Ctrl-C of the caller's terminal reaches the caller, which ends the ranks.
            start_new_session=True,
        )
        assert self.process.stdout
        assert self.process.stderr
        self.streams = (
            _Stream(1, self.process.stdout, has_noise=False),
            _Stream(2, self.process.stderr, has_noise=level != "0"),
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the rank."""
        # The number of the group is the PID, which is free once the process is reaped.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def ask(self, number: int) -> None:
        """Send a signal to the process alone: its helpers may have to write for it."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def is_over(self) -> bool:
        """Return whether the process has ended and has written its last lines."""
        if self.process.returncode is None and not self._reap(os.WNOHANG):
            self._limit_exit()
            return False
        # The guard prints by what the process was killed.
        is_quiet = not any(stream.is_open for stream in self.streams)
        is_late = time.monotonic() - self._ended >= _LAST_LINES_SECONDS
        return self.process.returncode >= 0 or is_quiet or is_late

    def _limit_exit(self) -> None:
        """Kill a process that does not end although its function has: a thread runs."""
        if not os.fstat(self._outcome).st_size:
            return
        self._returned = self._returned or time.monotonic()
        if time.monotonic() - self._returned >= _EXIT_SECONDS:
            # Only once.
            self._returned = float("inf")
            self.streams[1].append(
                f"hvdtrain.run: the process is killed {_EXIT_SECONDS:g} s after its "
                "function has returned: a thread that is not a daemon still runs."
            )
            self.signal(signal.SIGKILL)

    def _reap(self, options: int = 0) -> bool:
        """Reap the process if it has ended, and kill the rest of its group."""
        options |= os.WEXITED | os.WNOWAIT
        if not os.waitid(os.P_PID, self.process.pid, options):
            return False
        # Before the PID is free, which is also the number of the group.
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._ended = time.monotonic()
        return True

    def output(self, stream: _Stream, text: str) -> channel.Output:
        """Return the message with what was read."""
        return channel.Output(self.rank, stream.number, text)

    def ended(self) -> channel.Ended:
        """Return the exit code and the outcome of a process that has ended."""
        outcome, reason = map(_content, (self._outcome, self._reason))
        return channel.Ended(
            *(self.rank, self.process.returncode, outcome),
            reason=reason.decode(errors="replace"),
        )

    def close(self) -> None:
        """Kill the process if it runs, and close the files."""
        if self.process.returncode is None:
            self.signal(signal.SIGKILL)
            self._reap()
        for stream in self.streams:
            stream.file.close()
        for file in (self._payload, self._outcome, self._reason):
            os.close(file)


def _memory_file(data: bytes) -> int:
    file = os.memfd_create("hvdtrain-run", os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as opened:
        opened.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _content(file: int) -> bytes:
    with open(file, "rb", closefd=False) as opened:
        opened.seek(0)
        return opened.read()


def search_path() -> str:
    """Return a PYTHONPATH with which modules are found as in this process."""
    return os.pathsep.join(str(path) or os.getcwd() for path in sys.path)


def _base_environment(*, is_function: bool) -> dict[str, str]:
    """Return this process' environment without another job's.

    A function trains with Keras 3, in a job of its own. A program has all that the
    platform has set.
    """
    environment = launchers.without_launch(os.environ)
    for name in (_LEGACY_KERAS, "HOROVOD_ELASTIC", "TF_CONFIG") if is_function else ():
        environment.pop(name, None)
    return environment | {"PYTHONPATH": search_path(), "PYTHONUNBUFFERED": "1"}


def main() -> None:
    """Read address, slots, PYTHONPATH and the caller's PID from stdin, and serve."""
    # The ranks share the cores of this process. Without the name, `job.cores` takes the
    # launcher of the caller for theirs, and each rank uses all cores of the caller.
    pathlib.Path("/proc/self/comm").write_text(launchers.AGENT)
    with os.fdopen(0, "rb", closefd=False) as stdin:
        address, slots, python_path, caller = pickle.load(stdin)
    # For programs that the ranks start: until now it is the caller's `sys.path`.
    os.environ["PYTHONPATH"] = python_path
    try:
        serve(address, slots, caller=caller)
    except OSError:
        # A caller that has ended reads no error.
        if os.getppid() == caller:
            raise


if __name__ == "__main__":
    main()
