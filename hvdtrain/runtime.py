"""The start of a job: environment, Horovod, threads, device, seed; and its topology.

`start` is called once, before TensorFlow is imported by anybody. Importing this
module loads no TensorFlow.
"""

import contextlib
import dataclasses
import os
import re
import socket
import sys
import tempfile
import threading
import traceback

from hvdtrain import cores

# A waiting MPI thread leaves its core to TensorFlow, and a rank that waits for a lost
# one ends the job.
_ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "30",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "300",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# Variables of the number of ranks and the rank, by launcher. The inner launcher comes
# first: mpirun uses srun to reach the nodes of an allocation.
_LAUNCHERS = (
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
# TensorFlow's remarks on itself; no log level silences them.
_real_stderr = None
_NOISE = re.compile(rb"absl::InitializeLog|^I0000 |oneDNN|cpu_feature_guard")


class JobError(Exception):
    """The job cannot go on. The message is one line that says why and what to do.

    Raised on every rank, by a check that all ranks make alike or in `together`, or on
    the chief alone: of this error the chief's message is the one that is shown.
    """


@dataclasses.dataclass(frozen=True)
class World:
    """Where this process stands in the job.

    Attributes:
        rank: number of this process in the job, from 0.
        size: number of processes in the job.
        local_rank: number of this process on its node, from 0.
        local_size: number of processes on this node.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_chief(self):
        """Whether this is the rank that prints and writes files."""
        return self.rank == 0


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the launcher told this process by environment variables."""

    launcher: str = ""
    size: int = 1
    rank: int = 0


def launch(environ=os.environ):
    """Return the `Launch` that the environment variables describe."""
    for launcher, size, rank in _LAUNCHERS:
        if environ.get(size, "").isdigit() and environ.get(rank, "").isdigit():
            return Launch(launcher, int(environ[size]), int(environ[rank]))
    return Launch()


def start(*, seed=0):
    """Start Horovod and TensorFlow for this rank.

    Sets environment variables that the user has not set, calls `hvd.init`, sizes
    TensorFlow's thread pools by `cores.usable`, binds the rank to its part of the node
    unless `HVDTRAIN_BIND=0`, picks the GPU and seeds Keras.

    Args:
        seed: 0 to 2**32 - 1, the same on all ranks.

    Returns:
        The `World`.

    Raises:
        JobError: the processes do not form one job, or there are more ranks than
            GPUs on this node.
    """
    started = launch()
    _set_environment(started)
    is_alone = not _has_rendezvous(os.environ)
    if is_alone:
        check_one_job(started, size=1)
    with _without_noise():
        import hvdtrain.keras as hvd
    if is_alone and hvd.gloo_built():
        _use_gloo()
    hvd.init()
    check_one_job(started, size=hvd.size())
    world = World(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
    )
    threads = cores.usable(world.local_size)
    if os.environ.get("HVDTRAIN_BIND") != "0":
        cores.bind(world.local_rank, world.local_size)
    _set_threads(threads)
    with together(world):
        _set_gpu(world)
    _set_seed(seed)
    return world


def _set_environment(started):
    """Set what the user has not set. TensorFlow and Horovod read it when they start."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Milliseconds. Horovod's own 1 is long beside a small model's step; with Gloo each
    # cycle costs a round of messages, whether there is work or not.
    is_gloo = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.5" if is_gloo else "0.1")
    # When a rank is lost, each of the others would tell of its connection.
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal" if started.rank else "warning")


def _use_gloo():
    """Let Horovod start without MPI, unless the user has chosen MPI.

    Without a launcher, MPI_Init starts a daemon of Open MPI, which may not be
    installed.
    """
    if os.environ.setdefault("HOROVOD_CONTROLLER", "gloo") == "gloo":
        os.environ.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")


def stop(*, timeout_seconds):
    """Shut Horovod down, which ends the collectives that other ranks wait in.

    Ranks that do not answer are waited for no longer than `timeout_seconds`.
    """
    horovod = sys.modules.get("horovod.tensorflow")
    if horovod and horovod.is_initialized():
        stopper = threading.Thread(target=horovod.shutdown, daemon=True)
        stopper.start()
        stopper.join(timeout_seconds)


def _has_rendezvous(environ):
    prefixes = ("HOROVOD_GLOO_RENDEZVOUS", "OMPI_COMM_WORLD", "PMI_", "PMIX_")
    return any(name.startswith(prefixes) for name in environ)


def check_one_job(launched, *, size):
    """Raise `JobError` if `launched.size` processes were started but see `size`."""
    if launched.size == size or os.environ.get("HOROVOD_ELASTIC") == "1":
        return
    raise JobError(
        f"Received {launched.size} processes from {launched.launcher}, but Horovod "
        f"sees jobs of {size}: they would train apart. Start them with horovodrun, or "
        "with the mpirun of the MPI that Horovod was built with (srun: --mpi=pmix)."
    )


def standard_error():
    """Return the file descriptor of stderr, also while what is written to 2 is held."""
    return _real_stderr or 2


@contextlib.contextmanager
def _without_noise():
    """Hold back what is written to stderr, and pass on what is not noise."""
    global _real_stderr
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        stderr = _real_stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            _real_stderr = None
            os.close(stderr)
            held.seek(0)
            for line in held:
                if not _NOISE.search(line):
                    os.write(2, line)


def _set_threads(count):
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(count)
    # At least two: a step that waits in a collective must not keep the
    # input pipeline from running.
    tf.config.threading.set_inter_op_parallelism_threads(max(2, count))


def _set_gpu(world):
    # Not yet run on a GPU.
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    # A launcher may show each rank one GPU of its own; else pick by local rank.
    index = 0 if len(gpus) == 1 else world.local_rank
    if index >= len(gpus):
        raise JobError(
            f"Received {world.local_size} ranks on {socket.gethostname()} with "
            f"{len(gpus)} GPUs; expected at most one rank per GPU."
        )
    tf.config.set_visible_devices(gpus[index], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)


def _set_seed(seed):
    import keras

    keras.utils.set_random_seed(seed)


def gather(world, value):
    """Return the list of every rank's `value`, by rank, on every rank."""
    if world.size == 1:
        return [value]
    import hvdtrain.keras as hvd

    return hvd.allgather_object(value)


@contextlib.contextmanager
def together(world, *, expected=(JobError,)):
    """Make a failure of the enclosed phase on one rank a failure of all ranks.

    A collective, also where nothing fails: every rank enters and leaves it.

    Args:
        world: the `World`.
        expected: exceptions with a message for users. Of others the trace is shown.

    Raises:
        JobError: on every rank, with the first failing rank's message.
    """
    text = ""
    try:
        yield
    except expected as error:
        text = str(error)
    except Exception:
        text = traceback.format_exc()
    failures = gather(world, (text, socket.gethostname()))
    texts = [text for text, _ in failures]
    if texts[0] and len(set(texts)) == 1:
        raise JobError(texts[0])
    for rank, (text, host) in enumerate(failures):
        if text:
            raise JobError(f"rank {rank} on {host}: {text}")
