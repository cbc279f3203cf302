"""The workload `wide`: two pairs of dense layers, 1,024 to 4,096 to 1,024 units."""

import functools

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain import optimizers, parallel
from hvdtrain.measurement.kinds import BATCHES, Kind

_UNITS, _WIDE_UNITS, _PAIRS, _CLASSES = 1024, 4096, 2, 10


def samples(options, rank):
    """Return the batches of a rank.

    Returns:
        float32 inputs of the shape (batches, samples, 1024), and int32 targets of the
        shape (batches, samples), 0 to 9.
    """
    random = np.random.RandomState([options.seed, rank])
    shape = (BATCHES, options.batch_size)
    inputs = random.uniform(size=(*shape, _UNITS)).astype("float32")
    return inputs, random.randint(_CLASSES, size=shape).astype("int32")


def _build(options, widen, narrow, **distribution):
    keras.utils.set_random_seed(options.seed)
    layers = [keras.Input((_UNITS,))]
    for _ in range(_PAIRS):
        layers += [widen(_WIDE_UNITS, activation="relu"), narrow(_UNITS)]
    model = keras.Sequential([*layers, keras.layers.Dense(_CLASSES)])
    rate = optimizers.LEARNING_RATES[options.optimizer]
    optimizer = optimizers.make(options.optimizer, learning_rate=rate)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(optimizer, **distribution), loss)
    return model


def _replicated(options):
    return _build(options, keras.layers.Dense, keras.layers.Dense)


def _model_parallel(options):
    with parallel.Mesh(model=hvd.size()) as mesh:
        return _build(
            options,
            functools.partial(parallel.ColumnParallelDense, gather_output=False),
            functools.partial(parallel.RowParallelDense, input_is_parallel=True),
            mesh=mesh,
        )


KINDS = {
    "replicated": Kind(build=_replicated),
    "model": Kind(build=_model_parallel, shares_samples=True),
}
