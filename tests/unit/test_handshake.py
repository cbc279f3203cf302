"""Connections whose ends have one key, with real sockets on the loopback interface."""

import contextlib
import pickle
import secrets
import socket
import threading
import time
from concurrent import futures

import pytest

import hvdtrain
from hvdtrain import handshake
from hvdtrain.runner import channel
from hvdtrain.runner.engine import PlacedAgents

KEY = secrets.token_bytes(handshake.KEY_BYTES)
LIMIT_SECONDS = 30
# A nonce, and the length of the greeting that follows.
HELLO_BYTES = 36


@pytest.fixture
def listening():
    with handshake.listen("127.0.0.1") as made:
        yield made


@pytest.fixture
def acceptor(listening):
    with contextlib.closing(handshake.Acceptor(listening, KEY)) as made:
        yield made


@pytest.fixture
def stranger(listening):
    """Connect to the listener, without a key."""
    with contextlib.ExitStack() as stack:

        def connect(address=None):
            address = address or listening.getsockname()
            made = socket.create_connection(address, LIMIT_SECONDS)
            return stack.enter_context(made)

        yield connect


@pytest.fixture
def trickling(stranger):
    """A stranger whose handshake goes on, byte by byte, until the test has ended."""
    is_over = threading.Event()

    def send(made):
        with contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                made.sendall(b"\0")

    def start(address=None):
        thread = threading.Thread(target=send, args=[stranger(address)])
        threads.append(thread)
        thread.start()

    threads = []
    yield start
    is_over.set()
    for thread in threads:
        thread.join()


def connect_and_accept(acceptor, address, **options):
    """Return both ends of a connection, and the greeting that was received."""
    with futures.ThreadPoolExecutor(1) as pool:
        calling = pool.submit(handshake.connect, address, KEY, **options)
        accepted = acceptor.accept(LIMIT_SECONDS)
        return calling.result(), *accepted


def test_both_ends_are_connected_after_a_greeting(listening, acceptor):
    address = listening.getsockname()
    for greeting in (b"", b"host 3", bytes(60_000)):
        own, theirs, received = connect_and_accept(acceptor, address, greeting=greeting)
        with own, theirs:
            assert received == greeting
            own.sendall(b"first")
            assert theirs.recv(5) == b"first"


@pytest.mark.parametrize("max_open", [512, 4])
def test_strangers_do_not_delay_a_caller(
    monkeypatch, listening, acceptor, stranger, trickling, max_open
):
    monkeypatch.setattr(handshake, "_MAX_OPEN", max_open)
    silent = [stranger() for _ in range(30)]
    for made in silent[::3]:
        made.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n")
    for _ in range(5):
        trickling()
    start = time.monotonic()
    own, theirs, _ = connect_and_accept(acceptor, listening.getsockname())
    with own, theirs:
        # One of them alone has delayed a caller by 10 s, or by 199 s.
        assert time.monotonic() - start < 5
    assert len(acceptor._open) <= max_open


def test_the_timeout_is_for_all_strangers_together(acceptor, stranger, trickling):
    for _ in range(10):
        stranger()
        trickling()
    start = time.monotonic()
    assert acceptor.accept(0.5) is None
    assert 0.5 <= time.monotonic() - start < 5


def test_a_handshake_has_one_deadline_for_all_bytes(monkeypatch, acceptor, stranger):
    monkeypatch.setattr(handshake, "_LISTENER_SECONDS", 0.5)
    made = stranger()
    made.settimeout(0.05)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < HELLO_BYTES:
            assert acceptor.accept(0.01) is None
            made.sendall(b"\0")
            sent += 1
            with contextlib.suppress(TimeoutError):
                if made.recv(1) == b"":
                    break
    # Each byte in time, and all of them too late.
    assert sent < HELLO_BYTES


def test_a_caller_has_one_deadline_for_all_bytes(listening):
    is_over = threading.Event()

    def trickle():
        made, _ = listening.accept()
        with made, contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                made.sendall(b"\0")

    start = time.monotonic()
    with futures.ThreadPoolExecutor(1) as pool:
        pool.submit(trickle)
        with pytest.raises(TimeoutError):
            handshake.connect(listening.getsockname(), KEY, timeout_seconds=0.5)
        is_over.set()
    assert time.monotonic() - start < 5


