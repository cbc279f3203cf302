"""TCP connections between ranks of several hosts, for native reductions.

Ranks with the same local rank are connected to each other, on many hosts to some of
them. Like Gloo's connections, these are not encrypted.
"""

import contextlib
import errno
import pathlib
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent import futures

from hvdtrain import handshake
from hvdtrain.addresses import reached_by_others
from hvdtrain.handshake import Address

_SECONDS = 30.0
_RETRY_SECONDS = 0.2
_MAX_CALLS = 32
# A host that is loaded, or has many callers, may be too late for one try, or close the
# connection. Not one that refuses it.
_LATE = (TimeoutError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)

_DEVICES = (pathlib.Path("/sys/class/infiniband"), pathlib.Path("/sys/class/cxi"))

Socket = socket.socket


class PeerListener:
    """Accepts the connections of this rank's peers on other hosts."""

    def __init__(self) -> None:
        """Listen at the address by which other hosts reach this one.

        Raises:
            OSError: it has none, or several to choose from.
        """
        self._socket = handshake.listen(reached_by_others())
        self.address: Address = self._socket.getsockname()[:2]

    def connect(
        self,
        addresses: Sequence[Address | None],
        *,
        host: int,
        key: bytes,
    ) -> list[Socket | None]:
        """Return a connection to each host that has an address. A collective.

        Args:
            addresses: of the peers' listeners, by host; None for this host and those
                to which no connection is made, for which None is returned.
            host: number of this rank's host, which connects to those before it.
            key: of the job; both ends of a connection prove that they have it.

        Raises:
            OSError: a peer was not reached within half a minute.
        """
        deadline = time.monotonic() + _SECONDS
        connections: list[Socket | None] = [None] * len(addresses)
        with contextlib.ExitStack() as on_error:
            # Threads: a peer answers a call only while it accepts calls itself.
            with futures.ThreadPoolExecutor(_MAX_CALLS) as pool:
                calls = {
                    number: pool.submit(_call, address, host, key, deadline, on_error)
                    for number, address in enumerate(addresses[:host])
                    if address
                }
                later = {n for n, a in enumerate(addresses) if a and n > host}
                for number, made in self._accept(later, key, deadline):
                    connections[number] = on_error.enter_context(made)
            for number, call in calls.items():
                connections[number] = call.result()
            on_error.pop_all()
        for connection in filter(None, connections):
            connection.setblocking(False)
        return connections

    def _accept(
        self, missing: set[int], key: bytes, deadline: float
    ) -> Iterator[tuple[int, Socket]]:
        """Yield the number and the connection of each missing host."""
        with contextlib.closing(handshake.Acceptor(self._socket, key)) as acceptor:
            while missing:
                accepted = acceptor.accept(deadline - time.monotonic())
                if not accepted:
                    numbers = ", ".join(map(str, sorted(missing)))
                    raise TimeoutError(f"host {numbers} did not connect in time")
                number = int.from_bytes(accepted.greeting, "big")
                if number in missing:
                    missing.remove(number)
                    yield number, accepted.connection
                else:
                    accepted.connection.close()

    def close(self) -> None:
        """Accept no more connections."""
        self._socket.close()


def _call(
    address: Address,
    host: int,
    key: bytes,
    deadline: float,
    on_error: contextlib.ExitStack,
) -> Socket:
    greeting = host.to_bytes(4, "big")
    while True:
        seconds = deadline - time.monotonic()
        try:
            made = handshake.connect(
                address, key, greeting=greeting, timeout_seconds=seconds
            )
            return on_error.enter_context(made)
        except OSError as error:
            # ARP may get no answer of a loaded host in time: EHOSTUNREACH. Without a
            # route, ENETUNREACH, no later try succeeds.
            is_late = isinstance(error, _LATE) or error.errno == errno.EHOSTUNREACH
            if not is_late or seconds <= 0:
                raise OSError(f"{address[0]}, port {address[1]}: {error}") from error
        time.sleep(_RETRY_SECONDS)


def fast_network() -> str:
    """Return the name of a network device of this host that MPI may use, if any.

    InfiniBand, RoCE, Omni-Path and EFA are in the first of the kernel's directories,
    Slingshot in the second. Without them, MPI sends over TCP, too.
    """
    for directory in _DEVICES:
        for device in sorted(directory.glob("*")):
            return device.name
    return ""
