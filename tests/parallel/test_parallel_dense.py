"""Dense layers that are divided, against their dense twin."""

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
INPUTS, HIDDEN, OUTPUTS, BATCH, STEPS = 13, 17, 3, 6, 10


@pytest.fixture(scope="module")
def meshes():
    with shared.all_meshes() as found:
        yield found


LAYERS = {
    "column": lambda: parallel.ColumnParallelDense(HIDDEN, activation="tanh"),
    "column, softmax": lambda: parallel.ColumnParallelDense(
        HIDDEN, activation="softmax", use_bias=False
    ),
    "row": lambda: parallel.RowParallelDense(HIDDEN, activation="tanh"),
    "column, row": lambda: keras.Sequential(
        [
            parallel.ColumnParallelDense(
                HIDDEN, activation="gelu", gather_output=False
            ),
            parallel.RowParallelDense(OUTPUTS, input_is_parallel=True),
        ]
    ),
}
TWINS = {
    "column": lambda: keras.layers.Dense(HIDDEN, activation="tanh"),
    "column, softmax": lambda: keras.layers.Dense(
        HIDDEN, activation="softmax", use_bias=False
    ),
    "row": lambda: keras.layers.Dense(HIDDEN, activation="tanh"),
    "column, row": lambda: keras.Sequential(
        [keras.layers.Dense(HIDDEN, activation="gelu"), keras.layers.Dense(OUTPUTS)]
    ),
}


def with_more_ranks(names, long=()):
    """The last one also on three and four ranks."""
    *others, last = names
    return [
        *(
            pytest.param(name, marks=pytest.mark.release if name in long else ())
            for name in others
        ),
        pytest.param(last, marks=[ranks, four_ranks]),
    ]


@pytest.mark.parametrize("name", with_more_ranks(LAYERS))
def test_a_layer_computes_what_its_dense_twin_does(meshes, name):
    for mesh in meshes:
        keras.utils.set_random_seed(3)
        twin = TWINS[name]()
        expected = run(twin)
        keras.utils.set_random_seed(3)
        with mesh:
            layer = LAYERS[name]()
        output, by_input, by_weights = run(layer)
        np.testing.assert_allclose(output, expected[0], atol=1e-6)
        np.testing.assert_allclose(by_input, expected[1], atol=1e-6)
        pairs = zip(layer.trainable_variables, by_weights, strict=True)
        twins = zip(twin.trainable_variables, expected[2], strict=True)
        for (variable, found), (dense, wanted) in zip(pairs, twins, strict=True):
            np.testing.assert_array_equal(
                variable, shared.slice_of(variable, dense.numpy())
            )
            np.testing.assert_allclose(
                found, shared.slice_of(variable, wanted), atol=1e-6
            )
        assert any(map(get_sharding, layer.trainable_variables))


def run(layer):
    """Output, and gradients by input and by weights, of a sum that is not symmetric."""
    rng = np.random.default_rng(5)
    x = tf.constant(rng.normal(size=(BATCH, INPUTS)).astype("float32"))
    layer(x)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x)
            factors = np.random.default_rng(6).normal(size=output.shape)
            loss = tf.reduce_sum(tf.sin(output) * factors.astype("float32"))
        return output, tape.gradient(loss, [x, *layer.trainable_variables])

    output, (by_input, *by_weights) = step(x)
    return output.numpy(), by_input.numpy(), [each.numpy() for each in by_weights]


OPTIMIZERS = {
    "adam, norms, accumulation": lambda: keras.optimizers.Adam(
        0.02, clipnorm=0.05, gradient_accumulation_steps=2
    ),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1, clipvalue=0.02),
    "momentum, global norm": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=0.2
    ),
}


def test_an_optimizer_that_needs_whole_variables_is_refused(meshes):
    with meshes[0]:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Lamb(), mesh=meshes[0])
        divided = model(
            parallel.ColumnParallelDense, parallel.RowParallelDense, optimizer
        )
    with pytest.raises(ValueError, match="Lamb computes the update of an element"):
        divided.fit(np.zeros((2, INPUTS)), np.zeros(2), verbose=0)


