"""The caller's side of a job: assigns ranks to agents, and collects their results."""

import contextlib
import dataclasses
import itertools
import pickle
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import cloudpickle
from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from hvdtrain.flight import deaths
from hvdtrain.job import launchers
from hvdtrain.runner import channel
from hvdtrain.runner.agent import job_secret
from hvdtrain.runner.channel import Outcome
from hvdtrain.runner.engine import Engine, PlacedAgents, RunError

# After a collective has failed: the rank that is the cause may end later.
_CAUSE_SECONDS = 30.0
# More than an agent takes to end its ranks.
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.5
_STREAMS = {1: "stdout", 2: "stderr"}


class RankError(RunError):
    """The function has raised an exception on a rank; it is `__cause__` if possible.

    Attributes:
        rank: the first one that failed by itself.
    """

    def __init__(self, message: str, rank: int) -> None:
        # Both are arguments of the exception, so that it can be pickled.
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class LostRankError(RankError):
    """The process of a rank, or its agent, has ended or is late, without a result."""


def run_once(
    engine: Engine, payload: bytes, size: int, *, start_timeout_seconds: float
) -> list[Any]:
    """Start a job and return the results by rank."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(
            contextlib.closing(channel.Listener(is_local=engine.is_local))
        )
        agents: list[_Agent] = []
        placement = stack.enter_context(engine.place(listener.address, size))
        stack.callback(_stop, agents)
        for agent in _accept(listener, placement, engine, start_timeout_seconds):
            agents.append(agent)
        plan = _assign(agents, placement.size)
        address = _common_address(agents, listener.address.hosts)
        secret = job_secret(listener.address)
        store = stack.enter_context(_rendezvous(plan, secret, is_local=engine.is_local))
        for agent in agents:
            agent.start(payload, address, store.server_port)
        try:
            return _Job(agents, placement.size).results()
        except RankError:
            _check_late(store)
            raise


@dataclasses.dataclass(eq=False)
class _Agent:
    connection: Connection
    hello: channel.Hello
    slots: list[SlotInfo] = dataclasses.field(default_factory=list)

    def fileno(self) -> int:
        return self.connection.fileno()

    def start(self, payload: bytes, address: str, port: int) -> None:
        interface = self.hello.interfaces[address]
        environments = tuple(
            create_slot_env_vars(slot)
            | {
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                "HOROVOD_GLOO_IFACE": interface,
                "NCCL_SOCKET_IFNAME": interface,
            }
            for slot in self.slots
        )
        # An agent that has ended since is seen by `_Job`.
        with contextlib.suppress(OSError):
            self.connection.send(channel.StartRanks(payload, environments))


def _accept(
    listener: channel.Listener,
    placement: PlacedAgents,
    engine: Engine,
    timeout_seconds: float,
) -> Iterator[_Agent]:
    """Yield agents until their slots are as many as the ranks."""
    deadline = time.monotonic() + timeout_seconds
    size = missing = placement.size
    while missing > 0:
        if accepted := listener.accept(timeout_seconds=_POLL_SECONDS):
            agent = _Agent(*accepted)
            missing -= agent.hello.slots
            yield agent
            continue
        reason = placement.failure()
        if not reason and time.monotonic() > deadline:
            late = f"no more have connected within {timeout_seconds:g} s"
            reason = f"{late}. {placement.advice()}".strip()
        if reason:
            raise RunError(
                f"Received {size - missing} of {size} ranks from {engine}: "
                f"{reason.rstrip('.')}."
            )


def _assign(agents: Sequence[_Agent], size: int) -> list[SlotInfo]:
    """Assign the ranks to the agents, and return Horovod's plan of hosts."""
    # Ranks of one host are consecutive; sorted, so that a host has the same ranks in
    # the next run.
    ordered = sorted(agents, key=lambda agent: agent.hello.host_hash)
    groups = itertools.groupby(ordered, key=lambda agent: agent.hello.host_hash)
    hosts = [
        HostInfo(name, sum(agent.hello.slots for agent in group))
        for name, group in groups
    ]
    plan = get_host_assignments(hosts, size, size)
    remaining = iter(plan)
    for agent in ordered:
        agent.slots = list(itertools.islice(remaining, agent.hello.slots))
    return plan


def _common_address(agents: Sequence[_Agent], hosts: Sequence[str]) -> str:
    """Return the first address of the caller that all agents reach.

    The interfaces to it are in one network, in which the ranks reach each other.
    """
    for host in hosts:
        if all(host in agent.hello.interfaces for agent in agents):
            return host
    reached = "; ".join(
        f"{agent.hello.host}: {', '.join(agent.hello.interfaces)}" for agent in agents
    )
    raise RunError(
        f"Received hosts that reach the caller at different addresses ({reached}); "
        "expected one network that connects all of them."
    )


