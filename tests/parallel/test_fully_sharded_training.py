"""`training.fit` of a fully sharded model: it continues as a replicated one does."""

import json
import pathlib
import tempfile

import keras
import numpy as np
import oracle
import pytest
import safetensors.numpy

import hvdtrain.keras as hvd
from hvdtrain import parallel, training
from hvdtrain.job import World
from hvdtrain.sharding import full_values

WORLD = World(rank=hvd.rank(), size=hvd.size())
STEPS = 9
GLOBAL_BATCH_SIZE = 4 * hvd.size()
rng = np.random.default_rng(0)
IDS = rng.integers(0, 23, (4 * GLOBAL_BATCH_SIZE, 5)).astype("int32")
LABELS = rng.integers(0, 3, len(IDS))


@pytest.fixture
def directory():
    """One that rank 0 made; the others have its name only."""
    with tempfile.TemporaryDirectory() as own:
        yield hvd.broadcast_object(str(pathlib.Path(own) / "run"), name="directory")
        hvd.allreduce(0, name="leave_directory")


def model(is_sharded):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    network = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(23, 7),
            layers.Dense(9, "gelu", trainable=False),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(8, "relu"),
            layers.Dense(3),
        ]
    )
    if is_sharded:
        parallel.fully_shard(network, min_size=16)
    optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)
    network.compile(
        hvd.DistributedOptimizer(optimizer, sparse_as_dense=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def train(is_sharded, directory=None, kill_after=None):
    return training.fit(
        lambda: model(is_sharded),
        (IDS, LABELS),
        global_batch_size=GLOBAL_BATCH_SIZE,
        max_steps=STEPS,
        validation=(IDS[:11], LABELS[:11]),
        steps_per_execution=1,
        callbacks=[oracle.killed_after(kill_after)] if kill_after else (),
        model_dir=directory,
        save_every_steps=1,
        seed=1,
        world=WORLD,
        observers=(),
    )


def values(result):
    """Full values of the weights, and the test metrics."""
    return [*result.model.get_weights(), *result.test_metrics.values()]


@pytest.mark.ranks
def test_a_killed_job_computes_what_the_uninterrupted_one_computes(
    directory, monkeypatch
):
    # The chief keeps full values in files.
    monkeypatch.setattr(full_values, "_LEAST_FILE_BYTES", 64)
    expected = train(True)
    with pytest.raises(oracle.KilledError):
        train(True, directory, kill_after=5)
    result = train(True, directory)
    assert 0 < result.start_step < STEPS
    for found, wanted in zip(values(result), values(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert result.history == expected.history
    full = zip(result.model.weights, result.model.get_weights(), strict=True)
    trained = [value for variable, value in full if variable.trainable]
    if WORLD.is_chief:
        stored = trained_weights(directory)[: len(trained)]
        for found, wanted in zip(stored, trained, strict=True):
            np.testing.assert_array_equal(found, wanted, strict=True)


def trained_weights(directory):
    """Read the newest checkpoint as docs/checkpoints.md does."""
    newest = max(pathlib.Path(directory, "checkpoints").glob("step-*.json"))
    file = newest.with_name(json.loads(newest.read_text())["arrays"])
    arrays = safetensors.numpy.load_file(file)
    return [a for name, a in sorted(arrays.items()) if name.startswith("shared/")]


@pytest.mark.long
def test_a_job_continues_with_replicated_and_with_sharded_weights(directory):
    expected = train(False)
    with pytest.raises(oracle.KilledError):
        train(False, directory, kill_after=3)
    with pytest.raises(oracle.KilledError):
        train(True, directory, kill_after=3)
    result = train(False, directory)
    assert 3 < result.start_step < STEPS
    for found, wanted in zip(values(result), values(expected), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.long
def test_predictions_are_those_of_replicated_weights():
    replicated, sharded = (
        training.predict(model(is_sharded), IDS[:11], world=WORLD)
        for is_sharded in (False, True)
    )
    np.testing.assert_allclose(sharded, replicated, atol=1e-6)
