"""Divided embeddings, against `keras.layers.Embedding` in one process."""

import keras
import meshes as shared
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import parallel
from hvdtrain.sharding.shards import get_sharding

ranks, four_ranks = pytest.mark.ranks, pytest.mark.four_ranks
long = pytest.mark.release
RANK, SIZE = hvd.rank(), hvd.size()
ROWS, COLUMNS, LENGTH, BATCH, STEPS = 17, 5, 3, 4, 10
SLICINGS = ["row", "column"]


@pytest.fixture(scope="module")
def mesh():
    """All ranks on the axis data; of four, two of them with model groups of two."""
    mesh = parallel.Mesh(model=2 if SIZE == 4 else 1)
    yield mesh
    mesh.remove()


INITIALIZERS = {
    "uniform": lambda: keras.initializers.RandomUniform(-0.3, 0.4, seed=3),
    "normal": lambda: keras.initializers.RandomNormal(
        0.1, 0.2, seed=keras.random.SeedGenerator(5)
    ),
    "truncated": lambda: keras.initializers.TruncatedNormal(seed=3),
    "constant": lambda: keras.initializers.Constant(0.25),
    "own": lambda: (
        lambda shape, dtype=None: tf.cast(
            tf.reshape(tf.range(np.prod(shape)), shape), dtype
        )
    ),
}


# The larger table is drawn in several chunks, of elements that no four divide.
@pytest.mark.parametrize(
    ("rows", "dtype"), [(250_001, "float32"), (ROWS, "float64"), (ROWS, "bfloat16")]
)
def test_initial_values_are_those_of_the_dense_table(rows, dtype):
    for make in INITIALIZERS.values():
        dense = keras.layers.Embedding(rows, COLUMNS, make(), dtype=dtype)
        dense.build()
        for slicing in SLICINGS:
            layer = parallel.ShardedEmbedding(
                rows, COLUMNS, make(), dtype=dtype, slicing=slicing
            )
            layer.build()
            wanted = shared.slice_of(layer.embeddings, dense.embeddings.numpy())
            np.testing.assert_array_equal(layer.embeddings, wanted)


def test_weights_are_those_of_the_dense_table():
    dense = np.arange(ROWS * COLUMNS, dtype="float32").reshape(ROWS, COLUMNS)
    for slicing in SLICINGS:
        layer = parallel.ShardedEmbedding(ROWS, COLUMNS, weights=dense, slicing=slicing)
        sharding = get_sharding(layer.embeddings)
        assert sum(sharding.sizes) == dense.shape[sharding.axis]
        np.testing.assert_array_equal(layer.embeddings, sharding.shard(dense))


def ids_of(rank):
    """Ids that repeat, one of them negative; rank 1 has none."""
    rng = np.random.default_rng(rank)
    return rng.integers(-1, ROWS, (0 if rank == 1 else rank + BATCH, LENGTH))


def gradients(layer, ids, factor):
    """The output, and the gradient of a sum that is not symmetric."""
    with tf.GradientTape() as tape:
        output = layer(ids)
        powers = tf.cast(tf.range(1, COLUMNS + 1), output.dtype)
        loss = tf.reduce_sum(tf.sin(output * powers)) * factor
    return output, tape.gradient(loss, layer.trainable_variables)[0]


@pytest.mark.parametrize(
    ("dtype", "slicing"),
    [
        pytest.param("float32", "row", marks=[ranks, four_ranks]),
        pytest.param("float32", "column", marks=[ranks, four_ranks, long]),
        ("mixed_float16", "row"),
        pytest.param("bfloat16", "column", marks=long),
    ],
)
def test_rows_and_their_gradients_are_those_of_the_dense_table(mesh, slicing, dtype):
    def make(layer, **options):
        keras.utils.set_random_seed(3)
        return layer(ROWS, COLUMNS, dtype=dtype, **options)

    dense = make(keras.layers.Embedding)
    layer = make(parallel.ShardedEmbedding, slicing=slicing, mesh=mesh)
    data = mesh.data
    ids = tf.constant(ids_of(data.index))
    output, gradient = tf.function(gradients)(layer, ids, data.index + 1.0)
    assert isinstance(gradient, tf.IndexedSlices)
    assert len(set(gradient.indices.numpy())) == len(gradient.indices)
    expected = [
        gradients(dense, tf.constant(ids_of(r)), r + 1.0) for r in range(data.size)
    ]
    np.testing.assert_array_equal(output, expected[data.index][0])
    total = sum(tf.cast(tf.convert_to_tensor(each), tf.float32) for _, each in expected)
    found = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
    tolerance = {"float32": 1e-5, "mixed_float16": 2e-2, "bfloat16": 1e-1}[dtype]
    np.testing.assert_allclose(
        found, shared.slice_of(layer.embeddings, total), rtol=tolerance, atol=tolerance
    )


