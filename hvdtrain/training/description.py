"""What a run consists of: its ranks, its software and its sizes."""

import dataclasses
import platform
import socket
from collections.abc import Sequence
from typing import Any

import horovod
import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import __version__
from hvdtrain.checkpoint.restoring import Start
from hvdtrain.collectives import transport
from hvdtrain.events import RunStart
from hvdtrain.job import World, cores
from hvdtrain.job.agreement import gather
from hvdtrain.keras.compiled_gradients import compiles_gradients, has_own_step
from hvdtrain.keras.learning_rates import rate_reader
from hvdtrain.keras.variables import get_inner_optimizer, optimizers_inside
from hvdtrain.parallel.replicas import Replicas
from hvdtrain.training.specs import Plan


def describe_job(world: World) -> dict[str, Any]:
    """Return the ranks and the software of a job. A collective.

    Its keys: controller (MPI or Gloo), hosts and threads (by rank), cpu_quota (see
    `RunStart`), versions.
    """
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    by_rank = gather(world, (socket.gethostname(), threads))
    hosts, threads_by_rank = zip(*by_rank, strict=True)
    return {
        "controller": "MPI" if hvd.mpi_enabled() else "Gloo",
        "hosts": list(hosts),
        "threads": list(threads_by_rank),
        "cpu_quota": cores.describe_quota(),
        "versions": {
            "hvdtrain": __version__,
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "Horovod": horovod.__version__,
            "Python": platform.python_version(),
        },
    }


def describe_run(
    world: World,
    model: keras.Model,
    plan: Plan,
    *,
    start: Start,
    local_batch_sizes: Sequence[int],
) -> RunStart:
    """Return the start of a run, of a model that was restored. A collective.

    Args:
        start: from which the run continues.
        local_batch_sizes: of each replica.
    """
    optimizer = get_inner_optimizer(model.optimizer)
    # Of a MultiOptimizer, the rate of the first of its optimizers.
    rate = rate_reader(optimizers_inside(optimizer)[0])()
    return RunStart(
        step=start.step,
        max_steps=plan.max_steps,
        ranks=world.size,
        global_batch_size=plan.global_batch_size,
        local_batch_sizes=list(local_batch_sizes),
        accumulation_steps=optimizer.gradient_accumulation_steps or 1,
        # The chief's: it has read the checkpoint.
        learning_rate=gather(world, rate)[0],
        model=model.name,
        optimizer=optimizer.name,
        compiles_gradients=compiles_gradients(model) and not has_own_step(model),
        mesh=dataclasses.asdict(Replicas.of_model(world, model).shape),
        reduction=transport.reduction_path(),
        checkpoint=start.place,
        replicas_before=start.header.size if start.place else None,
        **describe_job(world),
    )
