"""Two hosts: names of this machine, and its network namespaces by scripts/hosts.sh."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HOSTS = ROOT / "scripts" / "hosts.sh"


# Rank 3 is killed and leaves a child, which would keep its connections open.
KILLED = """
import os, pathlib, signal, sys, time
import tensorflow as tf
import hvdtrain.keras as hvd

hvd.init()
total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
total(tf.ones([100]))
noticed = pathlib.Path(sys.argv[1])
if hvd.rank() == 3:
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    while not noticed.exists():
        time.sleep(0.1)
    os._exit(0)
try:
    total(tf.ones([100]))
except tf.errors.AbortedError as error:
    print("aborted:", error, flush=True)
    if hvd.rank() == 1:
        noticed.touch()
    raise
"""


# Within a host, survivors are tested by tests/unit/test_native_reduction.py.
@pytest.mark.release
def test_a_killed_rank_is_noticed_by_other_hosts_at_once(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    program = [sys.executable, str(script)]
    noticed = tmp_path / "noticed"
    job = run([str(noticed)], program=program, launcher="hosts", ranks=4, forked=False)
    assert job.returncode != 0
    # Rank 1 is connected to it, rank 2 is on its host.
    assert re.search(r"aborted: .*the connection to rank 3 has ended", job.text)
    assert re.search(r"aborted: .*rank 3 has ended", job.text)


def has_namespaces():
    """Whether this process may make network namespaces, and has the tools for it."""
    tools = ("ip", "nsenter", "taskset", "unshare")
    command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"]
    return (
        all(map(shutil.which, tools))
        and not subprocess.run(
            command, capture_output=True, timeout=30, check=False
        ).returncode
    )


def run_on_hosts(count, script, *arguments):
    """Run a script on hosts of one rank each."""
    names = ",".join(f"host{number + 1}:1" for number in range(count))
    command = [
        *(HOSTS, f"--hosts={count}", "horovodrun", "--gloo", "-np", str(count)),
        *("-H", names, "--network-interface", "eth0"),
        *(sys.executable, script, *arguments),
    ]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


# On two names of one machine: tests/parallel/test_native_reduction.py.
@pytest.mark.long
@pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2")
def test_two_hosts_of_this_machine_reduce_over_tcp(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import socket\n"
        "import hvdtrain.keras as hvd\n"
        "import tensorflow as tf\n"
        "from hvdtrain.collectives import transport\n"
        "hvd.init()\n"
        "total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))\n"
        "sum_of_ranks = int(total(tf.constant(hvd.rank() + 1)))\n"
        "print(socket.gethostname(), sum_of_ranks, transport.reduction_path())\n"
    )
    done = run_on_hosts(2, script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0]<stdout>:host1 3 TCP",
        "[1]<stdout>:host2 3 TCP",
    ]


# Rank 1 is stopped for a time, or killed, when it has received a part of the tensor. A
# killed rank leaves a child, until whose end horovodrun ends no other rank.
IN_A_RING = """
import os, pathlib, signal, socket, struct, subprocess, sys, threading, time
import numpy as np
import tensorflow as tf
import hvdtrain.keras as hvd

def received_bytes():
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            opened = socket.socket(fileno=int(name))
        except OSError:
            continue
        try:
            info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("=Q", info, 128)[0]  # tcpi_bytes_received
        except OSError:
            pass
        finally:
            opened.detach()
    return total

def stop():
    resume = f"sleep {seconds}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", resume]):
        os.kill(os.getpid(), signal.SIGSTOP)
    print("was stopped", flush=True)

def die():
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    while len(list(noticed.glob("*"))) < 2:
        time.sleep(0.1)
    os._exit(0)

def act(end):
    while received_bytes() < end:
        pass
    stop() if seconds else die()

hvd.init()
total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
total(tf.ones([100]))
noticed, seconds = pathlib.Path(sys.argv[1]), int(sys.argv[2])
actor = threading.Thread(target=act, args=[received_bytes() + 20_000_000])
if hvd.rank() == 1:
    actor.start()
try:
    assert np.all(total(tf.ones([40_000_000])) == hvd.size())
except tf.errors.AbortedError as error:
    print("aborted:", error, flush=True)
    (noticed / str(hvd.rank())).touch()
    raise
if hvd.rank() == 1:
    actor.join()
"""


@pytest.mark.long
@pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2")
def test_a_rank_that_is_killed_in_a_ring_is_named_by_the_others(tmp_path):
    script, noticed = tmp_path / "script.py", tmp_path / "noticed"
    script.write_text(IN_A_RING)
    noticed.mkdir()
    done = run_on_hosts(3, script, noticed, "0")
    assert done.returncode != 0
    # Another rank may have noticed it before, and has closed its connections.
    reason = r"aborted: .*the connections? to ranks? (\d, )?1(, \d)? ha(s|ve) ended"
    for rank in (0, 2):
        text = "\n".join(
            line for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")
        )
        assert len(re.findall(reason, text)) == 1, done.stdout + done.stderr


@pytest.mark.release
def test_a_rank_that_is_stopped_in_a_ring_is_waited_for(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_A_RING)
    program = [sys.executable, str(script)]
    # Less than Gloo's 30 s. The window of the connection is full: its buffers hold less
    # than the tensor.
    job = run([str(tmp_path), "27"], program=program, launcher="hosts", forked=False)
    assert job.returncode == 0, job.text
    assert "was stopped" in job.lines


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "usage: scripts/hosts.sh"),
        (["--delay=soon", "true"], "netem for --delay=soon"),
        (["--rate=much", "true"], "tbf for --rate=much"),
        (["--rate=", "true"], "received the option --rate=; expected --hosts=N"),
        (
            ["ssh", "host3", "true"],
            "received the host 'host3'; expected host1 to host2",
        ),
    ],
)
@pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2")
def test_wrong_arguments_of_hosts_are_one_line(arguments, error):
    done = subprocess.run(
        [HOSTS, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("hosts: ")
    assert error in done.stderr.splitlines()[-1]


def has_tbf():
    """Whether the kernel can limit the rate of an interface."""
    add = "tc qdisc add dev lo root tbf rate 1gbit burst 128kb latency 50ms"
    command = ["unshare", "--net", *add.split()]
    return (
        has_namespaces()
        and not subprocess.run(
            command, capture_output=True, timeout=30, check=False
        ).returncode
    )


@pytest.mark.skipif(not has_tbf(), reason="needs root, iproute2 and a kernel with tbf")
def test_the_rate_of_hosts_is_limited():
    command = [HOSTS, "--hosts=3", "--rate=20mbit", "ssh", "host3", "tc", "qdisc"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rate 20Mbit" in done.stdout
