"""Unequal numbers of batches, against a loop over the ranks in one process."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd

BATCH = oracle.LOCAL_BATCH_SIZE
LOSS = keras.losses.SparseCategoricalCrossentropy()


def part_of(rank):
    """Rank r has r + 2 batches of its own."""
    rng = np.random.default_rng(rank)
    count = (rank + 2) * BATCH
    inputs = rng.normal(size=(count, oracle.FEATURES)).astype("float32")
    return inputs, rng.integers(0, oracle.CLASSES, count)


def train_on_one_process(optimizer, epochs):
    """Every step takes the mean gradient of the ranks that have a batch left."""
    model = oracle.build_model()
    for step in list(range(hvd.size() + 1)) * epochs:
        batch = slice(step * BATCH, (step + 1) * BATCH)
        parts = [part_of(r) for r in range(hvd.size()) if step < r + 2]
        with tf.GradientTape() as tape:
            losses = [LOSS(y[batch], model(x[batch])) for x, y in parts]
            loss = tf.add_n(losses) / len(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
    return model.get_weights()


@pytest.mark.parametrize(
    ("make", "validates"),
    [
        pytest.param(
            keras.optimizers.SGD, True, marks=[pytest.mark.ranks, pytest.mark.release]
        ),
        (keras.optimizers.Adam, False),
    ],
)
def test_unequal_numbers_of_batches(make, validates):
    expected = train_on_one_process(make(0.01), epochs=2)
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(make(0.01)), oracle.LOSS)
    data = part_of(hvd.rank())
    history = oracle.fit(
        model,
        *data,
        epochs=2,
        validation_data=part_of(0) if validates else None,
        callbacks=[hvd.callbacks.JoinCallback(), hvd.callbacks.MetricAverageCallback()],
    )
    assert oracle.difference(model.get_weights(), expected) < 1e-6
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())
    assert int(model.optimizer.iterations) == 2 * (hvd.size() + 1)
    if validates:
        # Joined before validation: the same weights, the same loss everywhere.
        loss = history.history["val_loss"][-1]
        assert loss == pytest.approx(model.evaluate(*part_of(0), verbose=0), abs=1e-6)


def test_a_window_of_accumulation_spans_two_epochs_of_unequal_length():
    # The gradient of w with x = 1 and loss = w is 1 for each batch. Rank 0 has 7
    # batches, the others 9: rank 0 joins in mid-window, and its last three are left
    # out of the update at step 8. The window that starts at step 9 has one batch of
    # each other rank, and three of every rank in the second epoch.
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=4)
    model.compile(hvd.DistributedOptimizer(optimizer), lambda y, prediction: prediction)
    weights = []
    for batches in (7 if hvd.rank() == 0 else 9, 3):
        ones = np.ones((batches, 1), "float32")
        callbacks = [hvd.callbacks.JoinCallback()]
        model.fit(ones, ones, batch_size=1, verbose=0, callbacks=callbacks)
        weights.append(float(model.layers[0].kernel[0, 0]))
    # A mean of ones is 1: two updates by step 8, the third at step 12.
    assert weights == pytest.approx([-2.0, -3.0])
    assert int(optimizer.iterations) == 12 // 4


@pytest.mark.parametrize(
    "op", ["Average", pytest.param("Sum", marks=pytest.mark.release)]
)
def test_an_open_window_has_the_mean_of_the_batches_that_took_part(op):
    # A window of 4 stays open over the epoch: rank 0 has 1 batch, of gradient 1, the
    # others have 3, of gradient 2. At step 4, one batch of gradient 0 closes it.
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=4)
    optimizer = hvd.DistributedOptimizer(optimizer, op=getattr(hvd, op))
    model.compile(optimizer, lambda y, prediction: prediction)
    mine = np.full((1, 1), 1.0) if hvd.rank() == 0 else np.full((3, 1), 2.0)
    for inputs in (mine, np.zeros((1, 1))):
        callbacks = [hvd.callbacks.JoinCallback()]
        model.fit(inputs, inputs, batch_size=1, verbose=0, callbacks=callbacks)
    others = hvd.size() - 1
    total, count = 1 + 3 * 2 * others, 1 + 3 * others
    # Average: three steps of the mean of all batches, and one of 0. Sum: what was
    # contributed.
    expected = {"Average": 3 * total / count / 4, "Sum": total / 4}[op]
    assert float(model.layers[0].kernel[0, 0]) == pytest.approx(-expected)


class TwoOptimizers(keras.Model):
    """Trains its second layer with an optimizer beside the compiled one."""

    def __init__(self, second_optimizer):
        super().__init__()
        self.first = keras.layers.Dense(2)
        self.second = keras.layers.Dense(1)
        self.second_optimizer = second_optimizer

    def call(self, inputs):
        return self.second(self.first(inputs))

    def train_step(self, data):
        inputs, labels = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(inputs) - labels) ** 2)
        for layer, optimizer in (
            (self.first, self.optimizer),
            (self.second, self.second_optimizer),
        ):
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_every_optimizer_of_the_model_is_caught_up():
    keras.utils.set_random_seed(0)
    second = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), name="second")
    model = TwoOptimizers(second)
    model(np.zeros((1, 2)))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    model.optimizer.build(model.first.trainable_variables)
    model.second_optimizer.build(model.second.trainable_variables)
    inputs = np.random.default_rng(0).normal(size=(8 * (hvd.rank() + 1), 2))
    callbacks = [hvd.callbacks.JoinCallback()]
    model.fit(inputs, inputs[:, :1], batch_size=8, verbose=0, callbacks=callbacks)
    for optimizer in (model.optimizer, model.second_optimizer):
        oracle.assert_bitwise_equal_over_ranks(optimizer.variables)
        assert int(optimizer.iterations) == hvd.size()


def test_a_second_optimizer_that_is_distributed_between_two_fits():
    model = TwoOptimizers(keras.optimizers.SGD(0.01))
    model(np.zeros((1, 2)))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
    model.optimizer.build(model.first.trainable_variables)
    model.second_optimizer.build(model.second.trainable_variables)
    inputs = np.random.default_rng(hvd.rank()).normal(size=(16, 2))
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    oracle.fit(model, inputs, inputs[:, :1], callbacks=[broadcast])
    hvd.DistributedOptimizer(model.second_optimizer)
    hvd.broadcast_variables(model.variables, root_rank=0)
    oracle.fit(model, inputs, inputs[:, :1], callbacks=[broadcast])
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


def test_a_join_in_each_epoch_is_traced_without_a_warning(caplog):
    logger = tf.get_logger()
    logger.addHandler(caplog.handler)
    with caplog.at_level("WARNING", logger.name):
        for _ in range(7):
            assert int(hvd.join()) in range(hvd.size())
    logger.removeHandler(caplog.handler)
    assert "retracing" not in caplog.text
