"""python -m hvdtrain.verify, whose ranks are forks of a process with TensorFlow.

TensorFlow is imported once, not five to ten times. The ranks are connected by Gloo,
without horovodrun.
"""

import json
import multiprocessing
import os
import runpy
import signal
import sys
import threading

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from hvdtrain.installer.commands import Steps
from hvdtrain.verification import phases, worker
from hvdtrain.verification.trajectory import PhaseOptions

requests, jobs = multiprocessing.Pipe()


class ForkingSteps(Steps):
    """Steps whose commands run in forks of the process of `serve_jobs`."""

    def _call(self, command, environment, directory, timeout_seconds):
        requests.send((command, environment, self._log))
        return requests.recv()


def serve_jobs():
    """Run commands until hvdtrain.verify ends. Ranks leave it by an exception."""
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        jobs.send(run_job(*job))


def run_job(command, environment, log):
    """Run the ranks of a command of hvdtrain.verify; return an exit code."""
    arguments = command[command.index("-m") + 2 :]
    if command[0] != "horovodrun":
        return wait_for_ranks({start_rank(arguments, environment, log)})
    size = int(command[2])
    server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
    slots = get_host_assignments(parse_hosts(f"localhost:{size}"), size, size)
    server.init(slots)
    gloo = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_port),
        "HOROVOD_GLOO_IFACE": "lo",
    }
    ranks = {
        start_rank(arguments, environment | create_slot_env_vars(slot) | gloo, log)
        for slot in slots
    }
    # After the forks, which would copy the locks that this thread holds.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = wait_for_ranks(ranks)
    server.shutdown()
    server.server_close()
    return code


def start_rank(arguments, environment, log):
    if rank := os.fork():
        return rank
    jobs.close()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    options, *script = arguments
    worker.main(PhaseOptions(**json.loads(options)), script)
    sys.exit()


def wait_for_ranks(ranks):
    """Wait for the end of all; end them when one fails, and return its exit code."""
    first = 0
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status and not first:
            first = os.waitstatus_to_exitcode(status)
            for rank in ranks:
                os.kill(rank, signal.SIGTERM)
    return first


if __name__ == "__main__":
    if os.fork():
        jobs.close()
        phases.Steps = ForkingSteps
        runpy.run_module("hvdtrain.verify", run_name="__main__", alter_sys=True)
    else:
        requests.close()
        serve_jobs()
