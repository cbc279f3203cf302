"""Loads one library and prints what it is, as JSON; in a process of its own.

    python -m hvdtrain.diagnosis.probe tensorflow

A broken library may end the process that loads it.
"""

import json
import pathlib
import sys


def tensorflow():
    """Return what TensorFlow and Keras are, and what they see."""
    import keras
    import tensorflow as tf

    return {
        "version": tf.__version__,
        "keras": keras.__version__,
        "is_for_gpus": tf.test.is_built_with_cuda(),
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }


def horovod():
    """Return what Horovod is and what it was built with."""
    import horovod
    import horovod.tensorflow as hvd

    built_with = pathlib.Path(horovod.__file__).with_name("metadata.json")
    return {
        "version": horovod.__version__,
        "tensorflow": json.loads(built_with.read_text()).get("tensorflow"),
        "mpi": bool(hvd.mpi_built()),
        "gloo": bool(hvd.gloo_built()),
        "nccl": bool(hvd.nccl_built()),
        "mpi_library": _mpi_library(),
    }


def mpi4py():
    """Return what mpi4py is and which MPI it loads."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return {
        "version": mpi4py.__version__,
        "mpi_library": _mpi_library(),
        "mpi": MPI.Get_library_version().split(",")[0],
    }


def _mpi_library():
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libmpi" in line}
    return min(paths, default=None)


if __name__ == "__main__":
    _PROBES = {"tensorflow": tensorflow, "horovod": horovod, "mpi4py": mpi4py}
    print(json.dumps(_PROBES[sys.argv[1]]()))
