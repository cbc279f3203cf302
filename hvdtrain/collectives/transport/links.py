"""TCP connections between ranks of several hosts, for native reductions.

Ranks with the same local rank are connected to each other. Like Gloo's connections,
these are not encrypted.
"""

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence

import psutil

from hvdtrain.collectives.transport.places import Address

_SECONDS = 30.0
# A peer sends its greeting at once.
_GREETING_SECONDS = 1.0
_KEY_BYTES = 16
# What a rank sends first: the key of the job, and the number of its host.
_GREETING = struct.Struct(f"{_KEY_BYTES}si")
# A host that is lost while nothing is on the way to it is noticed within 25 s; in the
# other case by links.cc.
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)

Socket = socket.socket


class PeerListener:
    """Accepts the connections of this rank's peers on other hosts."""

    def __init__(self) -> None:
        """Listen on the interface of Gloo.

        Raises:
            OSError: the interface has no address.
        """
        address = _own_address()
        self._socket = socket.create_server(
            (address, 0), family=_family(address), backlog=1024
        )
        self.address: Address = self._socket.getsockname()[:2]
        # The job uses the key of rank 0.
        self.key = secrets.token_hex(_KEY_BYTES)

    def connect(
        self, addresses: Sequence[Address], *, host: int, key: str
    ) -> list[Socket | None]:
        """Return a connection to each host, None in place of this one's. A collective.

        Args:
            addresses: of the peers' listeners, by host.
            host: number of this rank's host, which connects to those before it.
            key: of the job.

        Raises:
            OSError: a peer was not reached within half a minute.
        """
        connections: list[Socket | None] = [None] * len(addresses)
        deadline = time.monotonic() + _SECONDS
        with contextlib.ExitStack() as stack:
            for other in range(host):
                made = socket.create_connection(addresses[other], _SECONDS)
                connections[other] = stack.enter_context(made)
                made.sendall(_GREETING.pack(bytes.fromhex(key), host))
            missing = len(addresses) - host - 1
            while missing:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                made, _ = self._socket.accept()
                caller = _caller(made, key)
                if caller is None:
                    made.close()
                    continue
                connections[caller] = stack.enter_context(made)
                missing -= 1
            stack.pop_all()
        for made in filter(None, connections):
            for option in _OPTIONS:
                made.setsockopt(*option)
            made.setblocking(False)
        return connections

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()


def _caller(made: Socket, key: str) -> int | None:
    """Return the host of a new connection; None for one that is not of the job."""
    made.settimeout(_GREETING_SECONDS)
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < _GREETING.size:
            part = made.recv(_GREETING.size - len(received))
            if not part:
                return None
            received += part
        sent, host = _GREETING.unpack(received)
        if secrets.compare_digest(sent, bytes.fromhex(key)):
            return int(host)
    return None


def _own_address() -> str:
    """Return an address of this host, as Gloo chooses it."""
    interface = os.environ.get("HOROVOD_GLOO_IFACE", "").partition(",")[0]
    if not interface:
        return socket.gethostbyname(socket.gethostname())
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in psutil.net_if_addrs().get(interface, []):
            # An address with a scope, fe80::1%eth0, is not one for other hosts.
            if entry.family == family and "%" not in entry.address:
                return entry.address
    raise OSError(f"the network interface {interface} has no IP address")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
