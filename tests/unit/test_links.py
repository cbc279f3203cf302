"""Connections between hosts, with threads of this process as the hosts."""

import contextlib
import itertools
import socket
from concurrent import futures

import pytest

from hvdtrain.collectives.transport import links


@contextlib.contextmanager
def connected(count, before=lambda listeners: None):
    """Yield for each host its connections to the others."""
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(contextlib.closing(links.PeerListener()))
            for _ in range(count)
        ]
        before(listeners)
        addresses = [listener.address for listener in listeners]
        with futures.ThreadPoolExecutor(count) as pool:
            dialed = [
                pool.submit(
                    listener.connect, addresses, host=host, key=listeners[0].key
                )
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


def test_each_host_is_connected_to_each():
    with connected(3) as connections:
        assert_connected(connections)


def test_a_stranger_is_not_a_host():
    strangers = []

    def connect(listeners):
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(20)):
            made = socket.create_connection(listeners[0].address, timeout=10)
            made.sendall(text)
            made.shutdown(socket.SHUT_WR)
            strangers.append(made)

    with connected(2, before=connect) as connections:
        assert_connected(connections)
    for made in strangers:
        made.close()


def test_a_host_that_does_not_come_is_an_error(monkeypatch):
    monkeypatch.setattr(links, "_SECONDS", 0.1)
    with (
        contextlib.closing(links.PeerListener()) as listener,
        pytest.raises(TimeoutError),
    ):
        listener.connect([listener.address] * 2, host=0, key=listener.key)


def test_the_interface_is_that_of_gloo(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    with contextlib.closing(links.PeerListener()) as listener:
        assert listener.address[0] == "127.0.0.1"
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "none0")
    with pytest.raises(OSError, match="interface none0 has no IP address"):
        links.PeerListener()
