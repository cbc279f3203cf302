"""The workload `wide`: four pairs of dense layers, 1,024 to 2,048 to 1,024 units."""

import functools

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain import optimizers, parallel
from hvdtrain.measurement.kinds import BATCHES, Kind

UNITS, WIDE_UNITS = 1024, 2048
_PAIRS, _CLASSES = 4, 10


def samples(options, rank):
    """Return the batches of a rank.

    Returns:
        float32 inputs of the shape (batches, samples, 1024), and int32 targets of the
        shape (batches, samples), 0 to 9.
    """
    random = np.random.RandomState([options.seed, rank])
    shape = (BATCHES, options.batch_size)
    inputs = random.uniform(size=(*shape, UNITS)).astype("float32")
    return inputs, random.randint(_CLASSES, size=shape).astype("int32")


def _dense(options, widen=keras.layers.Dense, narrow=keras.layers.Dense):
    keras.utils.set_random_seed(options.seed)
    layers = [keras.Input((UNITS,))]
    for _ in range(_PAIRS):
        layers += [widen(WIDE_UNITS, activation="relu"), narrow(UNITS)]
    return keras.Sequential([*layers, keras.layers.Dense(_CLASSES)])


def _compiled(model, options, **distribution):
    rate = optimizers.LEARNING_RATES[options.optimizer]
    optimizer = optimizers.make(options.optimizer, learning_rate=rate)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(optimizer, **distribution), loss)
    return model


def _replicated(options):
    return _compiled(_dense(options), options)


def _sharded_state(options):
    return _compiled(_dense(options), options, shard_state="slices_reducescatter")


def _model_parallel(options):
    with parallel.Mesh(model=hvd.size()) as mesh:
        model = _dense(
            options,
            functools.partial(parallel.ColumnParallelDense, gather_output=False),
            functools.partial(parallel.RowParallelDense, input_is_parallel=True),
        )
    return _compiled(model, options, mesh=mesh)


def _pipeline(options):
    size = hvd.size()
    # Whole pairs: what is narrow goes to the next stage.
    stages = [2 * len(pairs) for pairs in np.array_split(range(_PAIRS), size)]
    stages[-1] += 1
    with parallel.Mesh(pipeline=size) as mesh:
        model = parallel.PipelineModel(_dense(options), stages)
    return _compiled(model, options, mesh=mesh)


KINDS = {
    "replicated": Kind(build=_replicated),
    "state": Kind(build=_sharded_state),
    "model": Kind(build=_model_parallel, shares_samples=True),
    "pipeline": Kind(build=_pipeline, shares_samples=True, most_ranks=_PAIRS),
}
