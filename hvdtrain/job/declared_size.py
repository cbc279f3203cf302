"""What launchers say of the number of processes of a job; platforms: `platforms`.

A process that no launcher of Horovod has started is rank 0 of 1. Where the environment
says that it is one of several, each of them would train a model of its own. So would
several jobs, each of some of the processes.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hvdtrain.environment import is_elastic
from hvdtrain.job.world import JobError

_Count = Callable[[str], int]


class Declaration(NamedTuple):
    """A variable that says of how many processes this one is a part."""

    variable: str
    size: int


@dataclasses.dataclass(frozen=True)
class _Row:
    """A variable, and what its value says.

    Attributes:
        count: returns the number of processes by the value of the variable.
        beside: a variable that a process of the job has as well. A shell in an
            allocation has the size alone, and is no part of the job.
        is_bound: whether the number is a lower bound: a rank says nothing of those
            after it.
    """

    variable: str
    count: _Count = int
    beside: str = ""
    is_bound: bool = False


def _after_rank(rank: str) -> int:
    return int(rank) + 1


# The innermost first: the first that declares a number decides, so that `mpirun -np 1`
# in a larger allocation is alone on purpose.
_ROWS = (
    # horovodrun, hvdtrain.run
    _Row("HOROVOD_SIZE", beside="HOROVOD_RANK"),
    # Open MPI: "Environment variables set for MPI applications" in its manual.
    _Row("OMPI_COMM_WORLD_SIZE", beside="OMPI_COMM_WORLD_RANK"),
    # The PMI-1 of MPICH's Hydra, Intel MPI and Cray's PALS.
    _Row("PMI_SIZE", beside="PMI_RANK"),
    # Hydra again, where the ranks of a host are known alone.
    _Row("MPI_LOCALNRANKS", beside="MPI_LOCALRANKID", is_bound=True),
    # mpirun_rsh of MVAPICH2, by its user guide.
    _Row("MV2_COMM_WORLD_SIZE", beside="MV2_COMM_WORLD_RANK"),
    # jsrun of IBM Spectrum LSF.
    _Row("JSM_NAMESPACE_SIZE", beside="JSM_NAMESPACE_RANK"),
    # Flux, by flux-environment(7).
    _Row("FLUX_JOB_SIZE", beside="FLUX_TASK_RANK"),
    # srun, by its manual.
    _Row("SLURM_STEP_NUM_TASKS", beside="SLURM_PROCID"),
    # Cray's PALS without PMI; and PMIx, whose standard has no variable of a size.
    _Row("PALS_RANKID", _after_rank, is_bound=True),
    _Row("PMIX_RANK", _after_rank, is_bound=True),
)


def read(environ: Mapping[str, str]) -> Declaration | None:
    """Return what the environment declares; None if it says nothing of a size."""
    for row in _ROWS:
        if row.variable not in environ or (row.beside and row.beside not in environ):
            continue
        try:
            size = row.count(environ[row.variable])
        except (ValueError, TypeError, KeyError, AttributeError):
            # What another program reads, in a form that is not its own.
            continue
        if size > 1 or (size == 1 and not row.is_bound):
            return Declaration(row.variable, size)
    return None


def check(*, size: int) -> None:
    """Check that Horovod's job of `size` ranks is the one that was declared.

    Raises:
        JobError: a variable says that the job has more processes.
    """
    if is_elastic() or os.environ.get("HVDTRAIN_ALONE") == "1":
        return
    declared = read(os.environ)
    if declared and declared.size > size:
        # Every rank prints it: there may be no rank 0, where the variable is stale.
        raise JobError(
            f"Received {declared.variable} of {declared.size} processes, but Horovod "
            f"sees jobs of {size}: each would train a model of its own. Start them by "
            "horovodrun, or by the mpirun of the MPI that Horovod was built with "
            "(srun: --mpi=pmix); or set HVDTRAIN_ALONE=1 if each is to train alone, or "
            f"unset {declared.variable} if another job has left it."
        )
