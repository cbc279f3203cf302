"""The plan: global steps and epochs of `fit`."""

import dataclasses
import itertools

import pytest

from hvdtrain.training import Plan, TrainSpec


def plan(max_steps, *, pass_steps=469, local_batch_size=64, steps_per_execution=None):
    return Plan.of(
        TrainSpec(
            input_fn=None,
            max_steps=max_steps,
            pass_steps=pass_steps,
            local_batch_size=local_batch_size,
            steps_per_execution=steps_per_execution,
        )
    )


def test_invariants():
    wrong = []
    for max_steps, pass_steps, execution in itertools.product(
        [1, 19, 20, 997, 5000, 10_007], [1, 7, 469, 100_000], [None, 1, 3, 20]
    ):
        found = plan(max_steps, pass_steps=pass_steps, steps_per_execution=execution)
        before_last = (found.epochs - 1) * found.fit_epoch_steps
        holds = (
            found.max_steps == max_steps,
            execution in (None, found.steps_per_execution),
            found.fit_epoch_steps % found.steps_per_execution == 0,
            # All epochs but the last are full, and the last is not empty.
            before_last < max_steps <= before_last + found.fit_epoch_steps,
            found.step(found.epochs) == max_steps,
        )
        if not all(holds):
            wrong.append((holds, found))
    assert wrong == []


def test_steps_by_hand():
    # 150 steps in three passes of 47: three epochs of 50, rounded up to tens.
    found = plan(145, pass_steps=47, steps_per_execution=10)
    assert (found.epochs, found.fit_epoch_steps) == (3, 50)
    assert [found.step(0), found.step(1), found.step(2, 7)] == [0, 50, 107]
    # The last epoch has 45 steps; its last execution ends there.
    assert found.step(2, 50) == found.step(3) == 145


@pytest.mark.parametrize(
    ("max_steps", "local_batch_size", "expected"),
    [
        (5000, 64, 20),
        (5000, 128, 20),
        (5000, 1024, 2),  # an execution of some seconds at 1,000 samples/s
        (5000, 1 << 20, 1),
        (40, 64, 8),  # five reports
        (3, 64, 1),
    ],
)
def test_steps_per_execution(max_steps, local_batch_size, expected):
    found = plan(max_steps, local_batch_size=local_batch_size)
    assert found.steps_per_execution == expected


@pytest.mark.parametrize(
    ("start_step", "calls"),
    [
        # 23 steps in epochs of 5: as (first step, end, first epoch, end epoch, steps).
        (0, [(0, 23, 0, 5, 5)]),
        (5, [(5, 23, 1, 5, 5)]),
        (7, [(7, 10, 1, 2, 3), (10, 23, 2, 5, 5)]),
        (21, [(21, 23, 4, 5, 2)]),
    ],
)
def test_a_run_that_continues_within_an_epoch_ends_it_first(start_step, calls):
    plan = Plan(max_steps=23, epochs=5, fit_epoch_steps=5, steps_per_execution=1)
    found = [dataclasses.astuple(each) for each in plan.segments(start_step)]
    assert found == calls
