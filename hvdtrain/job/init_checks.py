"""What would abort `hvd.init`, or be ignored there, as errors of one line before it."""

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.mpi_ops import _basics

from hvdtrain import addresses
from hvdtrain.addresses import GLOO_INTERFACE
from hvdtrain.install.compatibility import REPLACE
from hvdtrain.job import rendezvous
from hvdtrain.job.files import check_output
from hvdtrain.job.launchers import is_gloo, launch
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
        _check_interface()
        if not rendezvous.has_patches():
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


def _check_interface() -> None:
    """Raise a `JobError` if Gloo's interface has no address: Gloo would abort."""
    chosen = os.environ.get(GLOO_INTERFACE)
    if chosen and chosen not in addresses.by_interface():
        raise JobError(
            f"Received {GLOO_INTERFACE}={chosen}; expected a network interface of "
            f"{socket.gethostname()} with an IP address: {addresses.listed()}."
        )


@contextlib.contextmanager
def interface_of_gloo() -> Iterator[None]:
    """Name the network interface for Gloo's start, where the launcher has not.

    Gloo would take the address of the host's own name. A process that is alone needs
    the loopback only. The variable is removed then: a job of several hosts that this
    process starts must not inherit it.

    Raises:
        JobError: it is not known which interface other hosts reach.
    """
    if os.environ.get(GLOO_INTERFACE) or not _uses_gloo():
        yield
        return
    try:
        has_others = is_gloo(os.environ)
        own = addresses.reached_by_others() if has_others else addresses.LOOPBACK
        os.environ[GLOO_INTERFACE] = addresses.interface_of(own)
    except OSError as error:
        raise JobError(f"{error}.") from None
    try:
        yield
    finally:
        del os.environ[GLOO_INTERFACE]


def _check_own_name() -> None:
    """Without the patches, Horovod's process sets ignore the interface of Gloo."""
    name = socket.gethostname()
    if not addresses.is_of_this_host(name):
        raise JobError(
            "This Horovod lacks the patches of hvdtrain, and needs an address of its "
            f"host's name under Gloo: {addresses.resolution(name)}, and the interfaces "
            f"are {addresses.listed()}. Correct {name} in /etc/hosts, or run {REPLACE}."
        )


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