@ranks
@four_ranks
def test_gradients_of_slices_are_reduced_over_copies_alone(meshes):
    mesh = meshes[-1]
    with mesh:
        layer = parallel.RowParallelDense(HIDDEN, use_bias=False)
    layer.build((None, INPUTS))
    for ranks_of in (parallel.mesh.OneRank(), hvd.global_process_set):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(), process_set=ranks_of
        )
        with pytest.raises(ValueError, match="Pass the mesh of the layers"):
            optimizer.apply([layer.kernel], [layer.kernel])

    def gradient_of(process_set):
        tape = hvd.DistributedGradientTape(tf.GradientTape(), process_set=process_set)
        with tape:
            loss = tf.reduce_sum(layer.kernel * (1.0 + mesh.data.index))
        return tape.gradient(loss, layer.kernel.value)

    with pytest.raises(ValueError, match="to the tape"):
        gradient_of(hvd.global_process_set)
    expected = np.full(layer.kernel.shape, (1.0 + mesh.data.size) / 2)
    np.testing.assert_array_equal(gradient_of(mesh.data.process_set), expected)


def test_fewer_units_than_ranks_are_refused(meshes):
    with meshes[0]:
        layer = parallel.ColumnParallelDense(SIZE - 1)
    with pytest.raises(ValueError, match="needs one of its units on each of the"):
        layer.build((None, INPUTS))


def test_lora_and_quantization_are_refused(meshes):
    with meshes[0]:
        layers = [
            parallel.ColumnParallelDense(HIDDEN),
            parallel.RowParallelDense(HIDDEN),
            parallel.ShardedEmbedding(INPUTS, HIDDEN),
        ]
        attention = parallel.ParallelMultiHeadAttention(4, 3)
        with pytest.raises(ValueError, match="quantization_mode='int8'"):
            parallel.RowParallelDense(HIDDEN, dtype="int8_from_float32")
    attention.build((None, 5, INPUTS), (None, 5, INPUTS))
    layers += [attention._query_dense, attention._output_dense]
    for layer in layers:
        if not layer.built:
            layer.build((None, INPUTS))
        with pytest.raises(ValueError, match=f"{layer.name}' does not support LoRA"):
            layer.enable_lora(2)
        with pytest.raises(ValueError, match="does not support quantization"):
            layer.quantize("int8")
    network = keras.Sequential([keras.Input((INPUTS,)), layers[0]])
    with pytest.raises(ValueError, match="does not support quantization"):
        network.quantize("int8")


def test_a_clone_is_divided(meshes):
    with meshes[0]:
        x = inputs = keras.Input((5,), dtype="int32")
        x = parallel.ShardedEmbedding(INPUTS, HIDDEN, slicing="column")(x)
        x = parallel.ParallelMultiHeadAttention(4, 3)(x, x)
        x = parallel.ColumnParallelDense(HIDDEN, gather_output=False)(x) * 2
        x = parallel.RowParallelDense(OUTPUTS, input_is_parallel=True)(x)
    network = keras.Model(inputs, x)
    cloned = keras.models.clone_model(network)
    assert [type(a) for a in cloned.layers] == [type(a) for a in network.layers]
    cloned.set_weights(network.get_weights())
    ids = np.arange(10).reshape(2, 5)
    np.testing.assert_array_equal(cloned(ids), network(ids))
    nested = keras.Sequential([keras.Input((5,), dtype="int32"), network])
    with pytest.raises(ValueError, match="that contains sharded layers"):
        keras.models.clone_model(nested)
    keras.models.clone_model(nested, recursive=True)


def test_a_plain_optimizer_is_refused(meshes):
    with meshes[0]:
        divided = model(parallel.ColumnParallelDense, parallel.RowParallelDense, "sgd")
    with pytest.raises(ValueError, match="was compiled with a plain optimizer"):
        divided.fit(np.zeros((2, INPUTS)), np.zeros(2), verbose=0)


