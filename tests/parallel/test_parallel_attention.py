"""Attention that is divided by heads, against its dense twin."""

import dataclasses
import inspect

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
RANK, SIZE = hvd.rank(), hvd.size()
BATCH, QUERIES, KEYS, HEADS = 3, 4, 5, 5
RNG = np.random.default_rng(5)


def normal(*shape):
    return tf.constant(RNG.normal(size=shape).astype("float32"))


X = normal(BATCH, QUERIES, 7)
CROSSED = (X, normal(BATCH, KEYS, 6), normal(BATCH, KEYS, 2))
MASK = tf.constant(RNG.random((BATCH, QUERIES, KEYS)) < 0.6)
MASK_BY_HEAD = tf.constant(RNG.random((BATCH, HEADS, QUERIES, KEYS)) < 0.6)
L2 = keras.regularizers.L2(0.1)
# Not in Keras 3.13 and before.
HAS_GATE = "use_gate" in inspect.signature(keras.layers.MultiHeadAttention).parameters
GATE = {"use_gate": True} if HAS_GATE else {}
# The inputs, the arguments of the layer, and those of the call.
VARIANTS = {
    "several axes": (
        (normal(2, 3, 2, 4), normal(2, 3, 2, 4)),
        {"attention_axes": (1, 2), "output_shape": (2, 3), "use_bias": False},
        {},
    ),
    "of itself, causal": (
        (X, X),
        {
            "value_dim": 2,
            "bias_initializer": "ones",
            "activity_regularizer": L2,
            **GATE,
        },
        {"use_causal_mask": True},
    ),
    "crossed, masked by head": (CROSSED, {}, {"attention_mask": MASK_BY_HEAD}),
    "crossed, one mask for all heads": (
        CROSSED,
        {},
        {"attention_mask": MASK[:, tf.newaxis]},
    ),
    "crossed, scores, masked": (
        CROSSED,
        {},
        {"return_attention_scores": True, "attention_mask": MASK},
    ),
    "crossed, scores, masked, dropout": (
        CROSSED,
        {"dropout": 0.4, "kernel_regularizer": L2, "bias_initializer": "ones"},
        {"return_attention_scores": True, "attention_mask": MASK, "training": True},
    ),
}


@pytest.fixture(scope="module")
def meshes():
    with shared.all_meshes() as found:
        yield found


@pytest.mark.parametrize(
    "name",
    [*list(VARIANTS)[:-1], pytest.param(list(VARIANTS)[-1], marks=[ranks, four_ranks])],
)
def test_attention_computes_what_its_dense_twin_does(meshes, name):
    inputs, arguments, call = VARIANTS[name]
    for mesh in meshes:
        keras.utils.set_random_seed(3)
        twin = keras.layers.MultiHeadAttention(HEADS, 3, **arguments)
        expected = run(twin, inputs, call)
        keras.utils.set_random_seed(3)
        with mesh:
            layer = parallel.ParallelMultiHeadAttention(HEADS, 3, **arguments)
        check(layer, run(layer, inputs, call), twin, expected)


def check(layer, found, twin, expected):
    assert len(layer.losses) == len(twin.losses)
    for mine, wanted in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(mine, wanted, atol=2e-6)
    pairs = zip(layer.weights, found[1], strict=True)
    twins = zip(twin.weights, expected[1], strict=True)
    for (variable, mine), (dense, wanted) in zip(pairs, twins, strict=True):
        assert variable.path.split("/")[1:] == dense.path.split("/")[1:]
        value = shared.slice_of(variable, dense.numpy())
        np.testing.assert_array_equal(variable, value)
        wanted = shared.slice_of(variable, wanted)
        np.testing.assert_allclose(mine, wanted, atol=2e-6)
    assert layer.get_config() == twin.get_config() | {"name": layer.name}
    whole = {v.path.split("/", 1)[1] for v in layer.weights if not get_sharding(v)}
    assert whole <= {"attention_output/bias"}


def run(layer, inputs, call):
    """Outputs and gradients by inputs; gradients by weights; of the sum of losses."""
    distinct = list({id(x): x for x in inputs}.values())
    layer.build(*(x.shape for x in inputs))
    with tf.GradientTape() as tape:
        tape.watch(distinct)
        outputs = tf.nest.flatten(layer(*inputs, **call))
        losses = [tf.reduce_sum(tf.sin(each)) for each in outputs]
        loss = tf.add_n([*losses, *layer.losses])
    by_inputs, by_weights = tape.gradient(
        loss, [distinct, [v.value for v in layer.weights]]
    )
    return [loss, *outputs, *by_inputs], by_weights


