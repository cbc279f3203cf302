"""How far a distributed training is from one process with the global batch."""

import hashlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.job import World
from hvdtrain.job.agreement import gather
from hvdtrain.measurement import one_process
from hvdtrain.measurement.benchmark_options import BenchmarkOptions
from hvdtrain.measurement.figures import Figures
from hvdtrain.measurement.workloads import Workload

# Inputs and targets of one step.
Batch = tuple[np.ndarray, ...]


def measure(
    options: BenchmarkOptions, world: World, workload: Workload, names: Sequence[str]
) -> Figures:
    """Train some steps twice, distributed and in one process, and compare.

    A collective. Both start from equal weights, and take the same samples, without
    dropout. The one process is rank 0; its batch is the concatenation of the batches of
    all ranks or devices.

    Args:
        names: the devices of a strategy in one process.

    Returns:
        The number of `steps`, the `largest_difference` of a trainable weight from the
        one process, and whether the `ranks_are_equal` to the bit.
    """
    count = max(world.size, len(names))
    global_batches = _global_batches(options, workload, count)
    batches = global_batches
    if options.strategy == "horovod":
        first = world.rank * options.batch_size
        rows = slice(first, first + options.batch_size)
        batches = [tuple(array[rows] for array in batch) for batch in global_batches]
    model = _without_dropout(_build(options, workload, names))
    initial = model.get_weights()
    _fit(model, batches)
    weights = [np.array(weight) for weight in model.trainable_weights]
    digests = gather(world, _digest(weights))
    difference = None
    if world.is_chief:
        reference = _without_dropout(workload.build(count))
        reference.set_weights(initial)
        _fit(reference, global_batches)
        difference = max(
            float(np.max(np.abs(weight - np.array(expected))))
            for weight, expected in zip(
                weights, reference.trainable_weights, strict=True
            )
        )
    return {
        "steps": options.consistency_steps,
        "largest_difference": gather(world, difference)[0],
        "ranks_are_equal": len(set(digests)) == 1,
    }


def _build(
    options: BenchmarkOptions, workload: Workload, names: Sequence[str]
) -> keras.Model:
    keras.utils.set_random_seed(options.seed)
    if options.strategy != "horovod":
        return one_process.build(options, workload, names)
    model = workload.build(hvd.size())
    hvd.DistributedOptimizer(model.optimizer)
    return model


def _global_batches(
    options: BenchmarkOptions, workload: Workload, count: int
) -> list[Batch]:
    """Return the global batch of each step.

    The rows are in the order of the ranks, as each rank gets its samples.
    """
    steps = options.consistency_steps
    if not workload.batches:
        # The one synthetic batch, with other targets for each rank and step.
        x, y = workload.batch
        return [
            (
                np.concatenate([x] * count),
                np.concatenate([np.roll(y, step + i, axis=0) for i in range(count)]),
            )
            for step in range(steps)
        ]
    batches_by_rank = [
        list(workload.input(options, rank=rank, size=count)(0, steps))
        for rank in range(count)
    ]
    return [
        tuple(np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        for batches in zip(*batches_by_rank, strict=True)
    ]


def _without_dropout(model: keras.Model) -> keras.Model:
    # Of a private name of Keras: `model.layers` lacks the layers of nested models.
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return model


def _fit(model: keras.Model, batches: Sequence[Batch]) -> None:
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=tuple(
            tf.TensorSpec(array.shape, array.dtype) for array in batches[0]
        ),
    )
    model.fit(dataset, steps_per_epoch=len(batches), shuffle=False, verbose=0)


def _digest(weights: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(each.tobytes() for each in weights)).hexdigest()