@four_ranks
def test_all_copies_are_those_of_the_root(meshes):
    mesh, root = meshes[-1], SIZE - 1
    with mesh:
        divided = model(
            parallel.ColumnParallelDense,
            parallel.RowParallelDense,
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), mesh=mesh),
            seed=RANK,
        )
    before = hvd.allgather_object([v.numpy() for v in divided.weights])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root)
    divided.fit(np.zeros((1, INPUTS)), np.zeros(1), verbose=0, callbacks=[callback])
    # Ranks are numbered along the axis model first.
    of_slices = before[root - 1 + mesh.model.index]
    weights = zip(divided.weights, before[root], of_slices, strict=True)
    for variable, of_root, of_slice in weights:
        expected = of_slice if get_sharding(variable) else of_root
        np.testing.assert_array_equal(variable, expected)


@ranks
@four_ranks
def test_ranks_skip_a_step_in_which_a_slice_overflows(meshes):
    for mesh in meshes:
        keras.utils.set_random_seed(3)
        with mesh:
            layer = parallel.ColumnParallelDense(HIDDEN, use_bias=False)
            layer.build((None, 1))
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
            mesh=mesh,
        )
        optimizer.build(layer.trainable_variables)
        before = layer.kernel.numpy()
        value = np.inf if RANK == SIZE - 1 else 1.0
        optimizer.apply([tf.fill(layer.kernel.shape, value)])
        np.testing.assert_array_equal(layer.kernel, before)
        optimizer.apply([tf.fill(layer.kernel.shape, float(optimizer.dynamic_scale))])
        np.testing.assert_allclose(layer.kernel, before - 0.5)


def model(column, row, optimizer, seed=3):
    keras.utils.set_random_seed(seed)
    network = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, "tanh"),
            column(
                2 * HIDDEN,
                activation="relu",
                kernel_regularizer=keras.regularizers.L2(0.01),
            ),
            row(HIDDEN, activation="relu"),
            # TensorFlow fused its operations by the shapes of slices before it.
            keras.layers.LayerNormalization(),
            keras.layers.Dense(OUTPUTS, activation="softmax"),
        ]
    )
    network.compile(optimizer, oracle.LOSS, metrics=["accuracy"])
    return network


@pytest.mark.parametrize("name", with_more_ranks(OPTIMIZERS, long=["adamw"]))
def test_fit_equals_the_dense_model_with_the_big_batch(meshes, name):
    rng = np.random.default_rng(7)
    # It has replicas, if any has.
    mesh = meshes[-1]
    batch = BATCH * mesh.data.size
    x = rng.normal(size=(STEPS * batch, INPUTS)).astype("float32")
    y = rng.integers(0, OUTPUTS, len(x))
    dense = keras.layers.Dense
    history, weights = oracle.fit_on_one_process(
        lambda: model(dense, dense, OPTIMIZERS[name]()), x, y, batch
    )
    with mesh:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](), mesh=mesh)
        divided = model(
            parallel.ColumnParallelDense, parallel.RowParallelDense, optimizer
        )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.ConsistencyCheckCallback(4),
    ]
    found = shared.fit_replicas(mesh, divided, x, y, BATCH, callbacks)
    for key, values in history.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-5)
    shared.assert_slices_of(divided, weights)


@four_ranks
def test_different_samples_of_a_replica_are_an_error_on_all_its_ranks(meshes):
    for mesh in meshes:
        keras.utils.set_random_seed(1)
        with mesh:
            layer = parallel.ColumnParallelDense(HIDDEN, "softmax")
        model = keras.Sequential([keras.Input((oracle.FEATURES,)), layer])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), mesh=mesh)
        model.compile(optimizer, oracle.LOSS)
        inputs, labels = oracle.samples(2)
        shared.fit_replicas(mesh, model, inputs, labels, 2)
        # As without a mesh.
        mine = oracle.shard(inputs), oracle.shard(labels)
        for run in (model.fit, model.evaluate):
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="different samples"
            ):
                run(*mine, verbose=0)


def test_one_rank_alone_evaluates_a_model_of_which_nothing_is_divided():
    mesh = parallel.Mesh(model=2)
    model = oracle.build_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), mesh=mesh)
    model.compile(optimizer, oracle.LOSS)
    x, y = oracle.samples(1)
    model.fit(x, y, shuffle=False, verbose=0)
    if hvd.rank() == 0:
        expected = float(np.mean(keras.losses.get(oracle.LOSS)(y, model(x))))
        assert model.evaluate(x, y, verbose=0) == pytest.approx(expected, rel=1e-5)
    mesh.remove()
