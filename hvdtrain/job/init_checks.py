"""What would abort `hvd.init`, or be ignored there, as errors of one line before it."""

import ctypes
import os
import socket

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.mpi_ops import _basics

from hvdtrain.job.files import check_output
from hvdtrain.job.launchers import GLOO_INTERFACE, launch
from hvdtrain.job.world import JobError

_TIMELINE = "HOROVOD_TIMELINE"
# A timeline that `hvd.start_timeline` starts.
_DYNAMIC = "DYNAMIC"
_GLOO_SWITCHES = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")


def check() -> None:
    """Raise a `JobError` if Horovod cannot start in this process."""
    _check_eager()
    _check_timeline()
    if _uses_gloo():
        _check_own_name()
    if os.environ.get("HOROVOD_CONTROLLER", "mpi").lower() == "mpi":
        _check_mpi_is_usable()


def _check_timeline() -> None:
    """Horovod goes on without its timeline where it cannot write the file."""
    path = os.environ.get(_TIMELINE)
    if path and path != _DYNAMIC and launch().rank == 0:
        check_output(path, _TIMELINE)


def _check_eager() -> None:
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise JobError(
            "hvdtrain needs eager execution. Received a program without it: remove "
            "tf.compat.v1.disable_eager_execution(), disable_v2_behavior(), or the "
            "tf.Graph around hvd.init()."
        )


def _uses_gloo() -> bool:
    chosen = [os.environ.get(name, "").lower() for name in _GLOO_SWITCHES]
    return "gloo" in chosen or not hvd.mpi_built()


def _check_own_name() -> None:
    """Gloo takes the address of the host's name, and crashes where there is none."""
    if os.environ.get(GLOO_INTERFACE):
        return
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise JobError(
            f"This host cannot resolve its own name, {name}: {error.strerror}. Add a "
            f"line '127.0.1.1 {name}' to /etc/hosts, or set {GLOO_INTERFACE} to the "
            "network interface of the job: lo for ranks of one host."
        ) from None


def _check_mpi_is_usable() -> None:
    is_finalized = ctypes.c_int(0)
    # A Horovod without MPI has no such function.
    if finalized := getattr(_basics.MPI_LIB_CTYPES, "MPI_Finalized", None):
        finalized(ctypes.byref(is_finalized))
    if is_finalized:
        raise JobError(
            "hvd.init() cannot start MPI again: hvd.shutdown() has ended it, and MPI "
            "starts once in a process. Call hvd.init() once, or start the job with "
            "horovodrun --gloo."
        )
