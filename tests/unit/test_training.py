"""Training on one rank: exact numbers of steps, and what plain Keras computes."""

import dataclasses

import keras
import numpy as np
import pytest
from toy import BATCH, batches

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import JobError, World
from hvdtrain.training import EvalSpec, TrainSpec


@pytest.fixture(autouse=True)
def _horovod(monkeypatch):
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    hvd.init()


class Recorder:
    def __init__(self):
        self.starts = []
        self.progress = []
        self.evaluations = []
        self.checkpoints = []

    def on_start(self, start):
        self.starts.append(start)

    def on_progress(self, progress):
        self.progress.append(progress)

    def on_checkpoint(self, step, text):
        self.checkpoints.append(step)

    def on_evaluation(self, step, metrics):
        self.evaluations.append((step, metrics))


def model(*, learning_rate=0.1):
    keras.utils.set_random_seed(1)
    network = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    )
    network.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(learning_rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return network


def train(max_steps, *, pass_steps=100, model_fn=model, every_epochs=0, **options):
    recorder = Recorder()
    result = training.train_and_evaluate(
        model_fn,
        TrainSpec(
            input_fn=batches,
            max_steps=max_steps,
            pass_steps=pass_steps,
            local_batch_size=BATCH,
            **options,
        ),
        EvalSpec(input_fn=lambda: batches(0, 100), every_epochs=every_epochs),
        world=World(),
        observers=[recorder],
    )
    return result, recorder


@pytest.mark.parametrize(
    ("max_steps", "pass_steps", "steps_per_execution"),
    [(1, 100, 1), (7, 3, 3), (20, 7, 20), (23, 100, 5), (101, 25, 20)],
)
def test_number_of_steps_is_exact(max_steps, pass_steps, steps_per_execution):
    result, recorder = train(
        max_steps, pass_steps=pass_steps, steps_per_execution=steps_per_execution
    )
    assert int(result.model.optimizer.iterations) == max_steps
    assert recorder.progress[-1].step == max_steps
    assert recorder.progress[-1].seconds_left == 0
    assert recorder.evaluations[-1][0] == max_steps


def test_result_is_that_of_plain_keras():
    plain = model()
    history = plain.fit(batches(0, 25), verbose=0).history
    loss, accuracy = plain.evaluate(batches(0, 100), verbose=0)
    result, recorder = train(25, pass_steps=25, steps_per_execution=10)
    for mine, theirs in zip(
        result.model.get_weights(), plain.get_weights(), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert result.train_metrics["loss"] == pytest.approx(history["loss"][0], rel=1e-6)
    assert result.test_metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert result.test_metrics["accuracy"] == pytest.approx(accuracy, rel=1e-6)
    assert recorder.evaluations == [(25, result.test_metrics)]
    (start,) = recorder.starts
    assert dataclasses.astuple(start) == (0, 25, 1, BATCH)


def test_evaluates_every_so_many_epochs_and_at_the_end():
    _, recorder = train(50, pass_steps=10, every_epochs=2, steps_per_execution=1)
    assert [step for step, _ in recorder.evaluations] == [20, 40, 50]


def test_broken_loss_ends_the_job():
    with pytest.raises(JobError, match="loss became nan"):
        train(100, model_fn=lambda: model(learning_rate=1e30), steps_per_execution=5)


def test_speed_and_time():
    result, _ = train(40, steps_per_execution=1)
    assert result.train_seconds > 0
    assert result.samples_per_second > 40 * BATCH / result.train_seconds
