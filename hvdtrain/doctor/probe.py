"""Imports one library and prints its properties as JSON.

    python -m hvdtrain.doctor.probe tensorflow

A process of its own: a broken library may crash the process that imports it.
"""

import json
import os
import pathlib
import sys
from importlib import import_module
from typing import Any


def _tensorflow() -> dict[str, Any]:
    tf, keras = import_module("tensorflow"), import_module("keras")
    gpus = tf.config.list_physical_devices("GPU")
    # This starts no GPU.
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    build = tf.sysconfig.get_build_info()
    return {
        "version": tf.__version__,
        "keras": keras.__version__,
        "gpus": [detail.get("compute_capability") for detail in details],
        "built_for": list(build.get("cuda_compute_capabilities", ())),
        "without_native": _without_native(),
    }


def _without_native() -> str:
    """Return why hvdtrain's own operations cannot be loaded, or "" if they can."""
    native = import_module("hvdtrain.native")
    try:
        native.load()
    except OSError as error:
        return str(error)
    return ""


def _horovod() -> dict[str, Any]:
    horovod, hvd = import_module("horovod"), import_module("horovod.tensorflow")
    return {
        "version": horovod.__version__,
        "mpi": bool(hvd.mpi_built()),
        "gloo": bool(hvd.gloo_built()),
        "nccl": bool(hvd.nccl_built()),
        "mpi_library": _mpi_library(),
    }


def _mpi4py() -> dict[str, Any]:
    mpi4py = import_module("mpi4py")
    # By default the import of mpi4py.MPI calls MPI_Init, which may abort the process.
    mpi4py.rc.initialize = False
    mpi = import_module("mpi4py.MPI")
    return {
        "version": mpi4py.__version__,
        "mpi_library": _mpi_library(),
        "mpi": mpi.Get_library_version().split(",")[0],
    }


def _mpi_library() -> str | None:
    """Return the path of the MPI that this process has loaded, None without one."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/libmpi" in line}
    return min(paths, default=None)


_PROBES = {"tensorflow": _tensorflow, "horovod": _horovod, "mpi4py": _mpi4py}

if __name__ == "__main__":
    # The doctor reports other settings, with which the imports would fail.
    os.environ.pop("TF_USE_LEGACY_KERAS", None)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    print(json.dumps(_PROBES[sys.argv[1]]()))
