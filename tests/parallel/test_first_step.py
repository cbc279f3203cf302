"""Ranks that start with different weights raise an error instead of diverging."""

import itertools
from functools import partial

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd

Desynchronized = hvd.callbacks.DesynchronizedError
INPUTS, LABELS = oracle.samples(steps=3)
MEAN_LOSS = keras.losses.SparseCategoricalCrossentropy()


def model_of_this_rank(optimizer=None):
    """A compiled model with different weights on every rank."""
    model = oracle.build_model()
    model.compile(
        optimizer or hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), oracle.LOSS
    )
    for weight in model.weights:
        weight.assign(weight + 0.01 * hvd.rank())
    return model


def batch(step):
    start = step * oracle.LOCAL_BATCH_SIZE
    rows = slice(start, start + oracle.LOCAL_BATCH_SIZE)
    return oracle.shard(INPUTS)[rows], oracle.shard(LABELS)[rows]


def assert_names_the_remedy(error):
    text = str(error.value)
    assert "4 of" in text
    assert "BroadcastGlobalVariablesCallback(0)" in text
    assert "hvd.broadcast_variables" in text


@pytest.mark.parametrize(
    "compile_args", [{}, {"steps_per_execution": 3}, {"run_eagerly": True}]
)
def test_fit_without_a_broadcast(compile_args):
    model = model_of_this_rank()
    model.compile(model.optimizer, oracle.LOSS, **compile_args)
    before = model.get_weights()
    with pytest.raises(Desynchronized) as error:
        oracle.fit_shard(model, INPUTS, LABELS)
    assert_names_the_remedy(error)
    assert "\n" not in str(error.value)
    assert oracle.difference(model.get_weights(), before) == 0


def test_fit_with_accumulation_without_a_broadcast():
    sgd = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = model_of_this_rank(hvd.DistributedOptimizer(sgd))
    with pytest.raises(Desynchronized) as error:
        oracle.fit_shard(model, INPUTS, LABELS)
    assert "\n" not in str(error.value)


def test_train_on_batch_without_a_broadcast():
    model = model_of_this_rank()
    with pytest.raises(Desynchronized) as error:
        model.train_on_batch(*batch(0))
    assert_names_the_remedy(error)


def test_fit_with_float16_without_a_broadcast():
    keras.config.set_dtype_policy("mixed_float16")
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(Desynchronized):
        oracle.fit_shard(
            model_of_this_rank(hvd.DistributedOptimizer(inner)), INPUTS, LABELS
        )


def test_optimizer_state_without_a_broadcast():
    model = oracle.build_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, oracle.LOSS)
    optimizer.build(model.trainable_variables)
    optimizer.momentums[0].assign(optimizer.momentums[0] + float(hvd.rank()))
    with pytest.raises(Desynchronized, match=optimizer.momentums[0].path):
        oracle.fit_shard(model, INPUTS, LABELS)


def test_callbacks_that_are_used_for_a_second_model():
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    for _ in range(2):
        model = model_of_this_rank()
        oracle.fit_shard(model, INPUTS, LABELS, callbacks=callbacks)
        oracle.assert_bitwise_equal_over_ranks(model.get_weights())


def test_variables_that_were_broadcast_by_hand():
    model = model_of_this_rank()
    hvd.broadcast_variables(model.variables, root_rank=0)
    oracle.fit_shard(model, INPUTS, LABELS)
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


def test_local_variables_may_differ_from_the_start():
    model = oracle.build_model()
    local = model.layers[0]
    local.bias.assign(local.bias + float(hvd.rank()))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        hvd.PartialDistributedOptimizer(optimizer, local_layers=local), oracle.LOSS
    )
    optimizer.build(model.trainable_variables)
    optimizer.momentums[1].assign(optimizer.momentums[1] + float(hvd.rank()))
    oracle.fit_shard(model, INPUTS, LABELS)
    oracle.assert_bitwise_equal_over_ranks(model.layers[1].get_weights())


WORDS = np.array([["red green"], ["blue red"], ["black white red"], ["white green"]])
NUMBERS = np.array([[1], [7], [8], [9], [20], [21]])
LAYERS = keras.layers
# The next layer has the same shape on all ranks.
PADDED = {"max_tokens": 8, "pad_to_max_tokens": True}


def share_vocabulary(layer):
    layer.set_vocabulary(hvd.broadcast_object(layer.get_vocabulary()))


def share_bins(layer):
    layer.bin_boundaries = hvd.broadcast_object(list(layer.bin_boundaries))


