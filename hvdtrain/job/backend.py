"""Horovod and TensorFlow of this rank. Importing this module loads both."""

import atexit
import contextlib
import ctypes
import functools
import os
import socket
import threading
import warnings

# First: it raises one line where the libraries do not fit each other.
from hvdtrain import libraries  # isort: split

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdtrain import environment, output
from hvdtrain.collectives import transport
from hvdtrain.environment import is_elastic
from hvdtrain.flight import member
from hvdtrain.job import (
    declared_size,
    init_checks,
    launchers,
    membership,
    platforms,
    rendezvous,
)
from hvdtrain.job.agreement import fail_together
from hvdtrain.job.failures import explain_failed_collectives
from hvdtrain.job.files import check_output
from hvdtrain.job.world import JobError, MeshShape, SharedJobError, World
from hvdtrain.native import recorder

# Horovod joins its thread, which two threads must not do.
_shutdown_lock = threading.Lock()


def init(*args: object, **kwargs: object) -> None:
    """Start Horovod; as `horovod.tensorflow.init`, with the same arguments.

    Processes that a platform has started become a job (see `platforms`); a process
    without a launcher and a platform becomes rank 0 of 1. A collective that some ranks
    never call fails on the others after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, half an
    hour if that is not set; by Horovod's default they block for ever. If a script does
    not catch the error, its cause is printed in place of the traceback.

    Raises:
        JobError: the environment says that the job has more processes than Horovod has
            connected (see `declared_size`), or not all of a platform are there.
        SystemExit: with code 0, in an evaluator of a platform's job.
    """
    is_first = not hvd.is_initialized()
    # Of some ranks only, `comm` makes a job of fewer than were started.
    is_whole = (args[0] if args else kwargs.get("comm")) is None
    if is_first and is_whole:
        # First: it sets the rank and the network.
        platforms.form_job()
    if is_first:
        init_checks.check()
    environment.set_default_stall_limits(environment.SCRIPT_LIMITS)
    explain_failed_collectives()
    _skip_destructors_in_forks()
    launchers.locate()
    # Before a guard starts, and MPI, which may abort.
    if is_whole and not launchers.has_rendezvous(os.environ):
        declared_size.check(size=1)
    launched = launchers.launch()
    if launched.launcher:
        output.write_whole_lines_of_script()
        # Before Horovod starts, which may block.
        membership.join(rank=launched.rank, size=launched.size)
    if is_first and launchers.is_gloo(os.environ) and not is_elastic():
        rendezvous.wait_for_ranks(rank=launched.rank, size=launched.size)
    _record()
    with (
        recorder.collective("hvd.init", "init", size_bytes=0, is_of_all_ranks=False),
        init_checks.interface_of_gloo(),
    ):
        hvd.init(*args, **kwargs)
    if is_whole:
        declared_size.check(size=hvd.size())
    if launched.launcher:
        membership.join(rank=hvd.rank(), size=hvd.size())
    member.record_fatal_errors()
    _shut_down_at_exit()
    if hvd.rank() == 0:
        is_gloo = hvd.size() > 1 and hvd.gloo_enabled() and not hvd.mpi_enabled()
        libraries.warn_of_doubts(is_stall_limit_needed=is_gloo)


def _record() -> None:
    try:
        recorder.open_ring(member.ring_path())
    except OSError as error:
        warnings.warn(
            f"A hang of this rank will not be explained: {error}.", stacklevel=3
        )


@functools.cache
def _shut_down_at_exit() -> None:
    # Before Horovod does so, which is not recorded: the guard limits the wait.
    atexit.register(_end)
    # A fork would mark this rank as one that has left, in memory that ranks share.
    os.register_at_fork(after_in_child=lambda: atexit.unregister(_end))


def _end() -> None:
    member.note_end()
    shutdown()


@functools.cache
def _skip_destructors_in_forks() -> None:
    """Let a forked process exit, with its exit code.

    A fork has Horovod's state without Horovod's threads. The destructors of Horovod and
    Gloo would wait for these threads, and remove the rank's sockets from the epoll
    instance that both processes share.
    """
    libc = ctypes.CDLL(None)
    # Called with the exit code, before destructors that were registered earlier.
    end = ctypes.cast(libc._exit, ctypes.c_void_p)
    os.register_at_fork(after_in_child=lambda: libc.on_exit(end, None))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write Horovod's timeline to a file; as `horovod.tensorflow.start_timeline`.

    Raises:
        JobError: on rank 0, which writes it: the file cannot be written.
    """
    if hvd.rank() == 0:
        check_output(file_path, "file_path")
    hvd.start_timeline(file_path, mark_cycles)


def shutdown() -> None:
    """Leave the job; as `horovod.tensorflow.shutdown`.

    Collectives that other ranks are blocked in end with an error.
    """
    with _shutdown_lock:
        transport.disconnect()
        with recorder.collective(
            "hvd.shutdown", "shutdown", size_bytes=0, is_of_all_ranks=False
        ):
            hvd.shutdown()
        member.note_shutdown()


def init_world(*, is_alone: bool, mesh: MeshShape | None = None) -> World:
    """Start Horovod and return the `World`.

    Args:
        is_alone: whether there is no launcher, hence no rendezvous.
        mesh: a complete shape, whose process sets are made.
    """
    try:
        environment.reduction_choice()
    except ValueError as error:
        raise SharedJobError(str(error)) from None
    if is_alone and hvd.gloo_built():
        _choose_gloo()
    groups = mesh.process_sets() if mesh else ()
    init(process_sets=[hvd.ProcessSet(group) for group in groups] or None)
    return world()


def world() -> World:
    """Return the `World` of the job as it is now: an elastic job changes."""
    return World(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
    )


def _choose_gloo() -> None:
    """Let Horovod start without MPI, unless the user has chosen MPI.

    Without a launcher, MPI_Init starts a daemon of Open MPI, which may not be
    installed.
    """
    if os.environ.setdefault("HOROVOD_CONTROLLER", "gloo") == "gloo":
        os.environ.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")


def configure(world: World, *, threads: int, seed: int) -> None:
    """Size TensorFlow's thread pools, select the GPU and seed Keras. A collective."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    # At least two: a step that is blocked in a collective occupies one, and the input
    # pipeline needs another.
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    # A worker that joins an elastic job later would call a collective alone.
    with contextlib.nullcontext() if is_elastic() else fail_together(world):
        select_gpu(world)
    keras.utils.set_random_seed(seed)


def select_gpu(world: World) -> None:
    """Make one GPU of the host visible to this rank, if it has GPUs."""
    # Not yet run on a GPU.
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    # A launcher may make one GPU visible to each rank; else the local rank selects it.
    index = 0 if len(gpus) == 1 else world.local_rank
    if index >= len(gpus):
        raise JobError(
            f"Received {world.local_size} ranks on {socket.gethostname()} with "
            f"{len(gpus)} GPUs; expected at most one rank per GPU."
        )
    tf.config.set_visible_devices(gpus[index], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
