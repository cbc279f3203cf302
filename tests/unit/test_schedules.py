"""The length of a run, and its learning rate at each step."""

import math

import keras
import pytest

from hvdtrain.job import JobError
from hvdtrain.mnist import schedule
from hvdtrain.mnist.options import ClassifierOptions
from hvdtrain.training import Plan


def count_steps(samples=1000, ranks=2, **changes):
    options = ClassifierOptions(**({"batch_size": 10} | changes))
    return schedule.count_steps(options, samples, ranks)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 5000),
        ({"max_steps": 101}, 50),
        ({"max_steps": 101, "accumulation_steps": 4}, 48),
        ({"epochs": 3}, 150),
        ({"epochs": 3, "accumulation_steps": 4}, 152),
        ({"epochs": 1, "batch_size": 7}, 72),
        # Without a rounding error.
        ({"epochs": 15, "batch_size": 100, "samples": 60_000, "ranks": 9}, 1000),
    ],
)
def test_steps_of_two_ranks(changes, expected):
    assert count_steps(**changes) == expected


def test_too_few_steps_for_an_update():
    with pytest.raises(JobError, match=r"--max_steps=7 for 2 replicas .* expected 8"):
        count_steps(max_steps=7, accumulation_steps=4)
    with pytest.raises(JobError, match=r"--accumulation_steps=51 .* of 50 steps"):
        count_steps(epochs=1, accumulation_steps=51)


def test_warmup_longer_than_the_run():
    # 75 steps of 20 of 1,000 samples.
    assert count_steps(warmup_epochs=1.5, max_steps=150) == 75
    with pytest.raises(JobError, match=r"--warmup_epochs=1.5 for a run of 1 epochs"):
        count_steps(warmup_epochs=1.5, epochs=1)


def rates(*, execution=1, fit_epoch_steps=10, **options):
    """Set the learning rate through the steps of a run; return it by step."""
    rate_schedule = schedule.Schedule(**{"size": 4, "max_steps": 20, **options})
    plan = Plan(
        max_steps=rate_schedule.max_steps,
        epochs=math.ceil(rate_schedule.max_steps / fit_epoch_steps),
        fit_epoch_steps=fit_epoch_steps,
        steps_per_execution=execution,
        global_batch_size=1,
    )
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(
        keras.optimizers.SGD(rate_schedule.learning_rate / rate_schedule.size)
    )
    callback = schedule.LearningRateCallback(rate_schedule, plan)
    callback.set_model(model)
    rate_by_step = []
    for epoch in range(plan.epochs):
        callback.on_epoch_begin(epoch)
        for batch in range(0, plan.step(epoch + 1) - plan.step(epoch), execution):
            callback.on_train_batch_begin(batch)
            steps = plan.step(epoch, batch + execution) - plan.step(epoch, batch)
            rate = float(model.optimizer.learning_rate.numpy())
            rate_by_step += steps * [rate]
        logs = {}
        callback.on_epoch_end(epoch, logs)
        assert logs == {"lr": rate}
    return rate_by_step


def test_warmup_by_hand():
    # From a quarter of 0.8 in steps of 0.15 to 0.8, then constant.
    expected = [0.35, 0.5, 0.65] + 17 * [0.8]
    assert rates(learning_rate=0.8, warmup_steps=4) == pytest.approx(expected)


def test_an_execution_has_the_rate_of_its_last_warmup_step():
    rate_by_step = rates(learning_rate=0.8, warmup_steps=4, execution=2)
    assert rate_by_step == pytest.approx([0.5, 0.5] + 18 * [0.8])


def test_fraction_of_a_step_of_warmup():
    rate_by_step = rates(learning_rate=0.8, warmup_steps=1.5)
    assert rate_by_step == pytest.approx([0.2 + 0.6 / 1.5] + 19 * [0.8])


def test_cosine_after_the_warmup_by_hand():
    rate_by_step = rates(learning_rate=0.8, warmup_steps=4, decay="cosine", execution=2)
    # Sixteen steps of decay, in executions of two.
    cosine = [0.4 * (1 + math.cos(math.pi * step / 16)) for step in range(0, 16, 2)]
    expected = [0.5, 0.8, *cosine]
    assert rate_by_step == pytest.approx([rate for rate in expected for _ in range(2)])


def test_a_run_that_ends_within_an_epoch_and_an_execution():
    rate_by_step = rates(
        learning_rate=0.8, decay="cosine", execution=4, fit_epoch_steps=12
    )
    cosine = [0.4 * (1 + math.cos(math.pi * step / 20)) for step in range(0, 20, 4)]
    assert rate_by_step == pytest.approx([rate for rate in cosine for _ in range(4)])


def test_a_warmup_to_the_last_step_leaves_nothing_to_decay():
    rate_by_step = rates(
        learning_rate=0.8,
        warmup_steps=4,
        max_steps=4,
        decay="cosine",
        fit_epoch_steps=5,
    )
    assert rate_by_step == pytest.approx([0.35, 0.5, 0.65, 0.8])


def test_steps_do_not_depend_on_the_epochs_of_fit():
    options = {"learning_rate": 0.8, "warmup_steps": 7.5, "decay": "cosine"}
    assert rates(**options, fit_epoch_steps=20) == rates(**options, fit_epoch_steps=3)


def test_a_batch_that_changes_keeps_the_share_of_the_samples():
    # Ten steps of four ranks, of which eight are left: 32 of one rank.
    before = schedule.Schedule(
        learning_rate=0.8, size=4, max_steps=10, warmup_steps=5, decay="cosine"
    )
    alone = schedule.Schedule(
        learning_rate=0.2,
        size=1,
        max_steps=34,
        warmup_steps=20,
        decay="cosine",
        offset=8 / 1 - 2,
    )
    for step in range(5, 10):
        expected = before.rate(step, step + 1) / 4
        assert alone.rate(2 + (step - 2) * 4, 0) == pytest.approx(expected)
    # The warm-up of one rank is constant.
    assert alone.rate(13, 14) == pytest.approx(0.2)
    assert alone.rate(34, 35) == pytest.approx(0)


def test_constant_rate():
    options = {"learning_rate": 0.8, "size": 4, "max_steps": 20}
    assert schedule.Schedule(**options).is_constant
    assert not schedule.Schedule(**options, warmup_steps=1).is_constant
    assert not schedule.Schedule(**options, decay="cosine").is_constant