def share_idf(layer):
    lookup = layer._lookup_layer
    idf = lookup.idf_weights_const.numpy()
    layer.set_vocabulary(*hvd.broadcast_object((layer.get_vocabulary(), idf)))


# A layer, the samples that it is adapted to, what differs, and the remedy of the error.
ADAPTED = {
    "text": (
        partial(
            LAYERS.TextVectorization, 8, output_mode="multi_hot", pad_to_max_tokens=True
        ),
        WORDS,
        "vocabulary",
        share_vocabulary,
    ),
    "tf_idf": (
        partial(LAYERS.TextVectorization, 8, output_mode="tf_idf"),
        WORDS,
        "vocabulary",
        share_idf,
    ),
    "strings": (
        partial(
            LAYERS.StringLookup,
            output_mode="one_hot",
            max_tokens=8,
            pad_to_max_tokens=True,
        ),
        WORDS,
        "vocabulary",
        share_vocabulary,
    ),
    "integers": (
        partial(
            LAYERS.IntegerLookup,
            output_mode="one_hot",
            max_tokens=8,
            pad_to_max_tokens=True,
        ),
        NUMBERS,
        "vocabulary",
        share_vocabulary,
    ),
    "bins": (
        partial(LAYERS.Discretization, num_bins=3),
        NUMBERS.astype("float32"),
        "bin_boundaries",
        share_bins,
    ),
    "normalization": (
        LAYERS.Normalization,
        NUMBERS.astype("float32"),
        "mean",
        lambda layer: hvd.broadcast_variables(layer.variables, root_rank=0),
    ),
}


def fit_adapted(name, rows, callbacks=(), share=lambda layer: None):
    """Fit a model whose first layer is adapted to these rows of its samples, if any."""
    make, samples, _, _ = ADAPTED[name]
    layer = make()
    if rows:
        layer.adapt(samples[rows])
    share(layer)
    keras.utils.set_random_seed(7)
    dtype = "string" if samples.dtype.kind == "U" else samples.dtype.name
    model = keras.Sequential(
        [keras.Input((1,), dtype=dtype), layer, LAYERS.Dense(1, name="last")]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    # Tracing would take longer than the two steps.
    model.compile(optimizer, "mse", run_eagerly=True)
    x = tf.constant(samples[:4])
    oracle.fit(model, x, np.zeros((4, 1)), 2, callbacks=callbacks)
    return model(x)


IN_CI = [("normalization", True), ("normalization", False), ("text", True)]


# With a broadcast its callback raises the error, without it the first step does.
@pytest.mark.parametrize(
    ("name", "is_broadcast"),
    [
        pytest.param(
            *(name, is_broadcast),
            marks=() if (name, is_broadcast) in IN_CI else pytest.mark.release,
        )
        for name, is_broadcast in itertools.product(ADAPTED, (True, False))
    ],
)
def test_layers_that_are_adapted_to_the_samples_of_each_rank(name, is_broadcast):
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] * is_broadcast
    own_rows = slice(hvd.rank(), None, hvd.size())
    expected = fit_adapted(name, slice(0, None, hvd.size()), callbacks)
    with pytest.raises(Desynchronized) as error:
        fit_adapted(name, own_rows, callbacks)
    _, _, state, share = ADAPTED[name]
    text = str(error.value)
    assert f"The ranks differ in the {state} of the layer " in text
    assert "on rank 0 and " in text
    assert "hvdtrain.training.adapt(layer, source, world=world)" in text
    assert "rank 0 alone" in text or "broadcast_" in text
    assert "\n" not in text
    found = fit_adapted(name, own_rows, callbacks, share)
    np.testing.assert_array_equal(found, expected)


def test_a_broadcast_of_moments_to_which_rank_0_is_adapted():
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    expected = fit_adapted("normalization", slice(0, 3), callbacks)
    rows = slice(0, 3) if hvd.rank() == 0 else None
    found = fit_adapted("normalization", rows, callbacks)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("is_broadcast", [False, True])
def test_a_hyperparameter_of_one_rank(is_broadcast):
    model = oracle.build_model()
    momentum = 0.9 if hvd.rank() == 0 else 0.5
    sgd = keras.optimizers.SGD(0.1, momentum=momentum)
    model.compile(hvd.DistributedOptimizer(sgd), oracle.LOSS)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] * is_broadcast
    with pytest.raises(
        Desynchronized, match=r"momentum of SGD: 0\.9 on rank 0 and 0\.5"
    ):
        oracle.fit_shard(model, INPUTS, LABELS, callbacks=callbacks)


