"""The start of a job: environment, Horovod, cores, threads, device, seed."""

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator

from hvdtrain import environment, output
from hvdtrain.install.compatibility import MismatchError
from hvdtrain.job import cores, declared_size, launchers, membership, platforms
from hvdtrain.job.world import JobError, MeshShape, World

_ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Where MPI threads spin while they wait, TensorFlow's threads lack their cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Milliseconds, while a tensor is negotiated. Horovod's default of 1 is long
    # compared to a small model's step.
    "HOROVOD_CYCLE_TIME": "0.1",
}


def start(*, seed: int = 0, mesh: MeshShape | None = None) -> World:
    """Start Horovod and TensorFlow for this rank.

    Called once, before TensorFlow is imported. Sets environment variables that the
    user has not set, starts the guard of a rank under a launcher (`hvdtrain.flight`),
    calls `hvd.init`, sizes TensorFlow's thread pools by `cores.usable`, binds the rank
    to its share of the node unless `HVDTRAIN_BIND=0`, selects the GPU and seeds Keras.

    Args:
        seed: 0 to 2**32 - 1, the same on all ranks.
        mesh: shape of a `parallel.Mesh` that is made later.

    Raises:
        JobError: Horovod cannot be loaded, the processes do not form one job, or
            there are more ranks than GPUs on this node.
    """
    platforms.form_job()
    launched = launchers.launch()
    _set_environment(launched)
    is_alone = not launchers.has_rendezvous(os.environ)
    if is_alone:
        # Before TensorFlow's import, which takes seconds.
        declared_size.check(size=1)
    else:
        membership.join(rank=launched.rank, size=launched.size)
    with output.without_noise(), _excluded_from_garbage_collection():
        # Not at the top: TensorFlow and Horovod read the environment at their import.
        try:
            from hvdtrain.job import backend
        except MismatchError as error:
            raise JobError(str(error)) from error
        except Exception as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise JobError(
                f"Cannot load TensorFlow and Horovod: {reason[0].rstrip('.')}. "
                "python -m hvdtrain.doctor says what is wrong."
            ) from error
    complete = mesh.of(launched.size) if mesh and mesh.splits_model else None
    world = backend.init_world(is_alone=is_alone, mesh=complete)
    threads = cores.usable(world.local_size)
    if os.environ.get("HVDTRAIN_BIND") != "0":
        cores.bind(world.local_rank, world.local_size)
    backend.configure(world, threads=threads, seed=seed)
    return dataclasses.replace(world, seed=seed)


@contextlib.contextmanager
def _excluded_from_garbage_collection() -> Iterator[None]:
    """Exclude all objects that exist at the end of the block from garbage collection.

    TensorFlow's import makes 270,000 objects that stay. Examining them in every
    collection takes a quarter of the time of a short run. Nothing is collected in the
    block.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _set_environment(launched: launchers.Launch) -> None:
    """Set the variables that the user has not set."""
    environment.set_default_stall_limits(environment.PROGRAM_LIMITS)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # When a rank is lost, every other rank would log its broken connection.
    level = "fatal" if launched.rank else "warning"
    os.environ.setdefault("HOROVOD_LOG_LEVEL", level)
