"""Agents as the tasks of a Slurm job, which submitit submits."""

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import submitit

from hvdtrain.runner import agent
from hvdtrain.runner.channel import Address
from hvdtrain.runner.engine import PlacedAgents, RunError

_END_SECONDS = 20
# All users share the scheduler, which is slow to answer if it is asked often.
_QUERY_SECONDS = 5.0


class Slurm:
    """Tasks of one Slurm job, one per rank.

    `start_timeout_seconds` of `hvdtrain.run` includes the wait in Slurm's queue.
    """

    is_local = False

    def __init__(self, *, folder: str = "hvdtrain-slurm", **parameters: Any) -> None:
        """Place ranks by `sbatch` with these options.

        Args:
            folder: directory that all nodes see, for the script and the logs of each
                job.
            **parameters: as `submitit.SlurmExecutor` takes them, such as
                `partition="cpu"`, `time="4:00:00"` or `cpus_per_task=4`. `nodes` may be
                a range, such as "2-4"; by default Slurm chooses the number of nodes.
        """
        self._folder = folder
        self._parameters = parameters

    @contextlib.contextmanager
    def place(self, address: Address, size: int) -> Iterator[PlacedAgents]:
        """Submit a job with a task for each rank; see `Engine.place`."""
        job = self._submit(address, size)
        try:
            yield PlacedAgents(size, job.failure, job.advice)
            job.wait()
        finally:
            job.cancel()

    def _submit(self, address: Address, size: int) -> "_SlurmJob":
        os.makedirs(self._folder, exist_ok=True)
        # Readable by this user only: the address contains the key of the job.
        folder = tempfile.mkdtemp(prefix="job-", dir=self._folder)
        try:
            executor = submitit.SlurmExecutor(folder)
            executor.update_parameters(**self._options(size))
            python_path = os.environ.get("PYTHONPATH", "")
            with _outside_of_job():
                job = executor.submit(_serve, address, python_path)
                return _SlurmJob(job.job_id, folder)
        except RuntimeError as error:
            text = str(error).strip().splitlines() or ["sbatch has failed"]
            reason = text[-1].removeprefix("sbatch: error: ")
            raise RunError(f"Slurm did not accept the job: {reason}.") from error

    def _options(self, size: int) -> dict[str, Any]:
        # The default of submitit is 5 minutes; None is that of the partition.
        options: dict[str, Any] = {"job_name": "hvdtrain.run", "time": None}
        options |= self._parameters
        job = {
            # submitit has no option for a range of nodes, nor for all tasks.
            "nodes": options.pop("nodes", f"1-{size}"),
            "ntasks": size,
            # The agents of a second start would find no caller.
            "no-requeue": True,
        }
        # The agents need no MPI. One that fails ends the job.
        step = ["--mpi=none", "--kill-on-bad-exit=1"]
        if "cpus_per_task" in options:
            # From Slurm 22.05 on srun does not inherit it from the job.
            step.append(f"--cpus-per-task={options['cpus_per_task']}")
        path = f"export PYTHONPATH={shlex.quote(agent.search_path())}"
        return options | {
            "additional_parameters": job | options.get("additional_parameters", {}),
            "srun_args": [*step, *options.get("srun_args", [])],
            "setup": [path, *options.get("setup", [])],
        }

    def __str__(self) -> str:
        """Return the name of the engine in messages."""
        return "Slurm"


def _serve(address: Address, python_path: str) -> None:
    # For programs that the ranks start: until now it is the caller's `sys.path`.
    os.environ["PYTHONPATH"] = python_path
    # Slurm sends SIGUSR2 to all processes of a job before its time limit. submitit's
    # handler would end the agent, which kills its ranks in their last checkpoint. Ranks
    # inherit that it is ignored, unless they have a handler as `training.fit` has.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    agent.serve(address)


@contextlib.contextmanager
def _outside_of_job() -> Iterator[None]:
    """Remove the variables of a Slurm job in which the caller runs.

    sbatch passes them on, and srun would take its options from them.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF" or name.startswith("SBATCH_")
    }
    with submitit.helpers.clean_env():
        os.environ.update(kept)
        yield


class _SlurmJob:
    """A job in Slurm's queue. Accounting, which `sacct` needs, may be off."""

    def __init__(self, number: str, folder: str) -> None:
        self._number = number
        self._folder = pathlib.Path(folder)
        self._queried = time.monotonic()

    def failure(self) -> str:
        """Return why the job has ended, or an empty text."""
        if time.monotonic() - self._queried < _QUERY_SECONDS:
            return ""
        self._queried = time.monotonic()
        if self._state():
            return ""
        return f"job {self._number} has ended: {self._cause()}"

    def advice(self) -> str:
        """Return the state of the job, and what to do about it."""
        state = self._state() or "not in the queue"
        advice = "start_timeout_seconds includes the wait in the queue"
        return f"Job {self._number} is {state}; {advice}"

    def wait(self) -> None:
        """Wait until the job has ended."""
        deadline = time.monotonic() + _END_SECONDS
        while self._state() and time.monotonic() < deadline:
            time.sleep(1)

    def cancel(self) -> None:
        """End the job, if it has not ended."""
        subprocess.run(["scancel", "--quiet", self._number], check=False)

    def _state(self) -> str:
        """Return state and reason, such as "PENDING (Resources)"; empty at the end."""
        command = ["squeue", "--noheader", f"--jobs={self._number}", "--format=%T (%r)"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode and "Invalid job id" not in found.stderr:
            return "unknown: squeue has failed"
        return found.stdout.strip()

    def _cause(self) -> str:
        """Return the last line of the logs that is not about the consequences."""
        lines = [
            line
            for log in sorted(self._folder.glob("*.err"))
            for line in log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        causes = [line for line in lines if not line.startswith(("srun:", "submitit "))]
        last = (causes or lines or ["it has written no errors"])[-1]
        return f"{last.rstrip('.')}. Logs: {self._folder}"
