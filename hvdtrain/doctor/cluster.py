"""The scheduler of this job, and other hosts by ssh."""

import concurrent.futures
import difflib
import itertools
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Mapping, Sequence

from hvdtrain import __version__, environment
from hvdtrain.doctor.finding import (
    CommandResult,
    Finding,
    broken,
    fine,
    run,
    warning,
)
from hvdtrain.environment import JOB_SECRET
from hvdtrain.install import compatibility
from hvdtrain.job.launchers import SCHEDULERS

_READ_BY_JOBS = ("HVDTRAIN_", "HOROVOD_")
_SET_BY_USERS = (
    *_READ_BY_JOBS,
    *("OMPI_MCA_", "NCCL_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_"),
)
# Of Horovod's build, whose files are not installed.
_OF_BUILD = tuple(
    f"HOROVOD_{name}" for name in ("WITH", "GPU", "BUILD", "CUDA", "NCCL", "ROCM")
)
_SSH_SECONDS = 10
_CLOCK_SECONDS = 2.0
# Starts the output of our command: a login shell may print a greeting before it.
_MARK = "hvdtrain-clock"


def check(hosts: Sequence[str], *, ssh_port: int) -> list[Finding]:
    """Return the findings on the scheduler and the other hosts of the job."""
    findings = [check_scheduler(os.environ), check_variables(os.environ)]
    if not hosts:
        return findings
    if not shutil.which("ssh"):
        remedy = "install it: apt-get install openssh-client"
        return [*findings, broken("ssh", "is not on the PATH", remedy)]
    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        return [*findings, *pool.map(lambda host: check_host(host, ssh_port), hosts)]


def check_scheduler(environ: Mapping[str, str]) -> Finding:
    """Describe the scheduler's job, and check that it has more than one task."""
    jobs = {
        scheduler: environ[variable]
        for scheduler, variable in SCHEDULERS.items()
        if variable in environ
    }
    if not jobs:
        return fine("scheduler", "none, this is not a job of one")
    if "Slurm" not in jobs:
        listed = ", ".join(f"{name}, job {job}" for name, job in jobs.items())
        return fine("scheduler", listed)
    tasks = environ.get("SLURM_NTASKS", "1")
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    detail = (
        f"Slurm, job {jobs['Slurm']}: {tasks} tasks on {nodes} nodes, "
        f"{environ.get('SLURM_CPUS_PER_TASK', '1')} cores per task"
    )
    per_node = environ.get("SLURM_NTASKS_PER_NODE", "0")
    is_known = all(each.isdigit() for each in (tasks, nodes, per_node))
    if is_known and int(per_node) * int(nodes) > int(tasks):
        detail += f"; --ntasks-per-node={per_node} was asked for"
        remedy = f"--ntasks={tasks} takes precedence: pass only one of the two options"
        return warning("scheduler", detail, remedy)
    if tasks == "1":
        remedy = "mpirun will have one slot: ask for more, sbatch --ntasks-per-node=N"
        return warning("scheduler", detail, remedy)
    return fine("scheduler", detail)


def check_variables(environ: Mapping[str, str]) -> Finding:
    """List the variables that change how Horovod and the MPI behave."""
    # The output is sent to others.
    shown = set(environ) - {JOB_SECRET}
    named = sorted(name for name in shown if name.startswith(_SET_BY_USERS))
    if not named:
        return fine("variables", "none that change Horovod or the MPI")
    if wrong := " ".join(environment.wrong_values()):
        return broken("variables", wrong.removesuffix("."), "correct or unset them")
    if unknown := _unknown(named):
        nearest = ", ".join(filter(None, unknown.values()))
        remedy = f"did you mean {nearest}?" if nearest else "unset them"
        return warning("variables", f"nothing reads {', '.join(unknown)}", remedy)
    return fine("variables", ", ".join(f"{name}={environ[name]}" for name in named))


def _unknown(names: Sequence[str]) -> dict[str, str]:
    """Return the names that neither hvdtrain nor Horovod reads, with the nearest."""
    installed = compatibility.read_installed().horovods
    prefixes = _READ_BY_JOBS if installed else _READ_BY_JOBS[:1]
    given = [n for n in names if n.startswith(prefixes) and not n.startswith(_OF_BUILD)]
    known = {*environment.VARIABLES, *environment.HOROVOD_VARIABLES}
    for path in itertools.chain(*(each.rglob("*") for each in installed[:1] if given)):
        if path.suffix in (".py", ".so"):
            found = re.findall(rb"HOROVOD_[A-Z][A-Z0-9_]+", path.read_bytes())
            known.update(map(bytes.decode, found))
    return {
        name: next(iter(difflib.get_close_matches(name, known, n=1)), "")
        for name in given
        if name not in known
    }


def check_host(host: str, ssh_port: int) -> Finding:
    """Log in to a host by ssh; compare its clock, address and version of hvdtrain."""
    topic = f"host {host}"
    try:
        socket.getaddrinfo(host, ssh_port)
    except OSError as error:
        remedy = "correct the name, or add it to the DNS or /etc/hosts"
        return broken(topic, f"has no address: {error.strerror}", remedy)
    remote = f"date +{_MARK}%s.%N; python -m hvdtrain.doctor --version"
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_SECONDS}"]
    command += ["-p", str(ssh_port), host, remote]
    before = time.time()
    done = run(command, timeout_seconds=3 * _SSH_SECONDS)
    after = time.time()
    clock, lines = _parse(done.output)
    if clock is None:
        remedy = f"it must work without a password: {shlex.join(command[:-1])} true"
        return broken(topic, f"ssh fails: {done.last_lines}", remedy)
    offset = max(before - clock, clock - after, 0.0)
    return _compare(topic, lines, done, offset=offset, seconds=after - before)


def _parse(output: str) -> tuple[float | None, list[str]]:
    """Return the clock of a host, None if it is missing, and the lines after it."""
    _, mark, rest = output.partition(_MARK)
    lines = rest.splitlines()
    # On some systems date prints no nanoseconds: "1700000000.N".
    seconds = re.match(r"\d+(\.\d+)?", lines[0]) if mark and lines else None
    return (float(seconds[0]), lines[1:]) if seconds else (None, [])


def _compare(
    topic: str, lines: list[str], done: CommandResult, *, offset: float, seconds: float
) -> Finding:
    """Return the finding on a host to which ssh works.

    Args:
        lines: the output of `hvdtrain.doctor --version`.
        done: the result of ssh.
        offset: seconds by which the clocks differ at least.
        seconds: time that the command took, the uncertainty of `offset`.
    """
    detail = f"ssh works, its clock is within {offset + seconds:.1f} s of this one"
    if done.code:
        remedy = (
            "install the same environment at the same path there; ssh does not run a "
            "login shell: set the PATH in ~/.ssh/environment or by sshd's SetEnv"
        )
        detail = f"ssh works, but python -m hvdtrain.doctor fails: {done.last_lines}"
        return broken(topic, detail, remedy)
    version = lines[-1] if lines else "nothing"
    if version != __version__:
        detail += f"; hvdtrain {version} there and {__version__} here"
        return broken(topic, detail, "install the same version on all hosts")
    if offset > _CLOCK_SECONDS:
        detail = f"ssh works, its clock differs by {offset:.1f} s"
        return warning(
            topic, detail, "set the clocks by NTP: logs are compared by time"
        )
    return fine(topic, detail)
