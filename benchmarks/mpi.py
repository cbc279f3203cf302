"""The time of MPI's own allreduce, measured before Horovod starts.

Horovod's thread calls MPI in each of its cycles, and Open MPI serializes the calls of
threads: while that thread runs, an allreduce of microseconds takes milliseconds.
"""

import importlib
import importlib.util
import os
import statistics
import time
import types
from collections.abc import Sequence

import numpy as np

from hvdtrain import output
from hvdtrain.job import launchers

_WARM_UP = 3
_MAX_REPEATS = 5000


def measure(sizes: Sequence[int], *, rounds: int, seconds: float) -> dict[int, float]:
    """Return the median seconds of an allreduce of float32 by its bytes.

    Call it before `job.start`, on all ranks. Horovod then uses the MPI that mpi4py has
    started. The dict is empty if this is no MPI job, or mpi4py is missing.

    Args:
        sizes: bytes of each message.
        rounds: rounds of each size.
        seconds: of each round, about.
    """
    is_mpi = launchers.launch().size > 1 and not launchers.is_gloo(os.environ)
    if not is_mpi or not importlib.util.find_spec("mpi4py"):
        return {}
    launchers.locate()
    # `job.start` sets these too, but too late: MPI reads them when it starts.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # TensorFlow exports the symbols of its own hwloc, and Open MPI binds lazily: if
    # TensorFlow is loaded after MPI has started, MPI_Finalize calls the other hwloc on
    # the structures of the first one, and crashes.
    with output.without_noise():
        importlib.import_module("tensorflow")
    mpi = importlib.import_module("mpi4py.MPI")
    return {
        count: _median_seconds(mpi, count, rounds=rounds, seconds=seconds)
        for count in sizes
    }


def _median_seconds(
    mpi: types.ModuleType, count: int, *, rounds: int, seconds: float
) -> float:
    world = mpi.COMM_WORLD
    sent, received = np.zeros(count // 4, "float32"), np.empty(count // 4, "float32")

    def timed(repeats: int) -> float:
        world.Barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            world.Allreduce(sent, received, op=mpi.SUM)
        return (time.perf_counter() - start) / repeats

    timed(_WARM_UP)
    # The same number of repeats on all ranks: else one would block in Allreduce.
    slowest = world.allreduce(timed(_WARM_UP), op=mpi.MAX)
    repeats = max(1, min(_MAX_REPEATS, int(seconds / slowest)))
    return statistics.median(timed(repeats) for _ in range(rounds))
