"""Connections between hosts, with threads of this process as the hosts."""

import contextlib
import errno
import itertools
import math
import secrets
import socket
import time
from concurrent import futures

import pytest

from hvdtrain import handshake, native
from hvdtrain.collectives.transport import links

KEY = secrets.token_bytes(32)


@contextlib.contextmanager
def connected(count, before=lambda listeners: None, at=None):
    """Yield for each host its connections to the others.

    With `at`, to those alone that are at one of these distances, round all hosts.
    """
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(contextlib.closing(links.PeerListener()))
            for _ in range(count)
        ]
        before(listeners)

        def addresses(host):
            distances = [(other - host) % count for other in range(count)]
            return [
                listener.address if distance and distance in (at or distances) else None
                for listener, distance in zip(listeners, distances, strict=True)
            ]

        with futures.ThreadPoolExecutor(count) as pool:
            dialed = [
                pool.submit(listener.connect, addresses(host), host=host, key=KEY)
                for host, listener in enumerate(listeners)
            ]
        connections = [future.result() for future in dialed]
        for made in filter(None, itertools.chain(*connections)):
            stack.enter_context(made)
        yield connections


def assert_connected(connections):
    for host, own in enumerate(connections):
        assert own[host] is None
        for other in set(range(len(connections))) - {host}:
            own[other].sendall(bytes([host, other]))
    for host, own in enumerate(connections):
        for other in set(range(len(connections))) - {host}:
            own[other].settimeout(10)
            assert own[other].recv(2) == bytes([other, host])


@pytest.mark.parametrize("count", [3, 16])
def test_each_host_is_connected_to_each(count):
    with connected(count) as connections:
        assert_connected(connections)


def test_a_host_is_connected_to_those_with_an_address_alone():
    with connected(5, at=(1, 4)) as connections:
        for host, own in enumerate(connections):
            made = {other for other, each in enumerate(own) if each}
            assert made == {(host + 1) % 5, (host - 1) % 5}
            own[(host + 1) % 5].sendall(bytes([host]))
        for host, own in enumerate(connections):
            own[(host - 1) % 5].settimeout(10)
            assert own[(host - 1) % 5].recv(1) == bytes([(host - 1) % 5])


@pytest.mark.parametrize("count", [2, 16, 17, 18, 31, 32, 33, 100, 1024])
def test_many_hosts_are_connected_to_few(count):
    are_connected = native.load().functions.hvdtrain_are_connected
    # Halves of the number, rounded up, down to 1.
    skips, known = set(), count
    while known > 1:
        known = (known + 1) // 2
        skips |= {known, count - known}
    expected = skips if count > 16 else set(range(1, count))
    for host in (0, 1, count - 1):
        distances = {
            (other - host) % count
            for other in range(count)
            if are_connected(count, host, other)
        }
        assert distances == expected
    assert len(skips) <= 2 * math.ceil(math.log2(count))


def test_a_stranger_is_not_a_host():
    strangers = []

    def connect(listeners):
        # Ten are silent: half of the others send too little, half too much.
        for text in (*[b""] * 10, b"GET / HTTP/1.1\r\n\r\n", bytes(200)):
            made = socket.create_connection(listeners[0].address, timeout=10)
            made.sendall(text)
            strangers.append(made)

    start = time.monotonic()
    with connected(2, before=connect) as connections:
        assert_connected(connections)
        # A silent one has delayed the hosts by a second.
        assert time.monotonic() - start < 5
    for made in strangers:
        made.close()


def call(listener, number):
    greeting = number.to_bytes(4, "big")
    made = handshake.connect(listener.address, KEY, greeting=greeting)
    made.settimeout(10)
    return made


@pytest.mark.parametrize("numbers", [[77], [0], [2**32 - 1], [1, 1]])
def test_only_a_missing_host_is_accepted(numbers):
    with (
        contextlib.closing(links.PeerListener()) as listener,
        futures.ThreadPoolExecutor(1) as pool,
    ):
        made = pool.submit(listener.connect, [listener.address] * 3, host=0, key=KEY)
        *_, refused = callers = [call(listener, number) for number in numbers]
        # It has the key, and its number is out of range, or was accepted before.
        assert refused.recv(1) == b""
        callers += [call(listener, number) for number in {1, 2} - {*numbers}]
        _, first, second = made.result()
        assert {made.getpeername() for made in (first, second)} < {
            caller.getsockname() for caller in callers
        }
        for connection in (first, second, *callers):
            connection.close()


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError("timed out"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        BrokenPipeError(errno.EPIPE, "broken pipe"),
        OSError(errno.EHOSTUNREACH, "no route to host"),
    ],
)
def test_a_call_that_comes_too_early_is_repeated(monkeypatch, error):
    errors, connect = [error, error], handshake.connect

    def fail_at_first(*args, **kwargs):
        with contextlib.suppress(IndexError):  # several threads call
            raise errors.pop()
        return connect(*args, **kwargs)

    monkeypatch.setattr(links, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(handshake, "connect", fail_at_first)
    with connected(3) as connections:
        assert_connected(connections)
    assert not errors


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.ECONNREFUSED])
def test_a_call_that_cannot_succeed_is_not_repeated(monkeypatch, number):
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        raise OSError(number, "no way")

    monkeypatch.setattr(handshake, "connect", fail)
    with (
        contextlib.closing(links.PeerListener()) as listener,
        pytest.raises(OSError, match="no way"),
    ):
        listener.connect([listener.address] * 2, host=1, key=KEY)
    assert len(calls) == 1


def test_a_host_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setattr(links, "_SECONDS", 0.1)
    with contextlib.closing(links.PeerListener()) as listener:
        for host, error in ((0, "host 1, 2 did not connect in time"), (2, "refused")):
            with handshake.listen("127.0.0.1") as closed:
                gone = closed.getsockname()
            with pytest.raises(OSError, match=error):
                listener.connect([gone] * 3, host=host, key=KEY)


def test_the_interface_is_that_of_gloo(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    with contextlib.closing(links.PeerListener()) as listener:
        assert listener.address[0] == "127.0.0.1"
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "none0")
    with pytest.raises(OSError, match="no address at the network interface none0"):
        links.PeerListener()
