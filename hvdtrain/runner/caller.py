"""The caller's side of a job: assigns ranks to agents, and collects their results."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from horovod.runner.common.util.hosts import HostInfo, SlotInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from hvdtrain import addresses
from hvdtrain.job import launchers
from hvdtrain.job.platforms import PlatformTask
from hvdtrain.runner import channel
from hvdtrain.runner.agent import job_secret
from hvdtrain.runner.engine import Engine, PlacedAgents, RunError
from hvdtrain.runner.results import (
    Agent,
    LostRankError,
    RankError,
    RunningJob,
    Work,
    print_output,
    wait_for_agents,
)

# More than an agent takes to end its ranks.
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.5


def run_once(
    engine: Engine, work: Work, size: int, *, start_timeout_seconds: float
) -> list[Any]:
    """Start a job and return the results by rank."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(
            contextlib.closing(_listen(is_local=engine.is_local))
        )
        agents: list[Agent] = []
        placement = stack.enter_context(engine.place(listener.address, size))
        stack.callback(_stop, agents)
        for agent in _accept(listener, placement, engine, start_timeout_seconds):
            agents.append(agent)
        plan = _assign(agents, placement.size)
        if work.task:
            for agent in agents:
                agent.start(work, _environments_of_task(agent.slots, work.task))
            return RunningJob(agents, work).results()
        address = _common_address(agents, listener.address.hosts)
        secret = job_secret(listener.address)
        store = stack.enter_context(_rendezvous(plan, secret, is_local=engine.is_local))
        for agent in agents:
            agent.start(work, agent.environments(address, store.server_port))
        try:
            return RunningJob(agents, work).results()
        except RankError:
            _check_late(store)
            raise


def _listen(*, is_local: bool) -> channel.Listener:
    try:
        return channel.Listener(is_local=is_local)
    except OSError as error:
        raise RunError(
            f"{socket.gethostname()} has no IPv4 loopback address, by which the ranks "
            f"of a host reach each other ({error.strerror}): its interfaces are "
            f"{addresses.listed()}. Add it: ip link set lo up; ip address add "
            f"{channel.LOOPBACK}/8 dev lo."
        ) from None


def _environments_of_task(
    slots: Sequence[SlotInfo], host: PlatformTask
) -> dict[int, dict[str, str]]:
    """Return the variables of `job.platforms` for ranks of a host of a platform."""
    per_host = "1 rank" if len(slots) == 1 else f"{len(slots)} ranks"
    return {
        host.rank * slot.size + slot.rank: {
            "HVDTRAIN_RANK": str(host.rank * slot.size + slot.rank),
            "HVDTRAIN_SIZE": str(host.size * slot.size),
            "HVDTRAIN_ADDRESS": host.address,
            "HVDTRAIN_JOB": host.job,
            "HVDTRAIN_DECLARED": f"{host.declaration} with {per_host} each",
        }
        for slot in slots
    }


def _accept(
    listener: channel.Listener,
    placement: PlacedAgents,
    engine: Engine,
    timeout_seconds: float,
) -> Iterator[Agent]:
    """Yield agents until their slots are as many as the ranks."""
    deadline = time.monotonic() + timeout_seconds
    size = missing = placement.size
    while missing > 0:
        if accepted := listener.accept(timeout_seconds=_POLL_SECONDS):
            agent = Agent(*accepted)
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


def _assign(agents: Sequence[Agent], size: int) -> list[SlotInfo]:
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


def _common_address(agents: Sequence[Agent], hosts: Sequence[str]) -> str:
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


def _stop(agents: Sequence[Agent]) -> None:
    """Let the agents end their ranks, and wait until they have."""
    remaining = list(agents)
    for agent in remaining:
        agent.send(None)
    deadline = time.monotonic() + _STOP_SECONDS
    while remaining and (seconds := deadline - time.monotonic()) > 0:
        for agent in wait_for_agents(remaining, seconds):
            try:
                print_output(agent.connection.recv())
            except (EOFError, OSError):
                remaining.remove(agent)
    for agent in agents:
        agent.connection.close()
