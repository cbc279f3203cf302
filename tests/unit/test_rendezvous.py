"""The launcher's store of a job under Gloo, and ranks that wait for each other."""

import contextlib
import http.client
import re
import socket
import threading
import time

import pytest
from horovod.runner.common.util import hosts, network
from horovod.runner.http import http_client, http_server
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from hvdtrain import environment
from hvdtrain.job import JobError, membership, rendezvous

HOST = "127.0.0.1"
SECRET = "ab" * 32


@pytest.fixture
def store(monkeypatch):
    """A store of a job of two ranks, whose secret this process has."""
    monkeypatch.setenv("HOROVOD_JOB_SECRET", SECRET)
    server = RendezvousHTTPServer((HOST, 0), RendezvousHandler, 0)
    server.init(hosts.get_host_assignments([hosts.HostInfo(HOST, 2)], 2))
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", HOST)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.server_port))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def send(store, method, key="key", body=b""):
    return http_client.send_request(method, HOST, store.server_port, "scope", key, body)


def test_a_process_with_the_secret_reads_and_writes(store):
    send(store, "PUT", body=b"value")
    assert send(store, "GET") == b"value"
    assert send(store, "GET", key="") == b"key"
    send(store, "DELETE")
    assert send(store, "GET", key="") == b""


def test_without_a_secret_requests_are_not_signed(store, monkeypatch):
    monkeypatch.delenv("HOROVOD_JOB_SECRET")
    store.secret = b""
    send(store, "PUT", body=b"value")
    assert send(store, "GET") == b"value"


@pytest.mark.parametrize("secret", ["", "cd" * 32])
def test_a_process_without_the_secret_is_refused(store, monkeypatch, secret):
    send(store, "PUT", body=b"value")
    monkeypatch.setenv("HOROVOD_JOB_SECRET", secret)
    for method in ("GET", "PUT", "DELETE", "HEAD", "POST"):
        with pytest.raises(OSError, match="403"):
            send(store, method, body=b"another")
    with pytest.raises(JobError, match="refuses a process without its HOROVOD_JOB"):
        rendezvous.wait_for_ranks(rank=1, size=2)
    assert store.cache == {"scope": {"key": b"value"}}


def test_many_ranks_that_wait_do_not_overload_the_store(store, monkeypatch):
    size, pauses = 600, []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            store.cache[scope] |= dict.fromkeys(map(str, range(size)), b"")

    monkeypatch.setattr(rendezvous.time, "sleep", sleep)
    monkeypatch.setattr(rendezvous, "_inits", iter([scope := "600"]))
    scope = f"init-{scope}"
    rendezvous.wait_for_ranks(rank=0, size=size)
    # Requests per second of all ranks; the store answers some 1,300.
    assert [size / seconds < 1000 for seconds in pauses] == [True] * 3


