"""Workloads that are trained in several kinds of parallelism.

recommender: embedding tables of different sizes, with dense layers on top. A sample has
one id for each table. The rows of its ids, concatenated, are the input of the dense
layers, the last of which has one unit. Tables are sharded or not; the dense layers are
data parallel in all kinds.

wide: four pairs of dense layers, 1,024 to 2,048 to 1,024 units.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain import optimizers, parallel

# Of each rank; their bytes and losses are averaged.
BATCHES = 8
_EXPONENT = 1.05
UNITS, WIDE_UNITS = 1024, 2048
_PAIRS, _CLASSES = 4, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of parallelism, in which a workload is trained.

    Attributes:
        build: `build(options)` returns a compiled model whose optimizer is distributed.
            Initial weights are those of the dense model with the seed of the options.
        shares_samples: whether each rank trains with the samples of all ranks, as the
            ranks of a model group do. If not, it trains with its own.
        most_ranks: the kind is left out with more.
    """

    build: Callable
    shares_samples: bool = False
    most_ranks: float = math.inf


class Workload(NamedTuple):
    """A model in several kinds of parallelism, and its samples.

    Attributes:
        samples: `samples(options, rank)` returns the batches of a rank as two arrays,
            inputs and targets, of the shape (batches, samples, ...).
        kinds: by name, "replicated" first, each `Kind`.
    """

    samples: Callable
    kinds: dict[str, Kind]


def _recommender_samples(options, rank):
    """Return the batches of a rank.

    Returns:
        int32 ids of the shape (batches, samples, tables), and float32 targets of the
        shape (batches, samples, 1), 0 or 1.
    """
    random = np.random.RandomState([options.seed, rank])
    shape = (BATCHES, options.batch_size)
    # The same on all ranks.
    order = np.random.RandomState(options.seed)
    ids = [
        order.permutation(rows).astype("int32")[zipf(random, rows, shape)]
        for rows in options.table_rows
    ]
    targets = random.randint(2, size=(*shape, 1)).astype("float32")
    return np.stack(ids, axis=-1), targets


def zipf(random, size, shape):
    """Return numbers below `size`, of which k has a probability of (k + 1)^-1.05.

    Args:
        random: a `numpy.random.RandomState`.
        size: how many numbers there are.
        shape: that of the result.
    """
    weights = np.cumsum(np.arange(1, size + 1, dtype="float64") ** -_EXPONENT)
    drawn = np.searchsorted(weights, weights[-1] * random.uniform(size=shape), "right")
    return np.minimum(drawn, size - 1)


def _recommender(embed, options):
    keras.utils.set_random_seed(options.seed)
    ids = keras.Input((len(options.table_rows),), dtype="int32")
    tables = [(rows, options.columns) for rows in options.table_rows]
    x = keras.layers.Concatenate()(
        embed(tables, [ids[:, i] for i in range(len(tables))])
    )
    for units in options.units:
        x = keras.layers.Dense(int(units), activation="relu")(x)
    x = keras.layers.Dense(1, activation="sigmoid")(x)
    model = keras.Model(ids, x)
    rate = optimizers.LEARNING_RATES[options.optimizer]
    optimizer = optimizers.make(options.optimizer, learning_rate=rate)
    model.compile(hvd.DistributedOptimizer(optimizer), "binary_crossentropy")
    return model


def _each_by_its_layer(make, tables, inputs):
    return [make(*table)(ids) for table, ids in zip(tables, inputs, strict=True)]


def _all_by_one_layer(tables, inputs):
    elements = sum(rows * columns for rows, columns in tables)
    layer = parallel.DistributedEmbedding(
        [keras.layers.Embedding(*table) for table in tables],
        strategy="memory_balanced",
        # A table that is larger than a rank's share is cut.
        column_slice_threshold=elements // hvd.size(),
    )
    return layer(inputs)


def _kind(embed):
    return Kind(build=functools.partial(_recommender, embed))


def _sharded(slicing):
    make = functools.partial(parallel.ShardedEmbedding, slicing=slicing)
    return _kind(functools.partial(_each_by_its_layer, make))


_RECOMMENDER_KINDS = {
    "replicated": _kind(functools.partial(_each_by_its_layer, keras.layers.Embedding)),
    "row": _sharded("row"),
    "column": _sharded("column"),
    "tables": _kind(_all_by_one_layer),
}


def _wide_samples(options, rank):
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


_WIDE_KINDS = {
    "replicated": Kind(build=_replicated),
    "state": Kind(build=_sharded_state),
    "model": Kind(build=_model_parallel, shares_samples=True),
    "pipeline": Kind(build=_pipeline, shares_samples=True, most_ranks=_PAIRS),
}

WORKLOADS = {
    "recommender": Workload(_recommender_samples, _RECOMMENDER_KINDS),
    "wide": Workload(_wide_samples, _WIDE_KINDS),
}
