"""Starts a program on several hosts as a platform does: see test_platforms.py.

starting_program.py KIND HOSTS RESTARTS COMMAND...

KIND: the platform. HOSTS: names, with commas; localhost and those of scripts/hosts.sh.
RESTARTS: how often a process that fails is started again, each by itself. The exit code
is the highest one of the last processes.
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import time


def variables(kind, rank, hosts, port):
    """Return what a platform sets for the process on a host."""
    names = [f"{host}:{port + i}" for i, host in enumerate(hosts)]
    if kind == "chief":
        task = {"type": "worker", "index": rank - 1} if rank else {"type": "chief"}
        cluster = {
            "chief": names[:1],
            "worker": names[1:],
            "evaluator": ["localhost:1"],
        }
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
    if kind == "workers":
        task = {"type": "worker", "index": rank}
        return {"TF_CONFIG": json.dumps({"cluster": {"worker": names}, "task": task})}
    if kind == "torch":
        address = {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(port)}
        return address | {"RANK": str(rank), "WORLD_SIZE": str(len(hosts))}
    if kind == "trainer":
        size = {"PET_NNODES": str(len(hosts)), "PET_NPROC_PER_NODE": "1"}
        address = {"PET_MASTER_ADDR": hosts[0], "PET_MASTER_PORT": str(port)}
        return size | address | {"PET_NODE_RANK": str(rank)}
    if kind == "vertex":
        pools = {"workerpool0": names[:1], "workerpool1": names[1:]}
        task = {"type": f"workerpool{min(rank, 1)}", "index": max(rank - 1, 0)}
        config = {"cluster": pools, "task": task, "environment": "cloud"}
        return {"CLUSTER_SPEC": json.dumps(config)}
    if kind == "sagemaker":
        return {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": hosts[rank]}
    index = {"JOB_COMPLETION_INDEX": str(rank), "HVDTRAIN_SIZE": str(len(hosts))}
    return index | {"HVDTRAIN_ADDRESS": names[0]}


def start(host, environ, command):
    if host == "localhost":
        return subprocess.Popen(command, env=os.environ | environ)
    words = [*(f"{name}={value}" for name, value in environ.items()), *command]
    return subprocess.Popen(["ssh", host, "env", *map(shlex.quote, words)])


def main(kind, hosts, restarts, *command):
    hosts = hosts.split(",")
    with socket.create_server(("localhost", 0)) as found:
        port = found.getsockname()[1]
    environs = [variables(kind, rank, hosts, port) for rank in range(len(hosts))]
    running = dict(enumerate(map(start, hosts, environs, [command] * len(hosts))))
    left = dict.fromkeys(running, int(restarts))
    codes = dict.fromkeys(running, 0)
    while running:
        for rank, process in list(running.items()):
            if process.poll() is None:
                continue
            codes[rank] = abs(process.returncode)
            del running[rank]
            if codes[rank] and left[rank]:
                left[rank] -= 1
                running[rank] = start(hosts[rank], environs[rank], command)
        time.sleep(0.02)
    return max(codes.values())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