def recorded(store, body):
    """Return headers of a request that a process of the job sends."""
    sent = {}
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        headers = http_client.http_auth.request_headers
        patch.setattr(
            http_client.http_auth,
            "request_headers",
            lambda *args: sent.update(headers(*args)) or sent,
        )
        send(store, "PUT", body=body)
    return sent


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/scope/key", b"other"),
        ("PUT", "/scope/other", b"value"),
        ("DELETE", "/scope/key", b""),
    ],
)
def test_a_signature_is_of_one_request(store, method, path, body):
    headers = recorded(store, b"value")
    connection = http.client.HTTPConnection(HOST, store.server_port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        assert connection.getresponse().status == 403
    assert store.cache == {"scope": {"key": b"value"}}


def test_a_server_without_the_secret_is_not_believed(store):
    send(store, "PUT", body=b"value")
    for secret in (b"", b"another"):
        store.secret = secret
        # It answers every process.
        store.RequestHandlerClass = type(
            "Handler", (RendezvousHandler,), {"_is_signed": _accept}
        )
        with pytest.raises(OSError, match="does not sign as a process of this job"):
            send(store, "GET")


def _accept(handler):
    handler._signature = ""
    return True


def test_connections_of_strangers_end_and_delay_nobody(store, monkeypatch):
    monkeypatch.setattr(http_server, "WHOLE_REQUEST_TIMEOUT", 0.3)
    with socket.create_connection((HOST, store.server_port), timeout=60) as stranger:
        stranger.sendall(b"GET /scope/key HTTP/1.1\r\nX-Header: ")
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            # The store ends the connection in the middle of the request.
            while not _has_ended(stranger):
                stranger.sendall(b"a")
                send(store, "PUT", body=b"value")
                assert time.monotonic() - began < 60


def test_a_silent_connection_does_not_keep_a_service_from_its_end(monkeypatch):
    monkeypatch.setattr(network, "REQUEST_TIMEOUT_S", 0.3)
    service = network.BasicService("service", b"key", nics=["lo"])
    address = HOST, service.get_port()
    with socket.create_connection(address, timeout=60) as stranger:
        stranger.sendall(b"a")
        thread = threading.Thread(target=service.shutdown, daemon=True)
        # A client with the key is served beside it.
        network.BasicClient("service", {"lo": [address]}, b"key", verbose=0)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


def _has_ended(connection):
    connection.settimeout(0.05)
    try:
        return connection.recv(100) == b""
    except TimeoutError:
        return False


def start_rank(rank, errors):
    def wait():
        try:
            rendezvous.wait_for_ranks(rank=rank, size=3)
        except JobError as error:
            errors[rank] = str(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_ranks_wait_for_each_other(store, monkeypatch):
    # The threads are processes: each counts its own calls.
    monkeypatch.setattr(rendezvous, "_inits", iter([0] * 3))
    errors = {}
    threads = [start_rank(rank, errors) for rank in (2, 0)]
    assert all(thread.is_alive() for thread in threads)
    threads.append(start_rank(1, errors))
    for thread in threads:
        thread.join(60)
    assert not errors
    # The next call waits again.
    monkeypatch.setattr(rendezvous, "_inits", iter([1]))
    monkeypatch.setenv("HVDTRAIN_INIT_TIMEOUT_SECONDS", "0.1")
    start_rank(0, errors).join(60)
    assert errors[0].startswith("ranks 1, 2 did not call hvd.init within 0.1 s")


def test_the_late_rank_is_named(store, monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "_inits", iter([0] * 3))
    monkeypatch.setenv("HVDTRAIN_INIT_REPORT_SECONDS", "0.2")
    monkeypatch.setenv("HVDTRAIN_INIT_TIMEOUT_SECONDS", "0.8")
    errors = {}
    for thread in [start_rank(rank, errors) for rank in (0, 2)]:
        thread.join(60)
    assert set(errors.values()) == {
        "rank 1 did not call hvd.init within 0.8 s of the other ranks. If it does "
        "something that takes longer, such as a download, set "
        "HVDTRAIN_INIT_TIMEOUT_SECONDS."
    }
    assert set(errors) == {0, 2}
    # Once, and by one rank.
    assert capfd.readouterr().err == (
        "hvd.init: the job has waited for rank 1 for 0.2 s, and ends after 0.8 s "
        "(HVDTRAIN_INIT_TIMEOUT_SECONDS).\n"
    )
    # What the launcher reads.
    assert store.cache["late"] == {"1": errors[0].encode()}


def test_zero_is_no_limit(store, monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "_inits", iter([0] * 3))
    monkeypatch.setenv("HVDTRAIN_INIT_REPORT_SECONDS", "0.2")
    monkeypatch.setenv("HVDTRAIN_INIT_TIMEOUT_SECONDS", "0")
    errors = {}
    waits = start_rank(0, errors)
    line = ""
    deadline = time.monotonic() + 60
    while not line and time.monotonic() < deadline:
        waits.join(0.05)
        line = capfd.readouterr().err
    assert waits.is_alive()
    assert line == (
        "hvd.init: the job has waited for ranks 1, 2 for 0.2 s, and waits without a "
        "limit (HVDTRAIN_INIT_TIMEOUT_SECONDS).\n"
    )
    for thread in [start_rank(rank, errors) for rank in (1, 2)] + [waits]:
        thread.join(60)
    assert not errors


@pytest.mark.parametrize("name", environment.LIMITS)
@pytest.mark.parametrize("text", ["soon", "5m", "-1", "nan", "inf"])
def test_a_limit_that_is_not_seconds_is_one_line(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    error = re.escape(f"Received {name}={text}; expected seconds, 0 or more.")
    with pytest.raises(JobError, match=f"^{error}$"):
        membership.join(rank=0, size=2)


def test_a_launcher_that_has_ended_is_one_line(monkeypatch):
    monkeypatch.setattr(rendezvous, "_RETRY_SECONDS", 0.01)
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", HOST)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    with pytest.raises(JobError, match=f"port {port}, does not answer: .*refused"):
        rendezvous.wait_for_ranks(rank=0, size=2)
