"""Faults of one host while others reduce with it, between network namespaces.

Hosts of one rank. The long tests run two hosts; HVDTRAIN_HOST_FAULT_TABLE=FILE runs
eight as well, and writes the seconds of docs/troubleshooting.md to FILE, one row for
each job.
"""

import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
from test_hosts import HOSTS, ROOT, has_namespaces

PROGRAM = pathlib.Path(__file__).parent / "reducing_program.py"
TABLE = os.environ.get("HVDTRAIN_HOST_FAULT_TABLE")
STALL_SECONDS = 12
# What the others print. A rank that has lost rank 1 closes its own connections.
LOST = r"the connections? to ranks? (\d, )*1(, \d)* ha(s|ve) ended"
CAUSES = {
    "kill": r"rank 1 on host2 was killed by (SIGKILL|a signal)",
    "stop": rf"{LOST}|Missing ranks: 1\b",
    "cut": rf"{LOST}: host 10\.\S+ does not answer, since it is down or the network",
    "late": r"Missing ranks: 1\.",
    # Also on the rank whose own interface is down.
    "down": "nothing arrives from rank [01]: host 10.* does not answer, since it is",
    "slow": "",
}


@pytest.mark.long
@pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2")
@pytest.mark.parametrize("hosts", [2, 8] if TABLE else [2])
@pytest.mark.parametrize(
    "fault",
    [
        "kill",
        "down",
        *(
            pytest.param(fault, marks=pytest.mark.release)
            for fault in CAUSES
            if fault not in ("kill", "down")
        ),
    ],
)
def test_a_fault_of_one_host(fault, hosts):
    names = ",".join(f"host{number + 1}:1" for number in range(hosts))
    command = [
        *(HOSTS, f"--hosts={hosts}", "horovodrun", "--gloo", "-np", str(hosts)),
        *("-H", names, "--network-interface", "eth0", sys.executable, PROGRAM, fault),
    ]
    check, shutdown = (12, 60) if fault == "down" else (3, STALL_SECONDS)
    limits = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(check),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(shutdown),
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **limits},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    end, text = time.time(), done.stdout + done.stderr
    begun = re.search(r"fault at ([\d.]+)", text)
    assert begun, text
    seconds = end - float(begun[1])
    assert re.search(CAUSES[fault], text), text
    if fault in ("late", "slow", "down"):
        assert done.returncode == 0, text
        assert len(re.findall(r"rank \d is done over TCP", text)) == hosts, text
    else:
        assert done.returncode != 0, text
        # The launcher needs some seconds after the limit.
        assert seconds < STALL_SECONDS + 30
    if TABLE:
        with open(TABLE, "a") as file:
            file.write(f"| {fault} | {hosts} | {done.returncode} | {seconds:.1f} |\n")
