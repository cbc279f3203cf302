"""Agents as the tasks of a Slurm job, which submitit submits."""

import contextlib
import os
import pathlib
import re
import shlex
import shutil
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
_FIRST_WAIT_SECONDS = 0.5
_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
# Not the line "*** JOB ... CANCELLED ... DUE TO TIME LIMIT ***".
_CONSEQUENCE = re.compile(r"srun: |submitit |.*error: \*\*\* STEP ")


class Slurm:
    """Tasks of one Slurm job, one per rank.

    `start_timeout_seconds` of `hvdtrain.run` includes the wait in Slurm's queue.
    """

    is_local = False

    def __init__(self, *, folder: str = "hvdtrain-slurm", **parameters: Any) -> None:
        """Place ranks by `sbatch` with these options.

        Args:
            folder: directory that all nodes see, for the script and the logs of each
                job, which are deleted if it succeeds.
            **parameters: as `submitit.SlurmExecutor` takes them, such as
                `partition="cpu"`, `time="4:00:00"` or `cpus_per_task=4`. `nodes` may be
                a range, such as "2-4"; by default Slurm chooses the number of nodes.
        """
        for name in ("setup", "srun_args", "teardown"):
            if isinstance(parameters.get(name), str):
                raise TypeError(
                    f"Received {name}={parameters[name]!r}; expected a list of strings."
                )
        self._folder = folder
        self._parameters = parameters

    @contextlib.contextmanager
    def place(self, address: Address, size: int) -> Iterator[PlacedAgents]:
        """Submit a job with a task for each rank; see `Engine.place`."""
        _check_commands()
        folder = self._make_folder()
        job = _SlurmJob(folder)
        is_kept = False
        try:
            job.submit(self._options(size), address)
            is_kept = True
            yield PlacedAgents(size, job.failure, job.advice)
            job.wait()
            is_kept = False
        finally:
            job.cancel()
            # The logs of a job that has failed are kept.
            if not is_kept:
                shutil.rmtree(folder, ignore_errors=True)

    def _make_folder(self) -> pathlib.Path:
        # As submitit does: its script and logs would be in another directory.
        parent = pathlib.Path(self._folder).expanduser().absolute()
        parent.mkdir(parents=True, exist_ok=True)
        # Readable by this user only: the address contains the key of the job.
        return pathlib.Path(tempfile.mkdtemp(prefix="job-", dir=parent))

    def _options(self, size: int) -> dict[str, Any]:
        options: dict[str, Any] = {
            "job_name": "hvdtrain.run",
            # submitit would limit the job to 5 minutes; None leaves the limit to Slurm.
            "time": None,
            # Slurm may reject a workload characterization key that it does not know.
            "wckey": None,
        }
        options |= self._parameters
        job = {
            # submitit has no option for a range of nodes, nor for all tasks.
            "nodes": options.pop("nodes", f"1-{size}"),
            "ntasks": size,
            # The agents of a second start would find no caller.
            "no-requeue": True,
        }
        job |= options.get("additional_parameters") or {}
        # The agents need no MPI. One that fails ends the job.
        step = ["--mpi=none", "--kill-on-bad-exit=1"]
        given = {
            name.replace("_", "-"): value for name, value in (options | job).items()
        }
        if cores := given.get("cpus-per-task"):
            # From Slurm 22.05 on srun does not inherit it from the job.
            step.append(f"--cpus-per-task={cores}")
        path = f"export PYTHONPATH={shlex.quote(agent.search_path())}"
        return options | {
            "additional_parameters": job,
            "srun_args": [*step, *(options.get("srun_args") or [])],
            "setup": [path, *(options.get("setup") or [])],
        }

    def __str__(self) -> str:
        """Return the name of the engine in messages."""
        return "Slurm"


def _check_commands() -> None:
    missing = [name for name in _COMMANDS if not shutil.which(name)]
    if missing:
        raise RunError(
            f"Received a PATH without {', '.join(missing)}; expected a host that "
            "submits to Slurm, such as a login node."
        )


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

    def __init__(self, folder: pathlib.Path) -> None:
        self._number = ""
        self._folder = folder
        self._queried = time.monotonic()

    def submit(self, options: dict[str, Any], address: Address) -> None:
        """Submit the job; see `Engine.place` for the errors."""
        executor = submitit.SlurmExecutor(self._folder)
        try:
            executor.update_parameters(**options)
        except ValueError as error:
            # The other lines are all parameters that exist.
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"Received parameters that submitit rejects: {reason}; expected those "
                "of submitit.SlurmExecutor, and other options of sbatch in "
                "additional_parameters."
            ) from None
        python_path = os.environ.get("PYTHONPATH", "")
        try:
            with _outside_of_job():
                self._number = executor.submit(_serve, address, python_path).job_id
        except submitit.core.utils.FailedJobError as error:
            text = str(error).strip().splitlines() or ["sbatch has failed"]
            reason = text[-1].removeprefix("sbatch: error: ")
            raise RunError(f"Slurm did not accept the job: {reason}.") from error

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
        seconds = _FIRST_WAIT_SECONDS
        while self._state() and time.monotonic() < deadline:
            time.sleep(seconds)
            seconds = min(2 * seconds, _QUERY_SECONDS)

    def cancel(self) -> None:
        """End the job, if it has not ended."""
        if number := self._number or self._find():
            subprocess.run(["scancel", "--quiet", number], check=False)

    def _find(self) -> str:
        """Return the number of a job that an interrupted `submit` may have submitted.

        Other jobs may have the same name, but not a script in the same folder.
        """
        command = ["squeue", "--me", "--noheader", "--format=%i %o"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in found.stdout.splitlines():
            number, _, script = line.strip().partition(" ")
            if script.startswith(f"{self._folder}/"):
                return number
        return ""

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
        causes = [line for line in lines if not _CONSEQUENCE.match(line)]
        last = (causes or lines or ["it has written no errors"])[-1]
        return f"{last.rstrip('.')}. Logs: {self._folder}"
