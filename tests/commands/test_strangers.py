"""A process that is not of the job tries to enter it as a rank, and is refused."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys

import psutil
import pytest

# Rank 1 comes late, so that its place is free.
PROGRAM = """
import os, pathlib, sys, time

def train(folder):
    import hvdtrain.keras as hvd

    names = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
    folder = pathlib.Path(folder)
    if os.environ["HOROVOD_RANK"] == "0":
        address = folder / "address"
        address.with_suffix(".new").write_text(" ".join(os.environ[n] for n in names))
        address.with_suffix(".new").rename(address)
    else:
        deadline = time.monotonic() + 200
        while not (folder / "tried").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    hvd.init()
    secret = os.environ["HOROVOD_JOB_SECRET"].encode()
    assert len(secret) == 64
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert secret not in path.read_bytes(), path
        except OSError:
            pass
    return hvd.allgather_object(f"rank {hvd.rank()}")

if __name__ == "__main__":
    if sys.argv[2] == "run":
        import hvdtrain
        print(hvdtrain.run(train, args=[sys.argv[1]], np=2)[0])
    else:
        print(train(sys.argv[1]))
"""
# As another user, where this one may choose.
STRANGER = """
import encodings.idna, http.client, os, sys
if not os.getuid():
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
host, port = sys.argv[1:]
signed = {"X-Horovod-Nonce": "1", "X-Horovod-Digest": "1", "X-Horovod-Signature": "1"}
for headers in {}, signed:
    for method in "GET", "PUT", "DELETE", "HEAD", "POST":
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        connection.request(method, "/global/1", b"an address", headers)
        print(connection.getresponse().status)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    ["gloo", pytest.param("alone", marks=pytest.mark.release)],
    ids=["horovodrun", "run"],
)
def test_a_process_without_the_secret_does_not_enter_a_job(start, tmp_path, launcher):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mode = "run" if launcher == "alone" else "horovodrun"
    job = start(
        [str(tmp_path), mode],
        launcher=launcher,
        program=[sys.executable, str(program)],
        environment={"HOROVOD_JOB_SECRET": "of another job"},
    )
    address = tmp_path / "address"
    job.wait_until(address.exists, "the address")
    host, port = address.read_text().split()
    # It sends nothing, and blocks nobody.
    with socket.create_connection((host, int(port)), timeout=60):
        assert statuses_of_stranger(host, port) == ["403"] * 10
        text = end_of_stranger(host, port)
        assert "The rendezvous refuses this process" in text
        (tmp_path / "tried").touch()
        job.wait()
    assert job.returncode == 0, job.text
    assert "['rank 0', 'rank 1']" in job.lines


def statuses_of_stranger(host, port):
    done = subprocess.run(
        [sys.executable, "-I", "-c", STRANGER, host, port],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def end_of_stranger(host, port):
    """Return what a rank of Horovod prints that has all variables but the secret."""
    variables = {
        **{"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"},
        **{"HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CONTROLLER": "gloo"},
        **{"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo"},
        **{"HOROVOD_GLOO_RENDEZVOUS_ADDR": host, "HOROVOD_GLOO_RENDEZVOUS_PORT": port},
    }
    done = subprocess.run(
        [sys.executable, "-c", "import horovod.tensorflow as hvd; hvd.init()"],
        env={"PATH": os.environ["PATH"], "HOME": str(pathlib.Path.home())} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    return done.stderr


# Horovod without hvdtrain: rank 0 does not wait for rank 1 before Gloo listens.
LISTENING = """
import os, pathlib, sys, time
import horovod.tensorflow as hvd
import tensorflow as tf

deadline = time.monotonic() + 200
while os.environ["HOROVOD_RANK"] == "1" and not pathlib.Path(sys.argv[1]).exists():
    assert time.monotonic() < deadline
    time.sleep(0.05)
hvd.init()
print("sum", int(hvd.allreduce(tf.constant(hvd.rank() + 1), op=hvd.Sum)))
"""


@pytest.mark.long
def test_a_process_without_the_token_is_no_peer_of_gloo(start, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(LISTENING)
    tried = tmp_path / "tried"
    job = start([str(tried)], launcher="gloo", program=[sys.executable, str(program)])
    job.wait_until(lambda: listening(job.ranks().get(0)), "a port of rank 0")
    [address] = listening(job.ranks()[0])
    for text in (bytes(8), b"a" * 100, b"short", b""):
        with socket.create_connection(address, timeout=60) as stranger:
            stranger.sendall(text)
            # It may be closed already.
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
            assert has_been_closed(stranger)
    with contextlib.ExitStack() as stack:

        def connect(at):
            return stack.enter_context(socket.create_connection(at, timeout=60))

        # More than may be open. One that has sent a part is closed at once.
        silent = [connect(address) for _ in range(20)]
        assert has_been_closed(silent[0])
        silent[-1].sendall(b"s")
        assert has_been_closed(silent[-1])
        # Rank 1 listens in place of rank 0 if its port is the lower one.
        with suspended(job.ranks()[0]):
            tried.touch()
            job.wait_until(
                lambda: listening(job.ranks().get(1)) or is_connected(job, address),
                "a port or a connection of rank 1",
            )
            for at in listening(job.ranks()[1]):
                with contextlib.suppress(ConnectionError):
                    connect(at)
        job.wait()
    assert job.returncode == 0, job.text
    assert job.lines.count("sum 3") == 2


@contextlib.contextmanager
def suspended(process):
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def is_connected(job, address):
    try:
        return any(c.raddr == address for c in job.ranks()[1].net_connections("tcp"))
    except psutil.Error:
        return False


def listening(process):
    """Return the addresses at which a process listens."""
    try:
        connections = process.net_connections("tcp") if process else []
    except psutil.Error:
        return []
    return [c.laddr for c in connections if c.status == psutil.CONN_LISTEN]


def has_been_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
