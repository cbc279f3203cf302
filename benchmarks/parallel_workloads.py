"""Workloads that are trained in several kinds of parallelism.

recommender: embedding tables of different sizes, with dense layers on top. A sample has
one id for each table. The rows of its ids, concatenated, are the input of the dense
layers, the last of which has one unit. Tables are sharded or not; the dense layers are
replicated in all kinds.

wide: four pairs of dense layers, 1,024 to 2,048 to 1,024 units.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

import hvdtrain.keras as hvd
from benchmarks.loads import zipf
from benchmarks.parallelism import ParallelismOptions
from hvdtrain import optimizers, parallel

# Of each rank; the bytes and the loss of a step are means over them.
BATCHES = 8
UNITS, WIDE_UNITS = 1024, 2048
_PAIRS, _CLASSES = 4, 10

# Rows and columns of a table.
Table = tuple[int, int]
# Returns the rows of each table's ids, given all tables and their ids.
Embed = Callable[[list[Table], list[keras.KerasTensor]], list[keras.KerasTensor]]
Batches = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of parallelism, in which a workload is trained.

    Attributes:
        build: returns a compiled model whose optimizer is distributed. The initial
            weights equal the replicated model's with the seed of the options.
        shares_samples: whether each rank trains with the samples of all ranks, as the
            ranks of a model group do. If not, it trains with its own.
        most_ranks: the kind is left out with more.
    """

    build: Callable[[ParallelismOptions], keras.Model]
    shares_samples: bool = False
    most_ranks: float = math.inf


class ParallelWorkload(NamedTuple):
    """A model in several kinds of parallelism, and its samples.

    Attributes:
        samples: `samples(options, rank)` returns the batches of a rank as two arrays,
            inputs and targets, of the shape (batches, samples, ...).
        kinds: by name, "replicated" first.
    """

    samples: Callable[[ParallelismOptions, int], Batches]
    kinds: dict[str, Kind]


def _recommender_samples(options: ParallelismOptions, rank: int) -> Batches:
    """Return int32 ids of the shape (batches, samples, tables), and their targets.

    The targets are float32 of the shape (batches, samples, 1), 0 or 1.
    """
    random = np.random.RandomState([options.seed, rank])
    shape = (BATCHES, options.batch_size)
    # The same seed on all ranks: frequent ids are the same rows for all.
    order = np.random.RandomState(options.seed)
    ids = [
        order.permutation(rows).astype("int32")[zipf(random, rows, shape)]
        for rows in options.table_rows
    ]
    targets = random.randint(2, size=(*shape, 1)).astype("float32")
    return np.stack(ids, axis=-1), targets


def _build_recommender(embed: Embed, options: ParallelismOptions) -> keras.Model:
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
    return _compile(model, "binary_crossentropy", options)


def _compile(
    model: keras.Model,
    loss: str | keras.Loss,
    options: ParallelismOptions,
    **distribution: Any,
) -> keras.Model:
    rate = optimizers.LEARNING_RATES[options.optimizer]
    optimizer = optimizers.make(options.optimizer, learning_rate=rate)
    model.compile(hvd.DistributedOptimizer(optimizer, **distribution), loss)
    return model


def _embed_one_by_one(
    make: Callable[[int, int], keras.Layer],
    tables: list[Table],
    inputs: list[keras.KerasTensor],
) -> list[keras.KerasTensor]:
    return [make(*table)(ids) for table, ids in zip(tables, inputs, strict=True)]


def _embed_together(
    tables: list[Table], inputs: list[keras.KerasTensor]
) -> list[keras.KerasTensor]:
    elements = sum(rows * columns for rows, columns in tables)
    layer = parallel.DistributedEmbedding(
        [keras.layers.Embedding(*table) for table in tables],
        strategy="memory_balanced",
        # A table that is larger than a rank's share is sharded by column.
        column_slice_threshold=elements // hvd.size(),
    )
    return layer(inputs)


def _layer_kind(make: Callable[[int, int], keras.Layer]) -> Kind:
    embed = functools.partial(_embed_one_by_one, make)
    return Kind(build=functools.partial(_build_recommender, embed))


def _sharded_kind(slicing: str) -> Kind:
    return _layer_kind(functools.partial(parallel.ShardedEmbedding, slicing=slicing))


_RECOMMENDER_KINDS = {
    "replicated": _layer_kind(keras.layers.Embedding),
    "row": _sharded_kind("row"),
    "column": _sharded_kind("column"),
    "tables": Kind(build=functools.partial(_build_recommender, _embed_together)),
}


def _wide_samples(options: ParallelismOptions, rank: int) -> Batches:
    """Return float32 inputs of the shape (batches, samples, 1024), and their targets.

    The targets are int32 of the shape (batches, samples), 0 to 9.
    """
    random = np.random.RandomState([options.seed, rank])
    shape = (BATCHES, options.batch_size)
    inputs = random.uniform(size=(*shape, UNITS)).astype("float32")
    return inputs, random.randint(_CLASSES, size=shape).astype("int32")


def _build_wide(
    options: ParallelismOptions,
    widen: Callable[..., keras.Layer] = keras.layers.Dense,
    narrow: Callable[..., keras.Layer] = keras.layers.Dense,
) -> keras.Model:
    keras.utils.set_random_seed(options.seed)
    layers = [keras.Input((UNITS,))]
    for _ in range(_PAIRS):
        layers += [widen(WIDE_UNITS, activation="relu"), narrow(UNITS)]
    return keras.Sequential([*layers, keras.layers.Dense(_CLASSES)])


def _compile_wide(
    model: keras.Model, options: ParallelismOptions, **distribution: Any
) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _compile(model, loss, options, **distribution)


def _data_parallel(
    options: ParallelismOptions, shard_state: bool = False
) -> keras.Model:
    return _compile_wide(_build_wide(options), options, shard_state=shard_state)


def _fully_sharded(options: ParallelismOptions, reshard: bool) -> keras.Model:
    model = parallel.fully_shard(_build_wide(options), reshard_after_forward=reshard)
    return _compile_wide(model, options)


def _model_parallel(options: ParallelismOptions) -> keras.Model:
    with parallel.Mesh(model=hvd.size()) as mesh:
        model = _build_wide(
            options,
            functools.partial(parallel.ColumnParallelDense, gather_output=False),
            functools.partial(parallel.RowParallelDense, input_is_parallel=True),
        )
    return _compile_wide(model, options, mesh=mesh)


def _pipeline(options: ParallelismOptions) -> keras.Model:
    size = hvd.size()
    # Stages of complete pairs send the narrow activations, not the wide ones.
    stages = [2 * len(pairs) for pairs in np.array_split(range(_PAIRS), size)]
    stages[-1] += 1
    with parallel.Mesh(pipeline=size) as mesh:
        model = parallel.PipelineModel(_build_wide(options), stages)
    return _compile_wide(model, options, mesh=mesh)


_WIDE_KINDS = {
    "replicated": Kind(build=_data_parallel),
    "state": Kind(build=functools.partial(_data_parallel, shard_state=True)),
    "full": Kind(build=functools.partial(_fully_sharded, reshard=True)),
    "gathered": Kind(build=functools.partial(_fully_sharded, reshard=False)),
    "model": Kind(build=_model_parallel, shares_samples=True),
    "pipeline": Kind(build=_pipeline, shares_samples=True, most_ranks=_PAIRS),
}

WORKLOADS = {
    "recommender": ParallelWorkload(_recommender_samples, _RECOMMENDER_KINDS),
    "wide": ParallelWorkload(_wide_samples, _WIDE_KINDS),
}
