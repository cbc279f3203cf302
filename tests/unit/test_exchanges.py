"""What a rank says about ranks of other hosts, which are sockets of this process."""

import contextlib
import ctypes
import socket
import struct
import threading

import pytest

from hvdtrain import native
from hvdtrain.collectives.transport import segment
from hvdtrain.collectives.transport.places import RankPlace, RankPlaces

# The struct Call of call.h: a sum of float32, signature and elements first.
CALL = struct.Struct("=QQIIIIIiq")
FLOAT = 1
RING_ELEMENTS = 3 << 20


def call(elements):
    return CALL.pack(1, elements, FLOAT, 0, 1, 0, 0, 0, 0)


@pytest.fixture
def pairs():
    """Connections of this process, rank 0, to ranks 1 and 2, each on its own host."""
    return [socket.socketpair() for _ in range(2)]


@pytest.fixture
def peers(monkeypatch, pairs):
    """The ends of ranks 1 and 2, after rank 0 has connected."""
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.3")
    functions = native.load().functions
    functions.hvdtrain_join.restype = ctypes.c_char_p
    places = RankPlaces(
        [RankPlace(f"host{host}", host, 0, [0], []) for host in range(3)], rank=0
    )
    with segment.reserve(functions, places) as file, contextlib.ExitStack() as stack:
        own = [None, *(pair[0] for pair in pairs)]
        assert not segment.attach(functions, file.name, places, own)
        functions.hvdtrain_start()
        stack.callback(functions.hvdtrain_leave)
        yield [stack.enter_context(pair[1]) for pair in pairs]


def join():
    """Take part in the reductions of the peers; return why one has failed."""
    last = ctypes.c_int()
    return native.load().functions.hvdtrain_join(ctypes.byref(last)).decode()


def test_a_rank_that_has_not_called_is_missing(peers, capfd):
    peers[0].sendall(call(0))
    assert join().startswith("Missing ranks: 2 did not call join within")
    assert "join has been waited for 0 s. Missing ranks: 2." in capfd.readouterr().err


@pytest.fixture
def _full(pairs):
    own = pairs[0][0]
    own.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            own.send(bytes(1 << 16))


@pytest.mark.usefixtures("_full")
def test_a_rank_that_called_and_reads_no_more_is_named(peers):
    for peer in peers:
        peer.sendall(call(0))
    assert join().endswith("what was sent to rank 1 has not been read")


def test_in_a_ring_the_rank_before_is_not_blamed(peers, capfd):
    for peer in peers:
        peer.sendall(call(RING_ELEMENTS))
    reason = join()
    assert "did not call" not in reason
    assert "nothing has arrived from rank 2, which may itself wait" in reason
    assert "what was sent to rank 1 has not been read" in reason
    # On each host that waits, one line.
    (line,) = capfd.readouterr().err.splitlines()
    assert "has been waited for 0 s: nothing has arrived from rank 2, which" in line


def test_all_connections_that_have_ended_are_named(peers):
    for peer in peers:
        peer.sendall(call(RING_ELEMENTS))
    # Rank 1 was lost, and rank 2, which has noticed it, has closed its connections.
    for peer in peers:
        peer.close()
    assert "the connections to ranks 1, 2 have ended: one of them" in join()


def test_a_failure_is_noticed_while_another_host_sends(peers, monkeypatch):
    # Rank 1 sends a byte in 20 ms, as one would by a slow network.
    is_over, sent = threading.Event(), []

    def trickle():
        for byte in call(0):
            if is_over.wait(0.02):
                break
            peers[0].sendall(bytes([byte]))
            sent.append(byte)

    native.load().functions.hvdtrain_fail(b"rank 7 has failed")
    sender = threading.Thread(target=trickle)
    sender.start()
    reason = join()
    is_over.set()
    sender.join()
    assert reason == "rank 7 has failed"
    assert len(sent) < CALL.size
