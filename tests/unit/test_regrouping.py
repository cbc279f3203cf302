"""Checkpoints of sharded tables, for models that do not shard them."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.checkpoint.header import OtherModelError
from hvdtrain.checkpoint.per_rank import regroup, states_by_replica
from hvdtrain.checkpoint.state_variables import StateVariables
from hvdtrain.sharding.full_values import FullVariable
from hvdtrain.sharding.shards import Sharding, set_sharding

SHARDING = Sharding(
    axis=0, size=4, num_shards=2, rank=0, process_set=None, sums_gradients=True
)


def variables(sharding, *, is_accumulated):
    variable = keras.Variable(np.zeros([2 if sharding else 4], "float32"))
    if sharding:
        set_sharding(variable, sharding)
    own = [FullVariable.of(variable)]
    accumulated = range(is_accumulated)
    return StateVariables(
        shared=[], own=own, accumulated=accumulated, metrics=[], unlisted=range(1, 1)
    )


@pytest.mark.parametrize("dtype", ["float32", tf.bfloat16.as_numpy_dtype])
def test_gradients_become_sums_weighted_by_samples(dtype):
    rows = np.array([[8, 16, 0, 8], [0, 8, 8, 8], [4, 4, 8, -4]], dtype)
    before = {f"rank{number}/0000/table": row for number, row in enumerate(rows)}
    sharded = variables(SHARDING, is_accumulated=True)
    sums = regroup(before, sharded, [3, 3, 2])
    assert [*sums] == ["tables/0000/table"]
    (found,) = sums.values()
    np.testing.assert_array_equal(found, np.array([12, 30, 15, 15], dtype))
    assert found.dtype == dtype
    # Back: each replica's share.
    after = regroup(sums, variables(None, is_accumulated=True), [3, 3, 2])
    assert [*after] == [*before]
    for value in after.values():
        np.testing.assert_array_equal(value, np.array([4, 10, 5, 5], dtype))
        assert value.dtype == dtype


def test_frozen_tables_that_differ_by_rank_are_refused():
    before = {f"rank{number}/0000/table": np.full(4, number) for number in range(2)}
    sharded = variables(SHARDING, is_accumulated=False)
    with pytest.raises(
        OtherModelError, match="table differed by rank, and the model sh"
    ):
        regroup(before, sharded, [4, 4])


def test_frozen_tables_stay_stored_once():
    once = {"replicated/0000/table": np.arange(4.0)}
    sharded = regroup(once, variables(SHARDING, is_accumulated=False), [4, 4])
    assert [*sharded] == ["tables/0000/table"]
    assert [*regroup(sharded, variables(None, is_accumulated=False), [4])] == [*once]


@pytest.mark.parametrize("size", [64, 32])
def test_each_array_is_looked_up_once_for_any_number_of_ranks(size):
    visits = collections.Counter()

    class Visited(dict):
        def items(self):
            for name, value in super().items():
                visits[name] += 1
                yield name, value

    arrays = Visited()
    for rank in range(64):
        arrays[f"rank{rank}/0000/mean"] = np.full(4, rank)
        arrays[f"random{rank}/python"] = np.full(1, rank)
    mean = variables(None, is_accumulated=False)
    states = states_by_replica(arrays, size, mean, [1] * 64)
    assert [state["rank"][0][0] for state in states] == [*range(size)]
    assert {*visits.values()} == {1}


def test_states_of_metrics_are_found_by_the_names_that_a_user_has_chosen():
    metrics = [keras.metrics.Mean(name=f"top_{number}") for number in (2, 1)]
    variables = StateVariables(
        shared=[],
        own=[],
        accumulated=range(0),
        metrics=[variable for metric in metrics for variable in metric.variables],
        unlisted=range(0),
    )
    before = [
        f"top_{number}/{name}" for number in (1, 2) for name in ("total", "count")
    ]
    arrays = {
        f"metrics0/{number:04}/{path}": np.float32(number)
        for number, path in enumerate(before)
    }
    (state,) = states_by_replica(arrays, 1, variables, [4])
    assert state["metrics"] == [2, 3, 0, 1]
