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
        pytest.param(keras.optimizers.SGD, True, marks=pytest.mark.ranks),
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
