"""Connections between the caller of `hvdtrain.run` and the agents of an engine.

Both ends authenticate with the job's key before anything is unpickled.
"""

import contextlib
import dataclasses
import os
import pickle
import secrets
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

from hvdtrain import handshake
from hvdtrain.addresses import LOOPBACK, interface_of, outer_ipv4

_RETRY_SECONDS = 0.2
# Until a host that is lost while data is on the way to it is noticed.
_LOST_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Address:
    """Where agents reach the caller.

    Attributes:
        hosts: IPv4 addresses of the caller's host, in the order in which to try them.
        key: secret of this job.
    """

    hosts: tuple[str, ...]
    port: int
    key: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Hello:
    """What an agent sends in its handshake.

    Attributes:
        host_hash: equal for the agents that share memory.
        host: name of the agent's host.
        slots: number of ranks that the agent can start.
        interfaces: by each address of the caller that the agent can reach, the name of
            its network interface to it.
    """

    host_hash: str
    host: str
    slots: int
    interfaces: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StartRanks:
    """Request to start ranks, which call a function or are a program.

    Attributes:
        payload: pickled function and arguments; empty for a program.
        command: program and arguments; empty for a function.
        environments: by rank, the variables by which it finds the others.
    """

    payload: bytes
    command: tuple[str, ...]
    environments: Mapping[int, dict[str, str]]


@dataclasses.dataclass(frozen=True)
class AskRanks:
    """Request to send SIGTERM to the ranks, which end by themselves.

    Attributes:
        number: the signal that the caller has received.
    """

    number: int


@dataclasses.dataclass(frozen=True)
class Output:
    """Lines that a rank has printed to stream 1 or 2."""

    rank: int
    stream: int
    text: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """A rank's process has ended.

    Attributes:
        outcome: what it has pickled before, if any; nothing of a program.
        reason: of its guard, which has ended the job for an error of the program.
    """

    rank: int
    exit_code: int
    outcome: bytes
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Failed:
    """An agent cannot start its ranks, for a reason of its system."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the function has returned or raised on a rank.

    Attributes:
        value: pickled result, or pickled exception; empty if it cannot be pickled.
        summary: last line of the traceback; empty if the function has returned.
        traceback: of the exception, as Python prints it.
        is_consequence: whether a collective has failed because of another rank.
        conclusion: of the guards on the rank's host, about such a collective.
        late_ranks: that did not call it, as far as the guards have seen.
    """

    value: bytes = b""
    summary: str = ""
    traceback: str = ""
    is_consequence: bool = False
    conclusion: str = ""
    late_ranks: tuple[int, ...] = ()


class Listener:
    """Accepts connections of agents that authenticate with the key of `address`."""

    def __init__(self, *, is_local: bool) -> None:
        """Listen on all interfaces; on the loopback alone if `is_local`.

        Raises:
            OSError: this host has no IPv4 address.
        """
        outer = [] if is_local else outer_ipv4()
        self._socket = handshake.listen("" if outer else LOOPBACK)
        hosts = tuple(outer) or (LOOPBACK,)
        port = self._socket.getsockname()[1]
        key = secrets.token_bytes(handshake.KEY_BYTES)
        self.address = Address(hosts, port, key)
        self._acceptor = handshake.Acceptor(self._socket, key)

    def accept(self, *, timeout_seconds: float) -> tuple[Connection, Hello] | None:
        """Return the connection and the hello of an agent; None at the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while accepted := self._acceptor.accept(deadline - time.monotonic()):
            # Agents first try which addresses they reach.
            if accepted.greeting:
                hello = pickle.loads(accepted.greeting)
                return _connection(accepted.connection), hello
            accepted.connection.close()
        return None

    def close(self) -> None:
        """Accept no more connections."""
        self._acceptor.close()
        self._socket.close()


def connect(
    address: Address, hello: Hello, *, timeout_seconds: float, caller: int = 0
) -> Connection:
    """Connect an agent to the caller, which receives `hello` with its interfaces.

    Args:
        caller: PID of the caller, if it is the parent of this process.

    Raises:
        OSError: the caller has ended, or is not reached within `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        interfaces = {}
        for host in address.hosts:
            with contextlib.suppress(OSError), _connect(host, address) as tried:
                interfaces[host] = interface_of(tried.getsockname()[0])
        greeting = pickle.dumps(dataclasses.replace(hello, interfaces=interfaces))
        for host in interfaces:
            with contextlib.suppress(OSError):
                return _connection(_connect(host, address, greeting))
        has_ended = caller and os.getppid() != caller
        if has_ended or time.monotonic() > deadline:
            reason = "it has ended, or a firewall is between them"
            if address.hosts == (LOOPBACK,):
                reason = "it has ended, or is on a host with no IPv4 address but this"
            raise OSError(
                f"{socket.gethostname()} cannot connect to the caller of hvdtrain.run "
                f"at {', '.join(address.hosts)}, port {address.port}, within "
                f"{timeout_seconds:g} s: {reason}."
            )
        time.sleep(_RETRY_SECONDS)


def _connect(host: str, address: Address, greeting: bytes = b"") -> socket.socket:
    return handshake.connect((host, address.port), address.key, greeting=greeting)


def _connection(connected: socket.socket) -> Connection:
    milliseconds = int(_LOST_SECONDS * 1000)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return Connection(connected.detach())