def receive_all(connection):
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def record(listening, acceptor, greeting):
    """Return what a caller and a listener have sent, as a listener in the network."""
    sent = {"caller": b"", "listener": b""}

    def forward(name, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sent[name] += data
                sink.sendall(data)

    with (
        handshake.listen("127.0.0.1") as between,
        futures.ThreadPoolExecutor(3) as pool,
    ):
        address = between.getsockname()
        calling = pool.submit(handshake.connect, address, KEY, greeting=greeting)
        near, _ = between.accept()
        far = socket.create_connection(listening.getsockname(), LIMIT_SECONDS)
        with near, far:
            pool.submit(forward, "caller", near, far)
            pool.submit(forward, "listener", far, near)
            accepted = acceptor.accept(LIMIT_SECONDS)
            calling.result().close()
            accepted.connection.close()
    assert accepted.greeting == greeting
    return sent


def test_a_recorded_handshake_is_of_no_use(listening, acceptor, stranger):
    sent = record(listening, acceptor, b"host 1")
    assert len(sent["caller"]) == HELLO_BYTES + len(b"host 1") + 32
    assert not any(KEY in data for data in sent.values())
    made = stranger()
    made.sendall(sent["caller"])
    assert acceptor.accept(0.5) is None
    received = receive_all(made)
    # It was answered with another nonce, and closed.
    assert len(received) == len(sent["listener"]) == 64
    assert received != sent["listener"]


def test_the_proof_of_the_listener_is_none_of_a_caller(acceptor, stranger):
    made = stranger()
    made.sendall(bytes(HELLO_BYTES))
    assert acceptor.accept(0.2) is None
    made.sendall(made.recv(64)[32:])
    assert acceptor.accept(0.2) is None
    assert made.recv(1) == b""


def test_a_listener_proves_that_it_has_the_key(listening, acceptor):
    sent = record(listening, acceptor, b"")
    with futures.ThreadPoolExecutor(1) as pool:
        calling = pool.submit(handshake.connect, listening.getsockname(), KEY)
        listening.settimeout(LIMIT_SECONDS)
        made, _ = listening.accept()
        with made:
            made.sendall(sent["listener"])
            with pytest.raises(ConnectionError, match="have the key of this job"):
                calling.result(LIMIT_SECONDS)


def test_a_longer_greeting_than_any_is_not_received(acceptor, stranger):
    made = stranger()
    made.sendall(handshake._HELLO.pack(bytes(32), 1 << 31))
    assert acceptor.accept(0.2) is None
    assert made.recv(1) == b""


class Payload:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_the_hello_of_a_stranger_is_not_unpickled(tmp_path, stranger):
    bomb = pickle.dumps(Payload(tmp_path / "executed"))
    with contextlib.closing(channel.Listener(is_local=True)) as listener:
        made = stranger((channel.LOOPBACK, listener.address.port))
        made.sendall(handshake._HELLO.pack(bytes(32), len(bomb)) + bomb + bytes(32))
        assert listener.accept(timeout_seconds=0.5) is None
        assert len(receive_all(made)) == 64
    assert not list(tmp_path.iterdir())
    pickle.loads(bomb).close()
    assert list(tmp_path.iterdir())


class Strangers:
    """An engine whose agents never connect: others do."""

    is_local = True

    def __init__(self, stranger, trickling):
        self.stranger, self.trickling = stranger, trickling

    @contextlib.contextmanager
    def place(self, address, size):
        for _ in range(10):
            self.stranger((address.hosts[0], address.port))
            self.trickling((address.hosts[0], address.port))
        yield PlacedAgents(size, str, lambda: "Start the agents")

    def __str__(self):
        return "Strangers"


def test_a_job_waits_for_its_agents_as_long_as_it_says(stranger, trickling):
    start = time.monotonic()
    error = "Received 0 of 2 ranks from Strangers: no more .* within 1 s. Start the"
    with pytest.raises(hvdtrain.RunError, match=error):
        hvdtrain.run(
            print, np=2, on=Strangers(stranger, trickling), start_timeout_seconds=1
        )
    assert 1 <= time.monotonic() - start < 10


def test_an_agent_among_strangers_is_accepted_with_its_interfaces(stranger, trickling):
    with contextlib.closing(channel.Listener(is_local=True)) as listener:
        address = listener.address
        for _ in range(5):
            stranger((channel.LOOPBACK, address.port))
            trickling((channel.LOOPBACK, address.port))
        hello = channel.Hello("hash", "host", slots=2)
        with futures.ThreadPoolExecutor(1) as pool:
            calling = pool.submit(channel.connect, address, hello, timeout_seconds=10)
            accepted, received = listener.accept(timeout_seconds=LIMIT_SECONDS)
            with accepted, calling.result() as connection:
                assert (received.host, received.slots) == ("host", 2)
                assert received.interfaces == {channel.LOOPBACK: "lo"}
                connection.send("text")
                assert accepted.recv() == "text"