@contextlib.contextmanager
def _rendezvous(
    plan: list[SlotInfo], secret: str, *, is_local: bool
) -> Iterator[RendezvousHTTPServer]:
    """Serve Horovod's rendezvous to ranks with the secret."""
    host = channel.LOOPBACK if is_local else ""
    server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
    server.secret = secret.encode()
    server.init(plan)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _check_late(store: RendezvousHTTPServer) -> None:
    """Raise the error of a rank that the others have waited for in `hvd.init`."""
    for rank, text in store.cache.get(launchers.LATE_RANKS, {}).items():
        raise LostRankError(text.decode(), rank=int(rank))


def _stop(agents: Sequence[_Agent]) -> None:
    """Let the agents end their ranks, and wait until they have."""
    remaining = list(agents)
    for agent in remaining:
        with contextlib.suppress(OSError):
            agent.connection.send(None)
    deadline = time.monotonic() + _STOP_SECONDS
    while remaining and (seconds := deadline - time.monotonic()) > 0:
        for agent in _ready(remaining, seconds):
            try:
                _print(agent.connection.recv())
            except (EOFError, OSError):
                remaining.remove(agent)
    for agent in agents:
        agent.connection.close()


def _ready(agents: Iterable[_Agent], seconds: float) -> list[_Agent]:
    """Return the agents of which a message or the end can be read."""
    return cast(list[_Agent], wait(cast(Any, list(agents)), seconds))


def _print(message: object) -> None:
    if isinstance(message, channel.Output):
        tag = f"[{message.rank}]<{_STREAMS[message.stream]}>:"
        file = sys.stdout if message.stream == 1 else sys.stderr
        lines = message.text.removesuffix("\n").split("\n")
        text = "".join(f"{tag}{line}\n" for line in lines)
        # A notebook's stream has no encoding; a terminal's may lack characters.
        encoding = getattr(file, "encoding", None) or "utf-8"
        file.write(text.encode(encoding, "replace").decode(encoding))
        file.flush()


class _Job:
    """Ranks that run."""

    def __init__(self, agents: Sequence[_Agent], size: int) -> None:
        self._running = {slot.rank: agent for agent in agents for slot in agent.slots}
        self._results: list[Any] = [None] * size
        self._errors: list[_Error] = []
        # Hosts by rank.
        self._returned: dict[int, str] = {}

    def results(self) -> list[Any]:
        """Return the results by rank, or raise the error that is the cause."""
        deadline = float("inf")
        while self._running and time.monotonic() < deadline:
            for agent in _ready(set(self._running.values()), _POLL_SECONDS):
                self._receive(agent)
            if any(not error.outcome.is_consequence for error in self._errors):
                break
            if self._late():
                break
            if self._errors and deadline == float("inf"):
                deadline = time.monotonic() + _CAUSE_SECONDS
        if self._errors:
            raise self._cause()
        return self._results

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

    def _receive(self, agent: _Agent) -> None:
        try:
            message = agent.connection.recv()
        except (EOFError, OSError):
            self._lose_all(agent, "was lost: its agent has ended")
            return
        _print(message)
        if isinstance(message, channel.Failed):
            self._lose_all(agent, f"cannot be started: {message.reason}")
        if isinstance(message, channel.Ended):
            del self._running[message.rank]
            self._finish(message, agent)

    def _lose_all(self, agent: _Agent, cause: str) -> None:
        for rank in [r for r, other in self._running.items() if other is agent]:
            del self._running[rank]
            self._lose(rank, agent, cause)

    def _finish(self, ended: channel.Ended, agent: _Agent) -> None:
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

    def _lose(self, rank: int, agent: _Agent, cause: str) -> None:
        outcome = Outcome(summary=cause)
        self._errors.append(_Error(rank, agent.hello.host, outcome, is_lost=True))


def _end_text(exit_code: int) -> str:
    if exit_code < 0:
        return f"was killed by {deaths.signal_name(-exit_code)}"
    return f"has ended with exit code {exit_code}"


@dataclasses.dataclass(frozen=True)
class _Error:
    rank: int
    host: str
    outcome: Outcome
    is_lost: bool = False

    def exception(self) -> RankError:
        name = f"rank {self.rank} on {self.host}"
        if self.is_lost:
            return LostRankError(f"{name} {self.outcome.summary}", rank=self.rank)
        text = f"{name}: {self.outcome.summary}\n\n{self.outcome.traceback}".rstrip()
        error = RankError(text, rank=self.rank)
        if self.outcome.value:
            # Only now, and if the caller has it: this imports the module of its type.
            with contextlib.suppress(Exception):
                error.__cause__ = cloudpickle.loads(self.outcome.value)
        return error

    def caused_by(self, hosts_by_rank: dict[int, str], reason: str) -> RankError:
        """Return an error of the ranks that are the cause, above this one."""
        names = [f"rank {rank} on {host}" for rank, host in hosts_by_rank.items()]
        texts = (self.outcome.conclusion, str(self.exception()))
        text = "\n\n".join([f"{' and '.join(names)} {reason}.", *filter(None, texts)])
        return RankError(text, rank=next(iter(hosts_by_rank)))
