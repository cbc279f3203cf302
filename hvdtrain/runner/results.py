"""The ranks of a job that runs: their output, their results, and the first failure."""

import contextlib
import dataclasses
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import cloudpickle
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.gloo_run import create_slot_env_vars

from hvdtrain.flight import deaths
from hvdtrain.job import launchers
from hvdtrain.job.platforms import PlatformTask
from hvdtrain.runner import channel
from hvdtrain.runner.channel import Outcome
from hvdtrain.runner.engine import RunError

# After a collective has failed: the rank that is the cause may end later.
_CAUSE_SECONDS = 30.0
_POLL_SECONDS = 0.5
_STREAMS = {1: "stdout", 2: "stderr"}


class RankError(RunError):
    """The function has raised an exception on a rank; it is `__cause__` if possible.

    Attributes:
        rank: the first one that failed by itself.
        traceback: of the exception on its rank, which has printed it.
    """

    def __init__(self, message: str, rank: int, traceback: str = "") -> None:
        # All are arguments of the exception, so that it can be pickled.
        super().__init__(message, rank, traceback)
        self.rank = rank
        self.traceback = traceback

    def __str__(self) -> str:
        return str(self.args[0])


class LostRankError(RankError):
    """The process of a rank, or its agent, has ended or is late, without a result.

    Attributes:
        exit_code: of the process, 128 + n if signal n has killed it.
    """

    exit_code = 1


@dataclasses.dataclass(frozen=True)
class Work:
    """What the ranks do.

    Attributes:
        payload: pickled function and arguments, for ranks that return a result.
        command: a program and its arguments, in place of a function.
        task: this host in a job of a platform, whose ranks find each other by
            themselves; None for a job of its own.
        stop_signal: returns the signal that asks for the end of the ranks; 0 for none.
        stop_seconds: how long they have for it.
    """

    payload: bytes = b""
    command: tuple[str, ...] = ()
    task: PlatformTask | None = None
    stop_signal: Callable[[], int] = int
    stop_seconds: float = 0.0


@dataclasses.dataclass(eq=False)
class Agent:
    """An agent that has connected.

    Attributes:
        slots: of the ranks that it starts.
        ranks: their numbers, once they are started.
    """

    connection: Connection
    hello: channel.Hello
    slots: list[SlotInfo] = dataclasses.field(default_factory=list)
    ranks: tuple[int, ...] = ()

    def fileno(self) -> int:
        """Return the descriptor of the connection, for `wait_for_agents`."""
        return self.connection.fileno()

    def environments(self, address: str, port: int) -> dict[int, dict[str, str]]:
        """Return horovodrun's variables by rank, for a rendezvous of the caller."""
        interface = self.hello.interfaces[address]
        return {
            slot.rank: create_slot_env_vars(slot)
            | launchers.gloo_variables(address=address, port=port, interface=interface)
            for slot in self.slots
        }

    def start(self, work: Work, environments: Mapping[int, dict[str, str]]) -> None:
        """Let it start a rank with each of the environments."""
        self.ranks = tuple(environments)
        self.send(channel.StartRanks(work.payload, work.command, environments))

    def send(self, message: object) -> None:
        """Send a message of `channel`, if the agent has not ended."""
        # An agent that has ended since is seen by `RunningJob`.
        with contextlib.suppress(OSError):
            self.connection.send(message)


def wait_for_agents(agents: Iterable[Agent], seconds: float) -> list[Agent]:
    """Return the agents of which a message or the end can be read."""
    return cast(list[Agent], wait(cast(Any, list(agents)), seconds))


def print_output(message: object) -> None:
    """Print the lines of an `Output` with the rank in front; ignore other messages."""
    if isinstance(message, channel.Output):
        tag = f"[{message.rank}]<{_STREAMS[message.stream]}>:"
        file = sys.stdout if message.stream == 1 else sys.stderr
        lines = message.text.removesuffix("\n").split("\n")
        text = "".join(f"{tag}{line}\n" for line in lines)
        # A notebook's stream has no encoding; a terminal's may lack characters.
        encoding = getattr(file, "encoding", None) or "utf-8"
        file.write(text.encode(encoding, "replace").decode(encoding))
        file.flush()


