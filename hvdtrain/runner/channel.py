"""Connections between the caller of `hvdtrain.run` and the agents of an engine.

Both ends authenticate with the job's key before anything is unpickled.
"""

import contextlib
import dataclasses
import secrets
import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import psutil

LOOPBACK = "127.0.0.1"
_HANDSHAKE_SECONDS = 10
_RETRY_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
# A host that is lost without a packet is noticed within 25 s, and within 60 s where
# data is on the way.
_TCP_OPTIONS = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 60_000),
)


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
    """The first message of an agent.

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
    interfaces: dict[str, str]


@dataclasses.dataclass(frozen=True)
class StartRanks:
    """Request to start a rank for each of `environments`.

    Attributes:
        payload: pickled function and arguments.
        environments: variables by which a rank finds the others.
    """

    payload: bytes
    environments: tuple[dict[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Output:
    """Lines that a rank has printed to stream 1 or 2."""

    rank: int
    stream: int
    text: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """A rank's process has ended; `outcome` is what it has pickled before, if any."""

    rank: int
    exit_code: int
    outcome: bytes


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
    """

    value: bytes = b""
    summary: str = ""
    traceback: str = ""
    is_consequence: bool = False


class Listener:
    """Accepts connections of agents that authenticate with the key of `address`."""

    def __init__(self, *, is_local: bool) -> None:
        """Listen on the loopback interface if `is_local`, else on all interfaces."""
        self.socket = socket.create_server((LOOPBACK if is_local else "", 0))
        hosts = (LOOPBACK,) if is_local else _addresses()
        port = self.socket.getsockname()[1]
        self.address = Address(hosts, port, secrets.token_bytes(32))

    def accept(self) -> tuple[Connection, Hello] | None:
        """Return the connection and first message; None without authentication."""
        accepted, _ = self.socket.accept()
        with contextlib.suppress(OSError, EOFError, AuthenticationError):
            made = _authenticate(accepted, self.address.key, is_caller=True)
            if made.poll(_HANDSHAKE_SECONDS):
                return made, made.recv()
            made.close()
        return None

    def close(self) -> None:
        """Accept no more connections."""
        self.socket.close()


def connect(
    address: Address, *, timeout_seconds: float
) -> tuple[Connection, dict[str, str]]:
    """Connect an agent to the caller.

    Returns:
        The connection, and `Hello.interfaces`.

    Raises:
        OSError: the caller is not reached within `timeout_seconds`.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        made, interfaces = None, {}
        for host in address.hosts:
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                connection, interfaces[host] = _connect(host, address)
                if made:
                    connection.close()
                made = made or connection
        if made:
            return made, interfaces
        if time.monotonic() > deadline:
            raise OSError(
                f"{socket.gethostname()} cannot connect to the caller of hvdtrain.run "
                f"at {', '.join(address.hosts)}, port {address.port}, within "
                f"{timeout_seconds:g} s: it has ended, or a firewall is between them."
            )
        time.sleep(_RETRY_SECONDS)


def _connect(host: str, address: Address) -> tuple[Connection, str]:
    connected = socket.create_connection((host, address.port), _CONNECT_SECONDS)
    own, _ = connected.getsockname()
    interface = _interface(own)
    return _authenticate(connected, address.key, is_caller=False), interface


def _authenticate(
    connected: socket.socket, key: bytes, *, is_caller: bool
) -> Connection:
    connected.settimeout(None)
    # A blocking read fails after this: a stranger may send nothing.
    limit = struct.pack("ll", _HANDSHAKE_SECONDS, 0)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_OPTIONS:
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    shared = connected.dup()
    with contextlib.ExitStack() as stack:
        stack.callback(shared.close)
        made = stack.enter_context(Connection(connected.detach()))
        steps = [deliver_challenge, answer_challenge]
        for step in steps if is_caller else reversed(steps):
            step(made, key)
        shared.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0)
        )
        shared.close()
        stack.pop_all()
        return made


def _addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this host; the loopback's if it has no other."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    ]
    outer = [address for address in found if not address.startswith("127.")]
    return tuple(outer or [LOOPBACK])


def _interface(own: str) -> str:
    """Return the name of the network interface that has the address `own`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            return name
    raise OSError(f"no network interface has the address {own}")