def test_an_optimizer_takes_the_gradients_of_a_distributed_tape():
    table = parallel.ShardedEmbedding(ROWS, COLUMNS, "zeros")
    table.build()
    local = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(SGD(1.0))
    optimizer.register_local_var(local)
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    tape.register_local_source(local.value)
    with tape:
        loss = tf.reduce_sum(table(tf.range(ROWS))) + local.value
    variables = [table.embeddings, local]
    optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
    np.testing.assert_allclose(table.embeddings, -np.ones(table.embeddings.shape))
    np.testing.assert_allclose(local, -1 / SIZE, rtol=1e-6)


def test_weights_of_gradients_are_refused():
    table = parallel.ShardedEmbedding(ROWS, COLUMNS)
    table.build()
    optimizer = hvd.DistributedOptimizer(SGD(1.0))
    optimizer.reduction_hook.weigh_gradients(1.5)
    with pytest.raises(ValueError, match="Use equal batch sizes on all ranks"):
        optimizer.apply([table.embeddings], [table.embeddings])


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
def test_an_id_out_of_range_on_one_rank_fails_on_all(wrap):
    for slicing in SLICINGS:
        layer = parallel.ShardedEmbedding(ROWS, COLUMNS, slicing=slicing)
        layer(np.zeros([1]))
        ids = tf.constant([1, ROWS + 3 if RANK == SIZE - 1 else 0])
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"{ROWS + 3}"):
            wrap(layer)(ids)
        layer(np.zeros([1]))


def test_arguments_that_need_the_full_table_are_refused():
    for slicing, options, message in [
        ("rows", {}, 'slicing must be "row" or "column"'),
        ("row", {"lora_rank": 2}, "does not support lora_rank"),
        ("row", {"embeddings_constraint": "max_norm"}, "constraints of axis=1"),
        ("row", {"embeddings_regularizer": "orthogonal_regularizer"}, "supports L1"),
    ]:
        with pytest.raises(ValueError, match=message):
            parallel.ShardedEmbedding(ROWS, COLUMNS, slicing=slicing, **options)


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
CASES = {
    "sgd": (keras.layers.Embedding, lambda: SGD(0.5), "row"),
    "adam, norms, accumulation": (
        shared.Summing,
        lambda: ADAM(0.02, clipnorm=0.05, gradient_accumulation_steps=2),
        "row",
    ),
    "adam, two calls": (shared.Summing, lambda: ADAM(0.02), "row"),
    "momentum, global norm": (
        shared.Summing,
        lambda: SGD(0.1, momentum=0.9, global_clipnorm=0.1),
        "column",
    ),
}


def model(embedding, optimizer, regularizer="l2", calls=1):
    keras.utils.set_random_seed(3)
    ids = keras.Input((LENGTH,), dtype="int32")
    table = embedding(ROWS, COLUMNS, mask_zero=True, embeddings_regularizer=regularizer)
    rows = [keras.layers.GlobalAveragePooling1D()(table(ids)) for _ in range(calls)]
    x = keras.layers.Concatenate()(rows) if calls > 1 else rows[0]
    network = keras.Model(ids, keras.layers.Dense(3, "softmax")(x))
    network.compile(optimizer, oracle.LOSS)
    return network


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sgd", marks=long),
        "adam, norms, accumulation",
        pytest.param("adam, two calls", marks=long),
        pytest.param("momentum, global norm", marks=[long, ranks, four_ranks]),
    ],
)
def test_fit_equals_the_dense_model_with_the_big_batch(mesh, name):
    twin, make, slicing = CASES[name]
    calls = 2 if "two calls" in name else 1
    is_sparse = name in ("sgd", "adam, two calls")
    regularizer = None if is_sparse else keras.regularizers.L2(0.01)
    rng = np.random.default_rng(7)
    batch = BATCH * mesh.data.size
    x = rng.integers(0, ROWS, (STEPS * batch, LENGTH))
    x[:, 0] = 1  # not all of a sample is masked
    y = rng.integers(0, 3, len(x))
    history, weights = oracle.fit_on_one_process(
        lambda: model(twin, make(), regularizer, calls), x, y, batch
    )
    optimizer = hvd.DistributedOptimizer(make(), process_set=mesh.data.process_set)

    def embedding(*args, **options):
        return parallel.ShardedEmbedding(*args, slicing=slicing, **options)

    with mesh:
        divided = model(embedding, optimizer, regularizer, calls)
    found = shared.fit_replicas(mesh, divided, x, y, BATCH)
    np.testing.assert_allclose(found["loss"], history["loss"], rtol=1e-5)
    shared.assert_slices_of(divided, weights)
