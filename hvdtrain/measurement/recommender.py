"""The workload `recommender`: embedding tables of different sizes, dense layers on top.

A sample has one id for each table. The rows of its ids, side by side, are the input of
the dense layers, the last of which has one unit. Tables are divided or not; the dense
layers are data parallel in all kinds.
"""

import functools

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain import optimizers, parallel
from hvdtrain.measurement.kinds import BATCHES, Kind

_EXPONENT = 1.05


def samples(options, rank):
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


def _build(embed, options):
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
    return Kind(build=functools.partial(_build, embed))


def _sharded(slicing):
    make = functools.partial(parallel.ShardedEmbedding, slicing=slicing)
    return _kind(functools.partial(_each_by_its_layer, make))


KINDS = {
    "replicated": _kind(functools.partial(_each_by_its_layer, keras.layers.Embedding)),
    "row": _sharded("row"),
    "column": _sharded("column"),
    "tables": _kind(_all_by_one_layer),
}
