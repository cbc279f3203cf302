"""A batch that is not finite on one rank is left out on all."""

import math

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import World
from hvdtrain.keras.replication import get_hook
from hvdtrain.training import EvalSpec, RunConfig, TrainSpec, progress

RANK, SIZE = hvd.rank(), hvd.size()
LAST = SIZE - 1
POISONED, WINDOW = 5, 2


class Keeper:
    """Keeps the last report."""

    def on_start(self, start):
        pass

    def on_progress(self, progress):
        self.progress = progress

    def on_evaluation(self, step, metrics):
        pass


def model():
    optimizer = keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=WINDOW
    )
    network = oracle.build_model()
    network.compile(optimizer, oracle.LOSS)
    return network


def global_batches():
    inputs, labels = oracle.samples()
    shape = (oracle.STEPS, -1)
    return zip(
        inputs.reshape(*shape, oracle.FEATURES), labels.reshape(shape), strict=True
    )


def batches(start_step, end_step):
    inputs, labels = (oracle.shard(array) for array in oracle.samples())
    inputs = inputs.copy()
    if RANK == LAST:
        inputs[POISONED * oracle.LOCAL_BATCH_SIZE] = np.nan
    pairs = tf.data.Dataset.from_tensor_slices((inputs, labels))
    pairs = pairs.batch(oracle.LOCAL_BATCH_SIZE)
    return pairs.skip(start_step).take(end_step - start_step)


def train_without_it():
    """One process on global batches; returns the weights and the mean of the losses."""
    network, losses = model(), []
    for step, (x, y) in enumerate(global_batches()):
        if step == POISONED:
            # All ranks but the last one have a loss.
            x, y = (np.delete(a, slice(LAST, None, SIZE), axis=0) for a in (x, y))
        if step // WINDOW == POISONED // WINDOW:
            losses.append((network.evaluate(x, y, len(x), verbose=0), len(x)))
        else:
            network.reset_metrics()
            losses.append((network.train_on_batch(x, y), len(x)))
    losses, counts = np.transpose(losses)
    return network.get_weights(), np.average(losses, weights=counts)


@pytest.mark.ranks
def test_a_batch_of_one_rank(monkeypatch):
    # A report has the mean since the one before: keep the whole epoch in one report.
    monkeypatch.setattr(progress, "_REPORT_SECONDS", math.inf)
    keeper = Keeper()
    result = training.train_and_evaluate(
        model,
        TrainSpec(
            input_fn=batches,
            max_steps=oracle.STEPS,
            pass_steps=oracle.STEPS,
            local_batch_size=oracle.LOCAL_BATCH_SIZE,
            steps_per_execution=10,
        ),
        EvalSpec(input_fn=lambda: batches(0, 1)),
        RunConfig(skip_nonfinite=True),
        world=World(rank=RANK, size=SIZE),
        observers=[keeper],
    )
    assert result.skipped_updates == 1
    assert int(result.model.optimizer._iterations) == oracle.STEPS
    state = [*result.model.weights, *result.model.optimizer.momentums]
    oracle.assert_bitwise_equal_over_ranks([v.numpy() for v in state])
    weights, loss = oracle.on_one_process(train_without_it)
    for found, wanted in zip(result.model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert result.train_metrics["loss"] == pytest.approx(loss, rel=1e-5)
    if RANK == 0:
        assert keeper.progress.metrics["loss"] == pytest.approx(loss, rel=1e-5)
        assert keeper.progress.skipped_updates == 1


def test_a_local_gradient_of_one_rank():
    shared, local = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(local)
    optimizer.build([shared, local])
    count = get_hook(optimizer).skip_nonfinite()
    for value in (np.inf if RANK == LAST else 1.0, 1.0):
        optimizer.apply([tf.ones(1), tf.constant([value])], [shared, local])
    # A local gradient is divided by the number of ranks.
    assert (float(shared[0]), float(local[0])) == (0.0, 1.0 - 1.0 / SIZE)
    assert int(count) == 1
