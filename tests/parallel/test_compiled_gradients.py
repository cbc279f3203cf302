"""`jit_compile=True`: XLA compiles the gradients, which are reduced outside of it."""

import contextlib
import functools
import warnings

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import World

STEPS = 6
# XLA adds up in another order than TensorFlow does.
TOLERANCE = 1e-12
ROWS = 5
WINDOW = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.02}


class Watched(keras.layers.Layer):
    """Returns its inputs, and counts its traces, in XLA and elsewhere."""

    def __init__(self):
        super().__init__()
        self.traces = {True: 0, False: 0}

    def call(self, inputs):
        if tf.is_symbolic_tensor(inputs):
            graph = tf.compat.v1.get_default_graph()
            self.traces[control_flow_util.GraphOrParentsInXlaContext(graph)] += 1
        return inputs


def embedding_model():
    """A table, whose gradients are sparse, and dense layers."""
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(ROWS, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(oracle.CLASSES, activation="softmax"),
        ]
    )


def random_layers_model():
    """Moving statistics and masks."""
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input((oracle.FEATURES,)),
            keras.layers.Dense(8, use_bias=False),
            keras.layers.BatchNormalization(momentum=0.7),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.3, seed=5),
            keras.layers.Dense(oracle.CLASSES, activation="softmax"),
        ]
    )


def rows():
    """Global batches of row numbers, and their labels."""
    _, labels = oracle.samples(STEPS)
    return np.random.default_rng(1).integers(0, ROWS, (len(labels), 3)), labels


def train(model, optimizer, inputs, labels, batch_size=oracle.LOCAL_BATCH_SIZE, **more):
    """`fit` in XLA; returns the model."""
    model.compile(optimizer, oracle.LOSS, **({"jit_compile": True} | more))
    oracle.build_optimizer(model)
    oracle.fit(model, inputs, labels, batch_size)
    return model


def train_shard(model, optimizer, inputs, labels, **more):
    """`train` on this rank's part of global batches."""
    optimizer = hvd.DistributedOptimizer(optimizer)
    return train(model, optimizer, oracle.shard(inputs), oracle.shard(labels), **more)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "jit_compile", [False, pytest.param(True, marks=pytest.mark.release)]
)
def test_ranks_equal_one_process(jit_compile):
    """Sparse gradients, accumulation and clipping; with XLA there and without."""

    def one_process():
        return train(
            embedding_model(),
            keras.optimizers.SGD(0.1, momentum=0.9, **WINDOW),
            *rows(),
            oracle.LOCAL_BATCH_SIZE * hvd.size(),
            jit_compile=jit_compile,
        ).get_weights()

    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **WINDOW)
    model = train_shard(embedding_model(), optimizer, *rows())
    weights = oracle.on_one_process(one_process)
    assert oracle.difference(model.get_weights(), weights) < TOLERANCE
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


def train_by_loop(model, optimizer, inputs, labels, compute):
    """Apply what `compute(inputs, labels)` returns; returns the model."""
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(inputs, labels):
        gradients = compute(inputs, labels)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    for start in range(0, len(inputs), oracle.LOCAL_BATCH_SIZE):
        batch = slice(start, start + oracle.LOCAL_BATCH_SIZE)
        step(tf.constant(inputs[batch]), tf.constant(labels[batch]))
    return model


def gradients_in_xla(model):
    """Returns a function of forward and backward pass that XLA compiles."""
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function(jit_compile=True)
    def compute(inputs, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(inputs, training=True))
        return tape.gradient(loss, model.trainable_variables)

    return compute


def forward_in_xla(model):
    """Returns a function whose backward pass XLA compiles with the forward pass."""
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function(jit_compile=True)
    def loss_in_xla(inputs, labels):
        return loss_of(labels, model(inputs, training=True))

    def compute(inputs, labels):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_in_xla(inputs, labels)
        return tape.gradient(loss, model.trainable_variables)

    return compute


@pytest.mark.usefixtures("float64")
@pytest.mark.long
def test_moving_statistics_and_masks():
    """`fit` has the states of a loop whose gradients are computed in XLA."""
    inputs, labels = map(oracle.shard, oracle.samples(STEPS))
    inputs = inputs.astype("float64")
    model = random_layers_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    train(model, optimizer, inputs, labels)
    expected = random_layers_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    compute = gradients_in_xla(expected)
    train_by_loop(expected, optimizer, inputs, labels, compute)
    pairs = zip(model.variables, expected.variables, strict=False)
    for variable, wanted in pairs:
        np.testing.assert_allclose(
            variable, wanted, rtol=0, atol=TOLERANCE, err_msg=variable.path
        )
    assert not np.allclose(model.layers[1].moving_mean, 0)
    # The dropout's seed has counted the steps.
    assert int(model.layers[3].seed_generator.state[1]) == STEPS


@pytest.mark.usefixtures("float64")
@pytest.mark.release
def test_a_loop_may_compile_what_it_differentiates():
    """The tape reduces the gradients of a function that XLA compiles."""
    inputs, labels = oracle.samples(STEPS)
    inputs = inputs.astype("float64")

    def one_process():
        model = oracle.build_model()
        batch_size = oracle.LOCAL_BATCH_SIZE * hvd.size()
        adam = keras.optimizers.Adam(0.01)
        train(model, adam, inputs, labels, batch_size, jit_compile=False)
        return model.get_weights()

    model = oracle.build_model()
    shards = oracle.shard(inputs), oracle.shard(labels)
    adam = keras.optimizers.Adam(0.01)
    train_by_loop(model, adam, *shards, forward_in_xla(model))
    weights = oracle.on_one_process(one_process)
    assert oracle.difference(model.get_weights(), weights) < TOLERANCE


