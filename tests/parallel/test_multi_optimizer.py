"""A MultiOptimizer takes the steps of one process with the N-times batch."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import World
from hvdtrain.training import EvalSpec, RunConfig, TrainSpec

pytestmark = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has none"
)

RANK, SIZE = hvd.rank(), hvd.size()
POISONED = 5


def is_kernel(variable):
    return variable.path.endswith("kernel")


def by_map(matrices, vectors):
    return keras.optimizers.OptimizerMap(vectors, {".*kernel": matrices})


def by_function(matrices, vectors):
    return lambda variable: matrices if is_kernel(variable) else vectors


def multi_optimizer(choice):
    """Optimizers whose own steps differ, and that clip in every step."""
    adam = keras.optimizers.Adam(0.01, global_clipnorm=0.02)
    momentum = keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2, clipnorm=0.02
    )
    return keras.optimizers.MultiOptimizer(choice(adam, momentum))


@pytest.mark.parametrize(
    ("choice", "scaled"),
    [
        (by_map, True),
        pytest.param(by_function, False, marks=pytest.mark.release),
        pytest.param(by_map, False, marks=pytest.mark.release),
        pytest.param(by_function, True, marks=pytest.mark.release),
    ],
)
def test_fit_equals_the_big_batch(choice, scaled):
    def make():
        optimizer = multi_optimizer(choice)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8)
        return optimizer

    def train():
        batch_size = oracle.LOCAL_BATCH_SIZE * SIZE
        return oracle.train_by_fit(make(), *oracle.samples(), batch_size).get_weights()

    inputs, labels = map(oracle.shard, oracle.samples())

    def weights_of_shard(optimizer):
        model = oracle.train_by_fit(optimizer, inputs, labels, oracle.LOCAL_BATCH_SIZE)
        return model.get_weights()

    weights = weights_of_shard(hvd.DistributedOptimizer(make()))
    expected = oracle.on_one_process(train)
    assert oracle.difference(weights, expected) <= 1e-6
    oracle.assert_bitwise_equal_over_ranks(weights)
    if scaled:
        # The oracle sees a missing reduction.
        assert oracle.difference(weights_of_shard(make()), expected) > 1e-4


def elementwise_model():
    # No optimizer whose step depends on the number of iterations: a skipped update
    # counts as one.
    optimizers = by_map(keras.optimizers.RMSprop(0.01), keras.optimizers.SGD(0.1, 0.9))
    model = oracle.build_model()
    model.compile(keras.optimizers.MultiOptimizer(optimizers), oracle.LOSS)
    return model


def batches(start_step, end_step):
    """Batches of this rank; in one of them the last rank has NaN."""
    inputs, labels = map(oracle.shard, oracle.samples())
    inputs = inputs.copy()
    if RANK == SIZE - 1:
        inputs[POISONED * oracle.LOCAL_BATCH_SIZE] = np.nan
    pairs = tf.data.Dataset.from_tensor_slices((inputs, labels))
    pairs = pairs.batch(oracle.LOCAL_BATCH_SIZE)
    return pairs.skip(start_step).take(end_step - start_step)


@pytest.mark.release
def test_an_update_that_is_not_finite_is_skipped_by_all_optimizers():
    result = training.train_and_evaluate(
        elementwise_model,
        TrainSpec(
            input_fn=batches,
            max_steps=oracle.STEPS,
            pass_steps=oracle.STEPS,
            local_batch_size=oracle.LOCAL_BATCH_SIZE,
        ),
        EvalSpec(input_fn=lambda: batches(0, 1)),
        RunConfig(skip_nonfinite=True),
        world=World(rank=RANK, size=SIZE),
    )

    def train():
        batch_size = oracle.LOCAL_BATCH_SIZE * SIZE
        skipped = slice(POISONED * batch_size, (POISONED + 1) * batch_size)
        samples = [np.delete(array, skipped, axis=0) for array in oracle.samples()]
        model = elementwise_model()
        oracle.fit(model, *samples, batch_size=batch_size)
        return model.get_weights()

    assert result.skipped_updates == 1
    weights = result.model.get_weights()
    assert oracle.difference(weights, oracle.on_one_process(train)) <= 1e-6
    oracle.assert_bitwise_equal_over_ranks(weights)


def test_each_rank_keeps_its_local_variables():
    model = oracle.build_model()
    bias = model.layers[-1].bias
    optimizers = by_map(keras.optimizers.SGD(1.0), keras.optimizers.SGD(0.5))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(optimizers))
    optimizer.register_local_var(bias)
    gradients = [np.full(v.shape, 1.0 + RANK, "float32") for v in model.weights]
    before = [v.numpy() for v in model.weights]
    optimizer.apply_gradients(zip(gradients, model.weights, strict=True))
    mean = 1.0 + (SIZE - 1) / 2
    for variable, old in zip(model.weights, before, strict=True):
        expected = (1.0 + RANK) / SIZE if variable is bias else mean
        rate = 1.0 if is_kernel(variable) else 0.5
        np.testing.assert_allclose(old - variable.numpy(), rate * expected, rtol=1e-5)


def test_norms_that_differ_by_rank_are_refused():
    model = oracle.build_model()
    optimizer = hvd.DistributedOptimizer(multi_optimizer(by_map))
    optimizer.register_local_var(model.layers[-1].kernel)
    gradients = [np.ones(v.shape, "float32") for v in model.weights]
    with pytest.raises(ValueError, match=r"Use clipvalue\."):
        optimizer.apply_gradients(zip(gradients, model.weights, strict=True))
