"""A timed training of a workload of `benchmarks.loads` with hvdtrain."""

import statistics
from collections.abc import Callable

import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from benchmarks import keras_loads
from benchmarks.load_options import Run, TrainingOptions
from benchmarks.loads import BATCHES, Gpt2
from hvdtrain.benchmark import variants
from hvdtrain.benchmark.benchmark_options import BenchmarkOptions
from hvdtrain.benchmark.workloads import Workload
from hvdtrain.job import World
from hvdtrain.job.agreement import fail_together, gather

_NAME = "train"


def measure(options: TrainingOptions, world: World) -> Run:
    """Train with `training.train_and_evaluate`. A collective.

    Returns:
        The figures of all ranks, the same on all of them.
    """
    load = options.sized_load()
    (x, y) = load.samples(BATCHES * load.batch_size, seed=world.rank)
    keras.utils.set_random_seed(0)
    with fail_together(world):
        if isinstance(load, Gpt2):
            dtype = {"bfloat16": "mixed_bfloat16"}.get(options.dtype, options.dtype)
            model = keras_loads.build_gpt2(load, dtype)
        else:
            model = keras_loads.build_dlrm(load, options.kind)
        hvd.DistributedOptimizer(model.optimizer, shard_state=options.kind == "state")
        count = sum(weight.shape.num_elements() for weight in _values(model))
    batch = keras.tree.map_structure(lambda array: array[: load.batch_size], (x, y))
    workload = Workload(build=lambda: model, batch=batch, note="")
    settings = BenchmarkOptions(
        batch_size=load.batch_size, steps_per_execution=load.steps_per_execution
    )
    train = variants.training_variant(
        model, _input(x, y, load.batch_size), workload, settings, world
    )
    speeds = variants.warm_up(world, {_NAME: train})
    (seconds,) = variants.run_rounds(
        world, {_NAME: train}, speeds, rounds=1, seconds=options.seconds
    )[_NAME]
    step = statistics.fmean(seconds) / load.steps_per_execution
    own = (step, variants.memory()["peak_resident"], count)
    steps, memory, counts = zip(*gather(world, own), strict=True)
    return Run(
        samples_per_second=sum(load.batch_size / each for each in steps),
        peak_resident=list(memory),
        parameters=list(counts),
    )


def _values(model: keras.Model) -> list[tf.Variable]:
    return [weight.value for weight in model.trainable_variables]


def _input(
    x: object, y: object, batch_size: int
) -> Callable[[int, int], tf.data.Dataset]:
    batches = tf.data.Dataset.from_tensor_slices((x, y))
    batches = batches.batch(batch_size, drop_remainder=True).cache().repeat()
    options = tf.data.Options()
    # The end of an iterator would wait for the end of a period of the tuning.
    options.autotune.enabled = False
    batches = batches.with_options(options)
    return lambda start, end: batches.take(end - start)
