"""How far a distributed training is from one process with the whole batch."""

import hashlib

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.job.agreement import gather
from hvdtrain.measurement import one_process


def measure(options, world, workload, names):
    """Train some steps twice, distributed and in one process, and compare.

    A collective. From equal weights, on the same samples, without dropout. The one
    process is rank 0; its batch is the concatenation of those of all ranks or devices.

    Args:
        options: the `BenchmarkOptions`.
        world: the `World`.
        workload: the `Workload`.
        names: the devices of a strategy in one process.

    Returns:
        A dict of the number of `steps`, of the `largest_difference` of a trainable
        weight from the one process, and of whether the `ranks_are_equal` to the bit.
    """
    count = max(world.size, len(names))
    first = world.rank * options.batch_size
    parts = _batches(options, workload, count)
    model = _without_dropout(_build(options, workload, names))
    initial = model.get_weights()
    mine = parts
    if options.strategy == "horovod":
        mine = [
            tuple(array[first : first + options.batch_size] for array in batch)
            for batch in parts
        ]
    _fit(model, mine)
    weights = [np.array(weight) for weight in model.trainable_weights]
    digests = gather(world, _digest(weights))
    difference = None
    if world.is_chief:
        reference = _without_dropout(workload.build(count))
        reference.set_weights(initial)
        _fit(reference, parts)
        difference = max(
            float(np.max(np.abs(mine - np.array(theirs))))
            for mine, theirs in zip(weights, reference.trainable_weights, strict=True)
        )
    return {
        "steps": options.consistency_steps,
        "largest_difference": gather(world, difference)[0],
        "ranks_are_equal": len(set(digests)) == 1,
    }


def _build(options, workload, names):
    keras.utils.set_random_seed(options.seed)
    if options.strategy != "horovod":
        return one_process.build(options, workload, names)
    model = workload.build(hvd.size())
    hvd.DistributedOptimizer(model.optimizer)
    return model


def _batches(options, workload, count):
    """Return the global batches of the steps, as pairs of NumPy arrays.

    Rows are in the order of ranks, as each of them gets its samples.
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
    by_rank = [
        list(workload.input(options, rank=rank, size=count)(0, steps))
        for rank in range(count)
    ]
    return [
        tuple(np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        for batches in zip(*by_rank, strict=True)
    ]


def _without_dropout(model):
    # Those of nested models too.
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    return model


def _fit(model, batches):
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=tuple(
            tf.TensorSpec(array.shape, array.dtype) for array in batches[0]
        ),
    )
    model.fit(dataset, steps_per_epoch=len(batches), shuffle=False, verbose=0)


def _digest(weights):
    return hashlib.sha256(b"".join(each.tobytes() for each in weights)).hexdigest()
