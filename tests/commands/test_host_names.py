"""Jobs of a host whose own name has no address, or one by which nobody reaches it.

Each job runs in namespaces of its own: host pod4 with the loopback and eth0.
"""

import itertools
import json
import subprocess
import sys

import pytest
from test_hosts import ROOT, has_namespaces

pytestmark = pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2")

PROGRAM = """
import hvdtrain.keras as hvd
import psutil
import tensorflow as tf
hvd.init()
print("sum", int(hvd.allreduce(tf.constant(hvd.rank() + 1), op=hvd.Sum)))
print("at", {each.laddr.ip for each in psutil.Process().net_connections("inet")})
"""
CALLER = """
import sys
import hvdtrain
def script(path):
    exec(open(path).read())
hvdtrain.run(script, args=sys.argv[1:], np=2)
"""
TASKS = "; ".join(
    "TF_CONFIG='{}' {} \"$1\" & pid{}=$!".format(
        json.dumps(
            {
                "cluster": {"worker": ["pod4:4444", "pod4:4445"]},
                "task": {"type": "worker", "index": rank},
            }
        ),
        sys.executable,
        rank,
    )
    for rank in range(2)
)
# Followed by the path of the program.
WAYS = {
    "gloo": ["horovodrun", "--gloo", "-np", "2", sys.executable],
    "own name": ["horovodrun", "--gloo", "-np", "2", "-H", "pod4:2", sys.executable],
    "mpi": ["horovodrun", "--mpi", "-np", "2", sys.executable],
    "mpirun": ["mpirun", "--bind-to", "none", "-np", "2", sys.executable],
    "launch": [sys.executable, "-m", "hvdtrain.launch", "--nproc_per_node=2"],
    "run": [sys.executable, "-c", CALLER],
    "platform": ["sh", "-c", f"{TASKS}; wait $pid0 && wait $pid1", "sh"],
}
IPV4 = "ip address add 10.77.0.4/24 dev eth0; ip route add default via 10.77.0.1"
IPV6 = "ip address add fd00::4/64 dev eth0 nodad; ip route add default via fd00::1"
# What sets up the host, and its /etc/hosts.
HOSTS = {
    "missing": (IPV4, "127.0.0.1 localhost"),
    "another host's": (IPV4, "127.0.0.1 localhost\n10.9.9.9 pod4"),
    "Debian's": (IPV4, "127.0.0.1 localhost\n127.0.1.1 pod4"),
    "::1 first": (f"{IPV4}; {IPV6}", "::1 localhost pod4\n10.77.0.4 pod4"),
    "IPv6": (IPV6, "::1 localhost\nfd00::4 pod4"),
    "IPv6 alone": (
        f"{IPV6}; ip address del 127.0.0.1/8 dev lo",
        "::1 localhost\nfd00::4 pod4",
    ),
}
SET_UP = """
set -e
hostname pod4
ip link set lo up
ip link add eth0 type veth peer name other
ip link set other up
ip link set eth0 up
mount -t tmpfs tmpfs /run
# mpirun's files have the name of the host and its own PID, which is that of others.
export TMPDIR=/run
echo "$2" >/run/hosts
echo 'hosts: files' >/run/nsswitch.conf
mount --bind /run/hosts /etc/hosts
mount --bind /run/nsswitch.conf /etc/nsswitch.conf
eval "$1"
shift 2
"$@"
"""


def run_on(host, *command):
    """Run a command on a host of `HOSTS`."""
    namespaces = ["-n", "-m", "-u", "-p", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.run(
        ["unshare", *namespaces, "sh", "-c", SET_UP, "sh", *HOSTS[host], *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


# A name that is missing for all ways, and the other names for those that use it most.
# One is in the README's command, one is long, and the others are left out of CI.
CASES = [
    *(("missing", way) for way in WAYS),
    *itertools.product(list(HOSTS)[1:-1], ["gloo", "platform"]),
]


@pytest.mark.parametrize(
    ("host", "way"),
    [
        CASES[0],
        *(pytest.param(*case, marks=pytest.mark.release) for case in CASES[1:]),
    ],
)
@pytest.mark.long
def test_a_job_of_one_host_does_not_need_its_name(program, host, way):
    done = run_on(host, *WAYS[way], program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sum 3") == 2
    if way in ("gloo", "own name", "launch", "run"):
        assert done.stdout.count("at {'127.0.0.1'}") == 2


@pytest.mark.parametrize("way", ["gloo", "launch"])
def test_a_host_without_an_ipv4_loopback_is_one_line(program, way):
    done = run_on("IPv6 alone", *WAYS[way], program)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1].rstrip(".")
    assert "pod4 has no IPv4 loopback address, by which the ranks of a host" in line
    assert line.endswith("ip link set lo up; ip address add 127.0.0.1/8 dev lo")


def test_another_host_without_an_address_is_one_line():
    command = ["horovodrun", "--gloo", "-np", "2", "-H", "pod4:1,pod5:1", "true"]
    done = run_on("IPv6", *command)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "horovodrun: could not connect to some hosts via ssh: pod4 finds no IPv4 "
        "address of pod5. Correct the name, or add it to the DNS or /etc/hosts"
    )