class RunningJob:
    """Ranks that run."""

    def __init__(self, agents: Sequence[Agent], work: Work) -> None:
        self._agents, self._work = agents, work
        self._running = {rank: agent for agent in agents for rank in agent.ranks}
        self._results: dict[int, Any] = dict.fromkeys(sorted(self._running))
        self._errors: list[_Error] = []
        # Hosts by rank.
        self._returned: dict[int, str] = {}
        self._last_errors: dict[int, str] = {}

    def results(self) -> list[Any]:
        """Return the results by rank, or raise the error that is the cause."""
        deadline = float("inf")
        is_stopping = False
        while self._running and time.monotonic() < deadline:
            for agent in wait_for_agents(set(self._running.values()), _POLL_SECONDS):
                self._receive(agent)
            if is_stopping:
                # The ranks end one after the other.
                continue
            if number := self._work.stop_signal():
                is_stopping = True
                deadline = time.monotonic() + self._work.stop_seconds
                for agent in self._agents:
                    agent.send(channel.AskRanks(number))
                continue
            if any(not error.outcome.is_consequence for error in self._errors):
                break
            if self._late():
                break
            if self._errors and deadline == float("inf"):
                deadline = time.monotonic() + _CAUSE_SECONDS
        if is_stopping:
            for rank, agent in self._running.items():
                cause = f"did not end within {self._work.stop_seconds:g} s of a signal"
                self._lose(rank, agent, cause, -signal.SIGKILL)
        if self._errors:
            raise self._cause()
        return list(self._results.values())

    def _late(self) -> dict[int, str]:
        """Return the ranks that run and did not call a collective that has failed."""
        late = {rank for error in self._errors for rank in error.outcome.late_ranks}
        return {r: a.hello.host for r, a in self._running.items() if r in late}

    def _cause(self) -> RankError:
        # The first one in time that is not the consequence of another.
        first = min(self._errors, key=lambda error: error.outcome.is_consequence)
        if not first.outcome.is_consequence:
            return first.exception()
        if late := self._late():
            reason = "did not call a collective that other ranks waited in"
        elif late := self._returned:
            reason = "has returned, and other ranks waited for it in a collective"
        elif late := {r: a.hello.host for r, a in self._running.items()}:
            reason = f"ran on {_CAUSE_SECONDS:g} s after a collective had failed"
        else:
            return first.exception()
        return first.caused_by(late, reason)

    def _receive(self, agent: Agent) -> None:
        try:
            message = agent.connection.recv()
        except (EOFError, OSError):
            self._lose_all(agent, "was lost: its agent has ended")
            return
        print_output(message)
        if isinstance(message, channel.Output) and message.stream == 2:
            for line in filter(str.strip, message.text.splitlines()):
                self._last_errors[message.rank] = line
        if isinstance(message, channel.Failed):
            self._lose_all(agent, f"cannot be started: {message.reason}")
        if isinstance(message, channel.Ended):
            del self._running[message.rank]
            self._finish(message, agent)

    def _lose_all(self, agent: Agent, cause: str) -> None:
        for rank in [r for r, other in self._running.items() if other is agent]:
            del self._running[rank]
            self._lose(rank, agent, cause)

    def _finish(self, ended: channel.Ended, agent: Agent) -> None:
        if self._work.command:
            if code := ended.exit_code:
                last = self._last_errors.get(ended.rank, "") if code > 0 else ""
                text = f"{_end_text(code)}: {last}" if last else _end_text(code)
                self._lose(ended.rank, agent, text, code)
            return
        try:
            outcome = pickle.loads(ended.outcome)
        except (EOFError, pickle.UnpicklingError):
            if not ended.reason:
                self._lose(ended.rank, agent, _end_text(ended.exit_code))
                return
            # The program would wait again after a restart.
            outcome = Outcome(summary=f"ended by its guard. {ended.reason}")
        if not outcome.summary:
            try:
                self._results[ended.rank] = cloudpickle.loads(outcome.value)
                self._returned[ended.rank] = agent.hello.host
                return
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                text = f"returned a value that the caller cannot unpickle: {reason}"
                outcome = Outcome(summary=text)
        self._errors.append(_Error(ended.rank, agent.hello.host, outcome))

    def _lose(self, rank: int, agent: Agent, cause: str, exit_code: int = 1) -> None:
        outcome = Outcome(summary=cause)
        self._errors.append(_Error(rank, agent.hello.host, outcome, exit_code))


def _end_text(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {deaths.signal_name(-exit_code)}"
    return f"has ended with exit code {exit_code}"


@dataclasses.dataclass(frozen=True)
class _Error:
    rank: int
    host: str
    outcome: Outcome
    # Of a rank that was lost.
    exit_code: int = 0

    def exception(self) -> RankError:
        name = f"rank {self.rank} on {self.host}"
        if self.exit_code:
            lost = LostRankError(f"{name} {self.outcome.summary}", rank=self.rank)
            # As a shell: the signal of a process that was killed is a negative number.
            is_killed = self.exit_code < 0
            lost.exit_code = 128 - self.exit_code if is_killed else self.exit_code
            return lost
        text = f"{name}: {self.outcome.summary}"
        error = RankError(text, self.rank, self.outcome.traceback)
        if self.outcome.value:
            # Only now, and if the caller has it: this imports the module of its type.
            with contextlib.suppress(Exception):
                error.__cause__ = cloudpickle.loads(self.outcome.value)
        return error

    def caused_by(self, hosts_by_rank: dict[int, str], reason: str) -> RankError:
        """Return an error of the ranks that are the cause, which is the last line."""
        names = [f"rank {rank} on {host}" for rank, host in hosts_by_rank.items()]
        cause = f"{' and '.join(names)} {reason}."
        texts = (str(self.exception()), cause, self.outcome.conclusion)
        text = "\n\n".join(filter(None, texts))
        return RankError(text, next(iter(hosts_by_rank)))