def test_gradients_of_projections_are_products_over_all_positions(meshes):
    with meshes[0]:
        layer = parallel.ParallelMultiHeadAttention(2 * SIZE, 8)
    x = normal(4, 8, 32)
    layer(x, x)

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, x))
        return tape.gradient(loss, [weight.value for weight in layer.weights])

    graph = gradients.get_concrete_function(x).graph
    shapes = [tensor.shape for op in graph.get_operations() for tensor in op.outputs]
    # A kernel has 32 inputs, 2 heads and 8 columns on a rank.
    assert max(shape.num_elements() or 0 for shape in shapes) < 4 * 8 * (32 * 2 * 8)


def test_grouped_attention_computes_what_its_dense_twin_does(meshes):
    arguments = {"dropout": 0.4, "kernel_regularizer": L2, **GATE}
    mask = RNG.random((BATCH, 3 * SIZE, QUERIES, QUERIES)) < 0.6
    call = {
        "attention_mask": tf.constant(mask),
        "return_attention_scores": True,
        "training": True,
        "use_causal_mask": True,
    }
    keras.utils.set_random_seed(3)
    twin = keras.layers.GroupQueryAttention(3, 3 * SIZE, SIZE, **arguments)
    expected = run(twin, (X, X), call)
    keras.utils.set_random_seed(3)
    layer = parallel.ParallelGroupQueryAttention(
        3, 3 * SIZE, SIZE, mesh=meshes[0], **arguments
    )
    check(layer, run(layer, (X, X), call), twin, expected)


# Keras warns of masks that its own projections do not use.
@pytest.mark.filterwarnings("ignore:Layer '.*' .of type EinsumDense")
@pytest.mark.parametrize(
    ("dense", "divided"),
    [
        (keras.layers.MultiHeadAttention, parallel.ParallelMultiHeadAttention),
        (keras.layers.GroupQueryAttention, parallel.ParallelGroupQueryAttention),
    ],
)
def test_masks_of_inputs_have_the_effect_that_they_have_in_keras(
    meshes, dense, divided
):
    results = []
    for make in (dense, divided):
        keras.utils.set_random_seed(3)
        embedding = keras.layers.Embedding(6, 7, mask_zero=True)
        embedded = embedding(np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4]]))
        with meshes[0]:
            attended = make(SIZE, SIZE, SIZE)(embedded, embedded)
        results.append((attended, attended._keras_mask, embedded._keras_mask))
    (wanted, *wanted_masks), (found, *found_masks) = results
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    for mask, other in zip(found_masks, wanted_masks, strict=True):
        np.testing.assert_array_equal(mask, other)


def test_what_cannot_be_divided_is_refused(meshes):
    with meshes[0]:
        with pytest.raises(ValueError, match=f"on each of the {SIZE} ranks"):
            parallel.ParallelMultiHeadAttention(SIZE - 1, 3)
        with pytest.raises(ValueError, match=f"multiple of the {SIZE} ranks"):
            parallel.ParallelGroupQueryAttention(3, 15, 5)
        with pytest.raises(ValueError, match="does not support bias_constraint"):
            parallel.ParallelMultiHeadAttention(4, 3, bias_constraint="non_neg")
        layer = parallel.ParallelMultiHeadAttention(HEADS, 3)
        with pytest.raises(ValueError, match=f"expected {HEADS} or 1"):
            layer(*CROSSED, attention_mask=MASK_BY_HEAD[:, : HEADS - 1])


VOCABULARY, WIDTH, LENGTH, STEPS = 13, 6, 5, 10


def transformer(mesh, optimizer, rate, classes):
    """One block that predicts the next token."""
    # Names are counted from 1.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    ids = keras.Input((LENGTH,), dtype="int32")
    with mesh:
        x = keras.layers.Embedding(VOCABULARY, WIDTH)(ids)
        x += classes["attention"](HEADS, 3, dropout=rate)(x, x, use_causal_mask=True)
        x = keras.layers.Dropout(rate)(keras.layers.LayerNormalization()(x))
        hidden = classes["column"](17, activation="gelu")(x)
        hidden = classes["dropout"](rate)(hidden)
        x += classes["row"](WIDTH)(hidden)
        logits = classes["column"](VOCABULARY)(x)
        model = keras.Model(ids, logits)
        loss = classes["loss"](from_logits=True, ignore_class=0)
        model.compile(optimizer, loss, weighted_metrics=[classes["metric"]()])
    return model


