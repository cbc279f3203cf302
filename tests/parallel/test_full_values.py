"""Shards gathered on the chief and scattered back, against the full array."""

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd
from hvdtrain.sharding import full_values
from hvdtrain.sharding.full_values import FullValues, FullVariable
from hvdtrain.sharding.shards import Sharding, set_sharding

RANK, SIZE = hvd.rank(), hvd.size()
SHAPE = (5, 7, 3)
FULL = np.arange(105, dtype="float32").reshape(SHAPE)


def make_sharding(**options):
    return Sharding(
        num_shards=SIZE, rank=RANK, process_set=hvd.global_process_set, **options
    )


def flat(shape, **options):
    return make_sharding(axis=0, size=int(np.prod(shape)), shape=shape, **options)


def one_owner(size):
    return make_sharding(axis=0, size=5, uneven=(0,) * (SIZE - 1) + (size,))


SHARDINGS = {
    "replicated": lambda: None,
    "rows": lambda: make_sharding(axis=0, size=5),
    "columns": lambda: make_sharding(axis=1, size=7),
    "one owner": lambda: one_owner(5),
    "flat": lambda: flat(SHAPE),
    "flat, of a column": lambda: flat(
        (5, 1, 3),
        within=Sharding(
            axis=1,
            size=7,
            num_shards=7,
            rank=6,
            process_set=None,
        ),
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", ["memory", "file", "no such directory"])
def test_values_move_to_the_chief_and_back(monkeypatch, tmp_path, dtype, place):
    # Several chunks, the last of which is not full.
    monkeypatch.setattr(full_values, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(full_values, "_LEAST_FILE_BYTES", 64)
    directory = None if place == "memory" else tmp_path
    directory = directory / "none" if place == "no such directory" else directory
    full = FULL.astype(dtype)
    variables, expected = [], []
    for make in SHARDINGS.values():
        sharding = make()
        expected.append(np.asarray(sharding.shard(full) if sharding else full))
        variable = keras.Variable(expected[-1], dtype=dtype)
        if sharding:
            set_sharding(variable, sharding)
            assert sharding.shard_shape(SHAPE) == variable.shape
        variables.append(variable)
    values = FullValues(map(FullVariable.of, variables), directory=directory)
    for number, name in enumerate(SHARDINGS):
        gathered = values.gather(number)
        assert (gathered is None) == (RANK > 0)
        is_sharded = SHARDINGS[name]() is not None
        in_file = RANK == 0 and place == "file" and is_sharded
        assert isinstance(gathered, np.memmap) == in_file
        assert not list(tmp_path.iterdir())
        if RANK == 0 and name == "flat, of a column":
            np.testing.assert_array_equal(gathered[:, 6:], full[:, 6:])
        elif RANK == 0:
            np.testing.assert_array_equal(gathered, full)
        variables[number].assign(keras.ops.zeros_like(variables[number]))
        values.scatter(number, full)
        np.testing.assert_array_equal(variables[number], expected[number])


def test_a_variable_that_only_another_rank_has():
    scalar = keras.Variable(3.0) if RANK == SIZE - 1 else None
    values = FullValues([FullVariable("step", (), "float32", scalar)])
    gathered = values.gather(0)
    assert gathered is None or gathered == 3
    values.scatter(0, np.float32(5))
    assert scalar is None or float(scalar) == 5
