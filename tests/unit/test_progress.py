"""Reports of progress, with an injected clock."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from toy import start

import hvdtrain.keras as hvd
from hvdtrain.job import JobError, World
from hvdtrain.training.progress import ProgressMeter
from hvdtrain.training.skipping import Skipping
from hvdtrain.training.specs import Plan
from hvdtrain.training.stragglers import RankTimes


class Clock:
    seconds = 0.0
    collective_seconds = 1000.0
    input_seconds = 2000.0

    def __call__(self):
        return self.seconds


class Keeper(list):
    on_progress = list.append


@pytest.fixture
def clock():
    return Clock()


def make(
    clock,
    *,
    max_steps=100,
    fit_epoch_steps=100,
    keeper,
    size=1,
    model=None,
    **options,
):
    if not model:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.125), "mse")
    plan = Plan(
        max_steps=max_steps,
        epochs=math.ceil(max_steps / fit_epoch_steps),
        fit_epoch_steps=fit_epoch_steps,
        steps_per_execution=10,
        global_batch_size=32,
    )
    return ProgressMeter(
        model,
        plan,
        World(size=size),
        [keeper],
        clock=clock,
        collective_seconds=lambda: clock.collective_seconds,
        input_seconds=lambda: clock.input_seconds,
        **options,
    )


def run(meter, clock, means, *, seconds=0.5, first=0):
    """Go through executions of ten steps with these running means of the loss."""
    for number, mean in enumerate(means, 1):
        clock.seconds += seconds
        meter.read(first + number * 10, {"loss": mean})


def test_reports_are_about_a_second_apart_and_the_last_step_is_one(clock):
    keeper = Keeper()
    meter = make(clock, keeper=keeper)
    meter.begin_epoch(0)
    run(meter, clock, [1.0] * 10)
    # Not the first execution, in which TensorFlow traces; then every 20 steps.
    assert [progress.step for progress in keeper] == [20, 40, 60, 80, 100]
    assert [p.samples_per_second for p in keeper] == pytest.approx([640.0] * 5)
    assert [p.seconds_left for p in keeper] == pytest.approx([4, 3, 2, 1, 0])
    assert [p.learning_rate for p in keeper] == [0.125] * 5


def test_learning_rate_of_a_schedule_with_loss_scaling(clock):
    keeper = Keeper()
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([25], [0.5, 0.25])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rates))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    meter = make(clock, keeper=keeper, model=model)
    meter.begin_epoch(0)
    for steps in (10, 20, 30):
        optimizer.inner_optimizer.iterations.assign(steps)
        clock.seconds += 0.5
        meter.read(steps, {"loss": 1.0})
    meter.read(100, {"loss": 1.0})
    assert [p.learning_rate for p in keeper] == [0.5, 0.25]


def test_metrics_are_means_since_the_last_report(clock):
    keeper = Keeper()
    meter = make(clock, keeper=keeper, max_steps=60)
    meter.begin_epoch(0)
    # Losses of 4, 2, 1, 1, 0, 0 in the six executions: their running means.
    run(meter, clock, [4, 3, 7 / 3, 2, 8 / 5, 8 / 6])
    assert [p.metrics["loss"] for p in keeper] == pytest.approx([3, 1, 0])


class Largest(keras.metrics.Metric):
    """The largest error: no sum."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = keras.ops.max(keras.ops.abs(y_true - y_pred))
        self.largest.assign(keras.ops.maximum(self.largest, errors))

    def result(self):
        return self.largest + 0.0


def test_metrics_that_are_no_means_are_those_since_the_last_report(clock):
    keeper = Keeper()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    meter = make(clock, keeper=keeper, max_steps=60, model=model)
    model.set_weights([np.ones((1, 1)), np.zeros(1)])
    metrics = [keras.metrics.AUC(name="auc"), Largest()]
    hits = keras.metrics.TruePositives(name="hits")
    mean = keras.metrics.MeanAbsoluteError(name="mae")
    model.compile(
        keras.optimizers.SGD(0.0), "mse", metrics=metrics, weighted_metrics=[hits, mean]
    )
    meter.begin_epoch(0)
    # Scores of a positive and of a negative sample, and the weight of both.
    batches = [
        *[(0.9, 0.1, 1), (0.8, 0.2, 1)],
        *[(0.3, 0.6, 1), (0.8, 0.1, 3)],
        *[(0.2, 0.9, 2), (0.7, 0.4, 2)],
    ]
    for number, (*scores, weight) in enumerate(batches):
        x = np.array([scores], "float32").T
        y, weights = np.array([[1.0], [0.0]], "float32"), np.full(2, weight, "float32")
        logs = model.train_step((x, y, weights))
        clock.seconds += 0.5
        meter.read(number * 10 + 10, logs)
    found = {name: [p.metrics[name] for p in keeper] for name in keeper[0].metrics}
    # Pairs in order: 4 of 4, 3 of 4 and 1 of 4.
    assert found["auc"] == pytest.approx([1, 0.75, 0.25], abs=1e-4)
    assert found["hits"] == [2, 3, 2]
    assert found["mae"] == pytest.approx([0.15, 2.2 / 8, 4.8 / 8])
    # That since the epoch began.
    assert found["largest"] == pytest.approx([0.2, 0.7, 0.9])