@pytest.mark.long
def test_a_step_is_traced_once():
    """XLA compiles one graph for each batch size: the last batch is smaller."""
    inputs, labels = map(oracle.shard, oracle.samples(3))
    inputs, labels = inputs[:-1], labels[:-1]
    watched = Watched()
    model = keras.Sequential([oracle.build_model(), watched])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, oracle.LOSS, jit_compile=True)
    oracle.build_optimizer(model)
    # As at the start of a training. The first collective of a process makes variables:
    # TensorFlow traces a function in which that happens twice.
    hvd.broadcast_variables(model.variables, root_rank=0)
    watched.traces = {True: 0, False: 0}
    oracle.fit(model, inputs, labels, epochs=3)
    assert watched.traces == {True: 1, False: 0}


def warns_on_rank_0(name):
    if hvd.rank():
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match=rf"compiles nothing of {name}\.train_step")


@pytest.mark.release
def test_a_step_that_calls_the_one_of_keras():
    class Scaled(keras.Sequential):
        def train_step(self, data):
            inputs, labels = data
            return super().train_step((inputs / 2, labels))

    watched = Watched()
    inputs, labels = oracle.samples(1)
    model = Scaled([*oracle.build_model().layers, watched])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "XLA compiles nothing")
        train_shard(model, keras.optimizers.SGD(0.1), inputs, labels)
    assert watched.traces[True]
    expected = oracle.build_model()
    train_shard(expected, keras.optimizers.SGD(0.1), inputs / 2, labels)
    assert oracle.difference(model.get_weights(), expected.get_weights()) < 1e-6


def test_a_step_of_the_user_is_not_compiled():
    inputs, labels = oracle.samples(STEPS)
    models = [oracle.build_model(oracle.CustomStepModel) for _ in range(2)]
    optimizer = keras.optimizers.SGD(0.1)
    with warns_on_rank_0("CustomStepModel"):
        train_shard(models[0], optimizer, inputs, labels)
    optimizer = keras.optimizers.SGD(0.1)
    train_shard(models[1], optimizer, inputs, labels, jit_compile=False)
    weights = [model.get_weights() for model in models]
    assert oracle.difference(*weights) == 0


def test_a_collective_of_the_forward_pass_is_refused():
    model = keras.Sequential([keras.Input((6,)), hvd.SyncBatchNormalization()])
    with pytest.raises(ValueError, match=r"Received: \w+ in a function with jit_com"):
        train_shard(model, keras.optimizers.SGD(0.1), *oracle.samples(1))


@pytest.mark.release
@pytest.mark.parametrize("name", ["adam", "overflow"])
def test_mixed_precision(name):
    """Ranks skip a step that overflows on one of them, as without XLA."""
    keras.config.set_dtype_policy("mixed_float16")
    inputs, labels = map(oracle.shard, oracle.samples(STEPS))
    if name == "overflow" and hvd.rank() == hvd.size() - 1:
        inputs[2 * oracle.LOCAL_BATCH_SIZE] = 1e30
    models = []
    for jit_compile in (True, False):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001))
        model = oracle.build_model()
        model.compile(optimizer, oracle.LOSS, jit_compile=jit_compile)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        oracle.fit(model, 0.1 * inputs, labels, callbacks=callbacks)
        models.append(model)
    scales = [float(model.optimizer.dynamic_scale) for model in models]
    assert scales == [2.0 ** (14 if name == "overflow" else 15)] * 2
    steps = [int(model.optimizer.inner_optimizer.iterations) for model in models]
    assert steps == [STEPS - (name == "overflow")] * 2
    assert oracle.difference(*[model.get_weights() for model in models]) < 1e-3
    oracle.assert_bitwise_equal_over_ranks(models[0].get_weights())


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"skip_nonfinite": True}, marks=pytest.mark.release)]
)
def test_a_training(options):
    """`training.fit` in XLA, against the one without it."""
    inputs, labels = oracle.samples(STEPS)
    results = [
        training.fit(
            functools.partial(compiled, jit_compile),
            (inputs, labels),
            world=World(rank=hvd.rank(), size=hvd.size(), seed=1),
            global_batch_size=oracle.LOCAL_BATCH_SIZE * hvd.size(),
            epochs=1,
            validation=(inputs, labels),
            observers=(),
            seed=1,
            **options,
        )
        for jit_compile in (True, False)
    ]
    assert [result.start.compiles_gradients for result in results] == [True, False]
    in_xla, expected = (result.model.get_weights() for result in results)
    assert oracle.difference(in_xla, expected) < 1e-5
    for name, value in results[1].test_metrics.items():
        assert results[0].test_metrics[name] == pytest.approx(value, abs=1e-5)


def compiled(jit_compile):
    """A model with a plain optimizer, which the training distributes."""
    model = oracle.build_model()
    adam = keras.optimizers.Adam(0.01)
    model.compile(adam, oracle.LOSS, metrics=["accuracy"], jit_compile=jit_compile)
    return model