DENSE = {
    "attention": keras.layers.MultiHeadAttention,
    "column": keras.layers.Dense,
    "row": keras.layers.Dense,
    "dropout": keras.layers.Dropout,
    "loss": keras.losses.SparseCategoricalCrossentropy,
    "metric": keras.metrics.SparseCategoricalAccuracy,
}
DIVIDED = {
    "attention": parallel.ParallelMultiHeadAttention,
    "column": lambda *args, **kwargs: parallel.ColumnParallelDense(
        *args, gather_output=False, **kwargs
    ),
    "row": lambda units: parallel.RowParallelDense(units, input_is_parallel=True),
    "dropout": parallel.ParallelDropout,
    "loss": parallel.ParallelSparseCategoricalCrossentropy,
    "metric": parallel.ParallelSparseCategoricalAccuracy,
}


@pytest.mark.parametrize(
    ("policy", "rtol", "atol"),
    [
        pytest.param("float32", 1e-5, 5e-6, marks=four_ranks),
        # Eight bits of mantissa, sums in another order, and steps that add up to 1.9.
        pytest.param("mixed_bfloat16", 5e-3, 5e-2, marks=pytest.mark.release),
    ],
)
def test_fit_equals_the_dense_transformer_with_the_big_batch(
    meshes, policy, rtol, atol
):
    keras.config.set_dtype_policy(policy)
    rng = np.random.default_rng(7)
    mesh = meshes[-1]
    batch = BATCH * mesh.data.size
    x = rng.integers(1, VOCABULARY, (STEPS * batch, LENGTH))
    # As many labels to ignore in each replica's part of a batch.
    y = np.roll(x, -1, 1) * (np.arange(LENGTH) < LENGTH - 1)
    # The masks of data replicas are different, those of one process are not.
    rate = 0.3 if mesh.data.size == 1 else 0.0

    history, weights = oracle.fit_on_one_process(
        lambda: transformer(mesh, sgd(), rate, DENSE), x, y, batch
    )
    optimizer = hvd.DistributedOptimizer(sgd(), mesh=mesh)
    divided = transformer(mesh, optimizer, rate, DIVIDED)
    found = shared.fit_replicas(mesh, divided, x, y, BATCH)
    # Of logits that are nearly equal, rounding to bfloat16 decides the accuracy.
    for key in history if policy == "float32" else ["loss"]:
        np.testing.assert_allclose(found[key], history[key], rtol=rtol)
    shared.assert_slices_of(divided, weights, atol)


def test_the_file_of_a_divided_transformer_is_a_dense_model(meshes, tmp_path):
    path = hvd.broadcast_object(str(tmp_path / "model.keras"), name="path")
    optimizer = hvd.DistributedOptimizer(sgd(), mesh=meshes[0])
    divided = transformer(meshes[0], optimizer, 0.3, DIVIDED)
    divided.optimizer.build(divided.trainable_variables)
    divided.save(path)
    dense = transformer(meshes[0], sgd(), 0.3, DENSE)
    loaded = keras.models.load_model(path)
    assert loaded.to_json() == dense.to_json()
    assert loaded.get_compile_config() == dense.get_compile_config()
    for found, wanted in zip(loaded.weights, dense.weights, strict=True):
        np.testing.assert_array_equal(found, wanted)


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


@four_ranks
def test_masks_are_equal_in_a_model_group_and_different_in_replicas(meshes):
    mesh = meshes[-1]
    # A program that does not seed its ranks.
    keras.utils.set_random_seed(3 + RANK)
    with mesh:
        divided = parallel.ParallelDropout(0.5, noise_shape=(None, 1, None))
        column = parallel.ColumnParallelDense(31, gather_output=False)
        row = parallel.RowParallelDense(1, input_is_parallel=True)
    whole = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((2, 1)), column, divided, row, whole])
    model.compile(hvd.DistributedOptimizer(sgd(), mesh=mesh), "mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    one = np.ones((1, 2, 1))
    model.fit(one, one, verbose=0, callbacks=[callback])

    seed = divided.seed_generator.state.numpy()
    twin = keras.layers.Dropout(0.5, noise_shape=(None, 1, None), seed=int(seed[0]))
    twin.seed_generator.state.assign(seed)
    x = np.random.default_rng(1).normal(size=(6, 2, 31)).astype("float32")
    expected = twin(x, training=True).numpy()
    part = dataclasses.replace(get_sharding(column.bias), axis=2)
    found = divided(part.shard(x), training=True).numpy()
    assert found.tobytes() == part.shard(expected).tobytes()
    masks = [expected.tobytes(), whole(x, training=True).numpy().tobytes()]
    everyone = hvd.allgather_object((mesh.data.index, masks), name="masks")
    for replica, theirs in everyone:
        for mask, other in zip(masks, theirs, strict=True):
            assert (mask == other) == (replica == mesh.data.index)