def test_means_in_an_epoch_whose_batch_has_changed(clock):
    keeper = Keeper()
    meter = make(clock, keeper=keeper, max_steps=70, start_step=30, batch_before=64)
    meter.begin_epoch(0)
    # 30 steps of 64 samples with a loss of 4, then 32 samples with 2, 2, 1, 1.
    totals = [60 * 4 + 20, 60 * 4 + 40, 60 * 4 + 50, 60 * 4 + 60]
    means = [total / (60 + 10 * i) for i, total in enumerate(totals, 1)]
    run(meter, clock, means, first=30)
    assert [p.step for p in keeper] == [50, 70]
    # The first report is of the epoch so far.
    assert [p.metrics["loss"] for p in keeper] == pytest.approx([280 / 80, 1])


def test_means_start_anew_with_each_epoch(clock):
    keeper = Keeper()
    meter = make(clock, keeper=keeper, max_steps=60, fit_epoch_steps=40)
    meter.begin_epoch(0)
    run(meter, clock, [4.0, 4.0, 4.0, 4.0])
    meter.begin_epoch(1)
    run(meter, clock, [2.0, 2.0], first=40)
    assert [p.step for p in keeper] == [20, 40, 60]
    assert [p.metrics["loss"] for p in keeper] == [4.0, 4.0, 2.0]


def test_time_between_epochs_is_not_training(clock):
    meter = make(clock, keeper=Keeper(), fit_epoch_steps=50)
    meter.begin_epoch(0)
    run(meter, clock, [1.0] * 5)
    clock.seconds += 1000  # an evaluation
    meter.begin_epoch(1)
    run(meter, clock, [1.0] * 5, first=50)
    assert meter.seconds == pytest.approx(5.0)


def test_speed_leaves_out_the_first_execution(clock):
    meter = make(clock, keeper=Keeper())
    meter.begin_epoch(0)
    run(meter, clock, [1.0], seconds=60)
    run(meter, clock, [1.0] * 9, first=10)
    assert meter.samples_per_second == pytest.approx(32 * 10 / 0.5)


def test_speed_of_a_single_execution_is_that_of_the_execution(clock):
    meter = make(clock, keeper=Keeper(), max_steps=10, fit_epoch_steps=10)
    meter.begin_epoch(0)
    run(meter, clock, [1.0])
    assert meter.samples_per_second == pytest.approx(32 * 10 / 0.5)


def test_communication_and_input_wait_are_shares_of_the_time(clock, monkeypatch):
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    hvd.init()
    keeper = Keeper()
    meter = make(clock, keeper=keeper, max_steps=80, fit_epoch_steps=40, size=2)
    for epoch in (0, 1):
        meter.begin_epoch(epoch)
        for number, seconds in enumerate((0.5, 0.25, 0.125, 0.0)):
            clock.collective_seconds += seconds
            clock.input_seconds += seconds / 2
            run(meter, clock, [1.0], first=40 * epoch + 10 * number)
        # An evaluation.
        clock.seconds += 100
        clock.collective_seconds += 100
        clock.input_seconds += 100
    # The evaluation makes the next report come sooner.
    assert [p.step for p in keeper] == [20, 40, 50, 70, 80]
    # Half of 0.25 / 0.5, 0.125 / 1, 0.5 / 0.5, 0.375 / 1 and 0 / 0.5: Horovod has this
    # rank alone, and adds up no share of the second one.
    shares = np.array([0.25, 0.0625, 0.5, 0.1875, 0])
    assert [p.communication for p in keeper] == pytest.approx(shares)
    assert [p.input_wait for p in keeper] == pytest.approx(shares / 2)


def test_times_of_evaluation_and_saving(clock):
    keeper, phases = Keeper(), {"evaluation": 5.0, "saving": 1.0}
    keeper.on_end = keeper.append
    times = RankTimes(lambda: phases, lambda count: (0, np.empty(0)))
    meter = make(clock, keeper=keeper, max_steps=20, times=times)
    meter.begin(start(0, ranks=1))
    meter.begin_epoch(0)
    run(meter, clock, [1.0])
    phases["evaluation"], phases["saving"] = 5.5, 1.25
    run(meter, clock, [1.0], first=10)
    phases["evaluation"] = 7.5
    meter.end()
    found = [(value.evaluation_seconds, value.saving_seconds) for value in keeper]
    assert found == [(0.5, 0.25), (2.0, 0.0)]
    assert keeper[0].straggler is None


def test_communication_of_one_rank_is_not_measured(clock):
    keeper = Keeper()
    meter = make(clock, keeper=keeper, max_steps=20)
    meter.begin_epoch(0)
    run(meter, clock, [1.0, 1.0])
    assert [math.isnan(p.communication) for p in keeper] == [True]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_broken_loss_is_an_error(clock, loss):
    meter = make(clock, keeper=Keeper())
    meter.begin_epoch(0)
    with pytest.raises(JobError, match=f"loss became {loss} before step 20"):
        run(meter, clock, [1.0, loss])


def test_losses_that_are_left_out_do_not_count(clock, monkeypatch):
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    hvd.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    keeper, skipping = Keeper(), Skipping(3, model)
    meter = make(clock, keeper=keeper, max_steps=60, skipping=skipping, model=model)
    meter.begin_epoch(0)
    # On inputs of 0 the losses are the squares.
    for number, target in enumerate([2, math.nan, math.nan, math.nan, 1, 3]):
        batch = tf.zeros((2, 1)), tf.fill((2, 1), float(target))
        run(meter, clock, [model.train_step(batch)["loss"]], first=10 * number)
    losses = [p.metrics["loss"] for p in keeper]
    assert losses == pytest.approx([4, math.nan, 5], nan_ok=True)
    assert [p.skipped_updates for p in keeper] == [4, 6, 6]
    assert {*keeper[0].metrics} == {"loss"}
