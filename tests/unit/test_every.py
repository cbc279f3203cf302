"""The counter of training steps."""

import pytest

from hvdtrain.keras.callbacks.stopping import EverySteps


def due_batches(every_steps, batches):
    is_due = EverySteps(every_steps)
    return [number for number, batch in enumerate(batches) if is_due(batch)]


def test_counts_over_epochs():
    # 3 steps an epoch; due after steps 5, 10, 15: calls number 4, 9, 14.
    assert due_batches(5, [0, 1, 2] * 5) == [4, 9, 14]


def test_counts_epochs_of_one_step():
    assert due_batches(2, [0] * 6) == [1, 3, 5]


def test_counts_several_steps_per_call():
    # 10 steps an epoch in executions of 4, 4, 2.
    assert due_batches(8, [3, 7, 9] * 2) == [1, 4]


@pytest.mark.parametrize("every_steps", [0, -1, 2.5, None])
def test_wants_a_positive_integer(every_steps):
    with pytest.raises(ValueError, match="every_steps"):
        EverySteps(every_steps)
