"""The plan: global steps and epochs of `fit`."""

import itertools

import pytest

from hvdtrain.checkpoint.header import Header
from hvdtrain.training import Plan, TrainSpec


def plan(max_steps, *, pass_steps=469, local_batch_size=64, steps_per_execution=None):
    return Plan.of(
        TrainSpec(
            input_fn=None,
            max_steps=max_steps,
            pass_steps=pass_steps,
            local_batch_size=local_batch_size,
            steps_per_execution=steps_per_execution,
        ),
        global_batch_size=local_batch_size,
    )


def test_callbacks_count_batches_unless_the_steps_are_given():
    def execution(**options):
        spec = TrainSpec(
            input_fn=None, max_steps=200, pass_steps=10, local_batch_size=64, **options
        )
        return Plan.of(spec, global_batch_size=128).steps_per_execution

    callbacks = {"callbacks": lambda plan: []}
    assert execution() == execution(steps_per_execution=0) == 20
    assert execution(**callbacks) == 1
    assert execution(**callbacks, steps_per_execution=0) == 20
    assert execution(**callbacks, steps_per_execution=7) == 7


def test_samples_of_a_job_whose_batch_has_changed():
    header = Header(
        step=10,
        local_batch_sizes=(64, 64),
        global_batch_size=128,
        sample=1280,
        original_size=2,
        fit_epoch_steps=5,
        steps_per_execution=1,
    )
    found = plan(100).continued_from(header)
    assert [found.samples(step) for step in (10, 13)] == [1280, 1280 + 3 * 64]
    assert plan(100).samples(13) == 13 * 64


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
            found.fit_epoch_steps == pass_steps,
            # All epochs but the last are full, and the last is not empty.
            before_last < max_steps <= before_last + found.fit_epoch_steps,
            found.step(found.epochs) == max_steps,
        )
        if not all(holds):
            wrong.append((holds, found))
    assert wrong == []


def test_steps_by_hand():
    # 145 steps in passes of 47: three epochs of 47 and one of 4.
    found = plan(145, pass_steps=47, steps_per_execution=10)
    assert (found.epochs, found.fit_epoch_steps) == (4, 47)
    assert [found.step(0), found.step(1), found.step(2, 7)] == [0, 47, 101]
    assert found.step(3, 10) == found.step(4) == 145


def test_executions_by_hand():
    """Each epoch starts one, and the last of an epoch is short."""
    found = plan(25, pass_steps=9, steps_per_execution=4)
    executions = [(0, 4), (4, 8), (8, 9), (9, 13), (13, 17), (17, 18)]
    executions += [(18, 22), (22, 25)]
    expected = [execution for execution in executions for _ in range(*execution)]
    assert [found.execution(step) for step in range(25)] == expected


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
