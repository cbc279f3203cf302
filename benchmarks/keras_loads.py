r"""The workloads of `benchmarks.loads` as compiled Keras models.

mpirun -np 2 python -m hvdtrain.benchmark --workload=benchmarks.keras_loads:gpt2 \
  --batch_size=4 --seconds=20
mpirun -np 2 python -m hvdtrain.benchmark --workload=benchmarks.keras_loads:dlrm \
  --batch_size=1024 --steps_per_execution=10

gpt2 needs keras-hub (scripts/requirements_hub.txt).
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras

from benchmarks.loads import Dlrm, Gpt2, Samples
from hvdtrain import parallel

# Returns rows of shape (samples, tables, columns), of ids of shape (samples, tables).
LookUp = Callable[[Dlrm, keras.KerasTensor], keras.KerasTensor]
# A compiled model, and a function that returns the samples of a rank.
Workload = tuple[keras.Model, Callable[[int, int], Samples]]


def gpt2() -> Workload:
    """Return GPT-2 in float32."""
    return build_gpt2(Gpt2()), _samples(Gpt2())


def gpt2_bfloat16() -> Workload:
    """Return GPT-2 that computes in bfloat16, with weights in float32."""
    return build_gpt2(Gpt2(), dtype="mixed_bfloat16"), _samples(Gpt2())


def gpt2_xla() -> Workload:
    """Return GPT-2 in float32, whose forward and backward pass XLA compiles."""
    return build_gpt2(Gpt2(), jit_compile=True), _samples(Gpt2())


def dlrm() -> Workload:
    """Return DLRM with a replica of each table on each rank."""
    return build_dlrm(Dlrm(), "replicated"), _samples(Dlrm())


def _samples(load: Gpt2 | Dlrm) -> Callable[[int, int], Samples]:
    return lambda count, rank: load.samples(count, seed=rank)


def build_gpt2(
    load: Gpt2, dtype: str = "float32", *, jit_compile: bool = False
) -> keras.Model:
    """Return the compiled GPT-2 of keras-hub, which returns logits of tokens.

    Args:
        dtype: a name of a `keras.DTypePolicy`.
        jit_compile: see `keras.Model.compile`.
    """
    # Not at the top: nothing else here needs it.
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        load.vocabulary,
        num_layers=load.layers,
        num_heads=load.heads,
        hidden_dim=load.width,
        intermediate_dim=4 * load.width,
        max_sequence_length=load.length,
        dropout=0.0,
        dtype=dtype,
    )
    tokens = keras.Input((load.length,), dtype="int32")
    mask = keras.ops.ones_like(tokens)
    hidden = backbone({"token_ids": tokens, "padding_mask": mask})
    model = keras.Model(tokens, backbone.token_embedding(hidden, reverse=True))
    beta_1, beta_2 = load.betas
    optimizer = keras.optimizers.AdamW(
        load.learning_rate,
        weight_decay=load.weight_decay,
        beta_1=beta_1,
        beta_2=beta_2,
        epsilon=load.epsilon,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    return model


def build_dlrm(load: Dlrm, tables: str) -> keras.Model:
    """Return the compiled DLRM, which returns logits.

    Args:
        tables: "replicated", or "together": replicated as well, in one layer; or how
            they are sharded: "row", "column" or "tables".
    """
    features = keras.Input((load.features,))
    ids = keras.Input((load.tables,), dtype="int32")
    x = _dense((*load.bottom, load.columns))(features)
    vectors = keras.ops.concatenate([x[:, None], LOOK_UPS[tables](load, ids)], axis=1)
    products = keras.ops.matmul(vectors, keras.ops.transpose(vectors, (0, 2, 1)))
    count = load.tables + 1
    rows, columns = load.pairs
    products = keras.ops.reshape(products, (-1, count * count))
    pairs = keras.ops.take(products, rows * count + columns, axis=1)
    x = _dense(load.top)(keras.ops.concatenate([x, pairs], axis=1))
    model = keras.Model((features, ids), keras.layers.Dense(1)(x))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(load.learning_rate), loss)
    return model


def _dense(units: Sequence[int]) -> keras.Sequential:
    return keras.Sequential([keras.layers.Dense(u, activation="relu") for u in units])


def _look_up_each(
    make: Callable[[int, int], keras.Layer], load: Dlrm, ids: keras.KerasTensor
) -> keras.KerasTensor:
    rows = [make(load.rows, load.columns)(ids[:, i]) for i in range(load.tables)]
    return keras.ops.stack(rows, axis=1)


def _look_up_together(
    load: Dlrm, ids: keras.KerasTensor, **options: Any
) -> keras.KerasTensor:
    embedding, count = keras.layers.Embedding, load.tables
    layer = parallel.DistributedEmbedding(
        [embedding(load.rows, load.columns) for _ in range(count)], **options
    )
    return keras.ops.stack(layer([ids[:, i] for i in range(count)]), axis=1)


LOOK_UPS: dict[str, LookUp] = {
    "replicated": functools.partial(_look_up_each, keras.layers.Embedding),
    "row": functools.partial(
        _look_up_each, functools.partial(parallel.ShardedEmbedding, slicing="row")
    ),
    "column": functools.partial(
        _look_up_each, functools.partial(parallel.ShardedEmbedding, slicing="column")
    ),
    "tables": functools.partial(_look_up_together, strategy="memory_balanced"),
    "together": functools.partial(
        _look_up_together, data_parallel_threshold=sys.maxsize
    ),
}