def test_a_schedule_of_one_rank():
    model = oracle.build_model()
    steps = 10 + hvd.rank()
    sgd = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, steps))
    model.compile(hvd.DistributedOptimizer(sgd), oracle.LOSS)
    with pytest.raises(Desynchronized, match="decay_steps of CosineDecay: 10 on"):
        oracle.fit_shard(model, INPUTS, LABELS)


class PrintedRate(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of a user, with an argument that the result does not depend on."""

    def __init__(self, rate, verbose):
        self.rate, self.verbose = rate, verbose

    def __call__(self, step):
        return self.rate


class LoggingSGD(keras.optimizers.SGD):
    """An optimizer of a user, with an argument that the result does not depend on."""

    def __init__(self, learning_rate, momentum, log_dir):
        super().__init__(learning_rate, momentum)
        self.log_dir = log_dir


def logging_model(momentum=0.5):
    rank = hvd.rank()
    sgd = LoggingSGD(PrintedRate(0.1, verbose=rank == 0), momentum, log_dir=f"{rank}")
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(sgd), oracle.LOSS)
    return model


def test_arguments_of_classes_of_a_user():
    model = logging_model()
    oracle.fit_shard(model, INPUTS, LABELS)
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


def test_arguments_of_keras_in_a_class_of_a_user():
    with pytest.raises(Desynchronized, match="momentum of LoggingSGD: "):
        oracle.fit_shard(logging_model(0.5 + 0.1 * hvd.rank()), INPUTS, LABELS)


def test_a_loop_of_a_user_without_a_broadcast():
    model = model_of_this_rank()

    @tf.function
    def step(inputs, labels):
        with tf.GradientTape() as tape:
            loss = MEAN_LOSS(labels, model(inputs))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    with pytest.raises(Desynchronized) as error:
        step(*batch(0))
    assert_names_the_remedy(error)


def test_a_rank_that_has_joined_before_the_first_step():
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), oracle.LOSS)
    if hvd.rank() == 0:
        model.train_on_batch(*batch(0))
    hvd.join()
    assert int(model.optimizer.iterations) == (1 if hvd.rank() == 0 else 0)


def tape_step(model, is_traced):
    """A step with a tape and a plain optimizer."""

    def step(inputs, labels):
        with tf.GradientTape() as tape:
            loss = MEAN_LOSS(labels, model(inputs))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    return tf.function(step) if is_traced else step


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_tape_without_a_broadcast(is_traced):
    model = model_of_this_rank(keras.optimizers.SGD(0.1))
    step = tape_step(model, is_traced)
    # A graph raises TensorFlow's error, with the text of ours in it.
    kind = tf.errors.UnknownError if is_traced else Desynchronized
    step(*batch(0))
    with pytest.raises(kind) as error:
        step(*batch(1))
    assert "DesynchronizedError" in str(error.value) or not is_traced
    assert_names_the_remedy(error)


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_broadcast_after_the_first_step_of_a_tape(is_traced):
    # As in Horovod's examples.
    model = model_of_this_rank(keras.optimizers.SGD(0.1))
    step = tape_step(model, is_traced)
    for number in range(3):
        step(*batch(number))
        if number == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(model.optimizer.variables, root_rank=0)
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


def test_a_broadcast_inside_the_first_step_of_a_tape():
    model = model_of_this_rank(keras.optimizers.SGD(0.1))
    plain_step = tape_step(model, is_traced=False)
    model.optimizer.build(model.trainable_variables)

    @tf.function
    def step(inputs, labels, is_first):
        loss = plain_step(inputs, labels)
        if is_first:
            hvd.broadcast_variables(model.variables, root_rank=0)
        return loss

    for number in range(3):
        step(*batch(number), number == 0)
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


def test_sparse_gradients_of_a_tape_without_a_broadcast():
    table = tf.Variable(np.full((4, 2), hvd.rank(), "float32"))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [0, 1]))
        tape = hvd.DistributedGradientTape(tape)
        (gradient,) = tape.gradient(loss, [table])
        assert isinstance(gradient, tf.IndexedSlices)
        table.scatter_sub(gradient)

    step()
    with pytest.raises(tf.errors.UnknownError, match="1 of 1 variables"):
        step()


def test_a_tape_without_a_broadcast_whose_gradients_contain_none():
    used, unused = tf.Variable(float(hvd.rank())), tf.Variable(1.0)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = used * 2.0
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [used, unused])
        assert gradients[1] is None
        return gradients[0]

    assert float(step()) == 2.0
    with pytest.raises(tf.errors.UnknownError, match="1 of 2 variables"):
        step()
