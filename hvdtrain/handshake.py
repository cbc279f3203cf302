"""TCP connections whose two ends prove to each other that they have the key of a job.

    caller                          listener
    nonce, greeting          →
                             ←      nonce, HMAC("listener", both nonces, greeting)
    HMAC("caller", ...)      →

The key is not sent, and a recorded handshake is of no use, since both nonces are new.
What the ends send afterwards is neither encrypted nor authenticated.
"""

import contextlib
import dataclasses
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Generator
from typing import NamedTuple

# IP address and port.
Address = tuple[str, int]

KEY_BYTES = 32
# The listener allows more time than the caller, and from a later start: otherwise it
# might drop a connection that the caller regards as made.
_CALLER_SECONDS, _LISTENER_SECONDS = 10.0, 15.0
# An address in another network may not answer at all.
_CONNECT_SECONDS = 2.0
# A timeout of 0 would make a socket non-blocking.
_LEAST_SECONDS = 1e-3
# The next caller replaces the oldest one, which is a stranger: a caller that has the
# key needs milliseconds. Less than the 1,024 descriptors of a process.
_MAX_OPEN = 512
_BACKLOG = 1024
_NONCE_BYTES = _PROOF_BYTES = 32
_HELLO = struct.Struct(f">{_NONCE_BYTES}sI")
_MAX_GREETING_BYTES = 1 << 16
# A host that is lost without a packet is noticed after 90 s, if no data is on the way
# to it, as in links.cc: a link that is down for half a minute must not end a job.
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 16),
)


class Accepted(NamedTuple):
    """A connection whose caller has the key, and what the caller has sent with it."""

    connection: socket.socket
    greeting: bytes


@dataclasses.dataclass
class _Handshake:
    """One caller: what `_answer` has to receive next, and until when."""

    steps: Generator[int, bytes, bytes]
    expires: float
    missing: int
    received: bytes = b""


def listen(host: str) -> socket.socket:
    """Return a socket that listens at an address of this host, "" for all of IPv4."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)


class Acceptor:
    """Accepts connections, with the handshakes of many callers side by side."""

    def __init__(self, listening: socket.socket, key: bytes) -> None:
        """Accept at a socket, which is not closed by `close`."""
        listening.setblocking(False)
        self._listening, self._key = listening, key
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        # The oldest first.
        self._open: dict[socket.socket, _Handshake] = {}

    def accept(self, timeout_seconds: float) -> Accepted | None:
        """Return the next connection with a complete handshake; None at the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            expiries = [handshake.expires for handshake in self._open.values()]
            wait_seconds = min([deadline, *expiries[:1]]) - time.monotonic()
            found = self._selector.select(max(wait_seconds, 0.0))
            ready = {key.fileobj for key, _ in found}
            # Read before others are accepted and dropped: this process may have been
            # suspended while the data arrived.
            for connection in self._open.keys() & ready:
                if accepted := self._advance(connection):
                    return accepted
            self._drop_expired()
            if self._listening in ready:
                self._begin()
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        """Close the connections whose handshake is not complete."""
        for connection in list(self._open):
            self._drop(connection)
        self._selector.close()

    def _begin(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            connection.setblocking(False)
            _set_options(connection)
            steps = _answer(connection, self._key)
            expires = time.monotonic() + _LISTENER_SECONDS
            self._open[connection] = _Handshake(steps, expires, missing=next(steps))
            self._selector.register(connection, selectors.EVENT_READ)
        if len(self._open) > _MAX_OPEN:
            self._drop(next(iter(self._open)))

    def _advance(self, connection: socket.socket) -> Accepted | None:
        """Receive what has arrived, and return the connection if it was the last."""
        handshake = self._open[connection]
        try:
            data = connection.recv(handshake.missing)
            if not data:
                raise ConnectionError("the caller has closed the connection")
            handshake.received += data
            handshake.missing -= len(data)
            if not handshake.missing:
                received, handshake.received = handshake.received, b""
                handshake.missing = handshake.steps.send(received)
        except StopIteration as end:
            self._selector.unregister(connection)
            del self._open[connection]
            connection.setblocking(True)
            return Accepted(connection, end.value)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
        return None

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for connection, handshake in list(self._open.items()):
            if handshake.expires <= now:
                self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._open[connection]
        self._selector.unregister(connection)
        connection.close()


def connect(
    address: Address,
    key: bytes,
    *,
    greeting: bytes = b"",
    timeout_seconds: float = _CALLER_SECONDS,
) -> socket.socket:
    """Return a connection to a listener that has the key, after one attempt.

    Args:
        greeting: what `Acceptor.accept` returns, once it is authenticated.
        timeout_seconds: of the whole attempt, which takes 10 at most.

    Raises:
        OSError: there is no listener, it does not have the key, or it is too slow.
    """
    deadline = time.monotonic() + min(timeout_seconds, _CALLER_SECONDS)
    limit = max(min(timeout_seconds, _CONNECT_SECONDS), _LEAST_SECONDS)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(socket.create_connection(address, limit))
        _set_options(made)
        own = secrets.token_bytes(_NONCE_BYTES)
        made.sendall(_HELLO.pack(own, len(greeting)) + greeting)
        nonces = own + _receive(made, _NONCE_BYTES, deadline)
        proof = _receive(made, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _prove(key, b"listener", nonces, greeting)):
            raise ConnectionError("the other end does not have the key of this job")
        made.sendall(_prove(key, b"caller", nonces, greeting))
        made.setblocking(True)
        stack.pop_all()
        return made


def _answer(connection: socket.socket, key: bytes) -> Generator[int, bytes, bytes]:
    """Yield how many bytes to receive next; return the greeting of an authentic caller.

    Raises:
        OSError: the caller does not have the key.
    """
    theirs, length = _HELLO.unpack((yield _HELLO.size))
    if length > _MAX_GREETING_BYTES:
        raise ConnectionError("the greeting is too long")
    greeting = (yield length) if length else b""
    own = secrets.token_bytes(_NONCE_BYTES)
    nonces = theirs + own
    connection.sendall(own + _prove(key, b"listener", nonces, greeting))
    proof = yield _PROOF_BYTES
    if not hmac.compare_digest(proof, _prove(key, b"caller", nonces, greeting)):
        raise ConnectionError("the caller does not have the key of this job")
    return greeting


def _prove(key: bytes, role: bytes, nonces: bytes, greeting: bytes) -> bytes:
    # All but the last have fixed lengths: no two messages are the same bytes.
    return hmac.digest(key, role.ljust(8) + nonces + greeting, "sha256")


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        # The deadline is for all bytes: the next one may always arrive in time.
        connection.settimeout(max(deadline - time.monotonic(), _LEAST_SECONDS))
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        received += part
    return received


def _set_options(connection: socket.socket) -> None:
    for option in _OPTIONS:
        connection.setsockopt(*option)
