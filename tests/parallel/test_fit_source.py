"""`training.fit`: a training on a source, by all ranks and by one process."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import data, training
from hvdtrain.job import JobError, World

RANK, SIZE = hvd.rank(), hvd.size()
WORLD = World(rank=RANK, size=SIZE, seed=1)
SAMPLES, GLOBAL_BATCH_SIZE, EPOCHS = 50, 2 * SIZE + 1, 2
X = np.random.RandomState(0).normal(size=(SAMPLES, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
SOURCE = (X, Y)


def make_model(rate=0.05):
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", metrics=["mae"])
    return model


def add_noise(sample, seed):
    x, y = sample
    return x + tf.random.stateless_normal((4,), seed, stddev=0.1), y


def fit(source=SOURCE, *, world=WORLD, **more):
    # The seed of `job.start` was another one.
    more = {"epochs": EPOCHS, "validation": SOURCE, "observers": (), "seed": 1} | more
    return training.fit(
        make_model, source, global_batch_size=GLOBAL_BATCH_SIZE, world=world, **more
    )


def on_one_process(transform=None):
    """Weights after the same samples in one process, without hvdtrain's loop."""
    keras.utils.set_random_seed(1)
    model = make_model()
    sampler = data.Sampler(
        num_samples=SAMPLES,
        global_batch_size=GLOBAL_BATCH_SIZE,
        seed=WORLD.seed,
    )
    steps = sampler.steps(EPOCHS)
    numbers, positions = sampler.indices(0, steps), sampler.positions(0, steps)
    for batch, places in zip(numbers, positions, strict=True):
        x = X[batch]
        if transform:
            seeds = [np.array([WORLD.seed, place]) for place in places]
            pairs = zip(x, seeds, strict=True)
            x = np.stack([transform((x, None), seed)[0] for x, seed in pairs])
        model.train_on_batch(x, Y[batch])
    return model.get_weights()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "transform", [pytest.param(None, marks=pytest.mark.long), add_noise]
)
def test_all_ranks_compute_what_one_process_computes(transform):
    result = fit(transform=transform)
    oracle.assert_bitwise_equal_over_ranks(result.model.get_weights())
    expected = oracle.on_one_process(lambda: on_one_process(transform=transform))
    for found, wanted in zip(result.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    losses = oracle.on_one_process(
        lambda: result.model.evaluate(X, Y, verbose=0, return_dict=True)
    )
    np.testing.assert_allclose(result.test_metrics["loss"], losses["loss"], rtol=1e-5)


# `train_and_evaluate`, which `fit` calls, has this test in test_resuming.py.
@pytest.mark.long
def test_a_killed_job_computes_what_the_uninterrupted_one_computes(directory):
    common = {"transform": add_noise, "steps_per_execution": 1}
    expected = fit(**common)
    with pytest.raises(oracle.KilledError):
        fit(
            model_dir=directory,
            save_every_steps=1,
            callbacks=lambda plan: [oracle.killed_after(5)],
            **common,
        )
    result = fit(model_dir=directory, **common)
    assert 0 < result.start_step < result.step
    pairs = zip(result.model.get_weights(), expected.model.get_weights(), strict=True)
    for found, wanted in pairs:
        np.testing.assert_array_equal(found, wanted)
    assert result.history == expected.history


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": (X[:40], Y[:40])}, "Received source="),
        ({"seed": 6}, "Received seed=6"),
    ],
)
def test_a_job_goes_on_with_the_same_samples_only(directory, change, message):
    fit(model_dir=directory, epochs=1, validation=None)
    with pytest.raises(JobError, match=message):
        fit(model_dir=directory, **change)


@pytest.mark.ranks
def test_a_callback_that_is_missing_on_a_rank_is_named():
    check = hvd.callbacks.ConsistencyCheckCallback
    for make in (check, keras.callbacks.SwapEMAWeights):
        missing = f"{make.__name__} on rank 0 and not on rank"
        with pytest.raises(JobError, match=missing):
            fit(callbacks=[make()] if RANK == 0 else [])


def test_without_validation_there_is_no_evaluation(directory):
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(sorted(logs))
    )
    options = {"validation": None, "callbacks": [callback], "model_dir": directory}
    first = fit(**options)
    # And none is missing when the job is started again.
    again = fit(**options)
    assert seen == [["loss", "mae"]] * EPOCHS
    assert first.test_metrics == again.test_metrics == {}
    assert (again.start_step, again.step) == (first.step, first.step)


def test_a_job_keeps_the_batch_and_the_rate_of_its_first_ranks(directory):
    """A batch of 4 samples for each rank, in a job that one rank has started."""

    def fit_by_ranks(world, **more):
        return training.fit(
            # As users scale it: by the ranks of this run.
            lambda: make_model(0.001 * world.size),
            SOURCE,
            global_batch_size=lambda ranks: 4 * ranks,
            max_steps=lambda ranks: 12 // ranks,
            world=world,
            seed=1,
            observers=(),
            **more,
        )

    expected = fit_by_ranks(World(seed=1))
    # Each rank trains alone, and all compute the same: averages change nothing.
    kill = {"callbacks": [oracle.killed_after(3)], "save_every_steps": 1}
    with pytest.raises(oracle.KilledError):
        fit_by_ranks(World(seed=1), model_dir=f"{directory}-{RANK}", **kill)
    hvd.allreduce(0, name="written")
    result = fit_by_ranks(WORLD, model_dir=f"{directory}-0")
    assert 0 < result.start_step <= 3
    assert result.step == 12
    assert result.start.local_batch_sizes == [4 // SIZE] * SIZE
    assert result.start.replicas_before == 1
    assert result.start.learning_rate == pytest.approx(0.001)
    pairs = zip(result.model.get_weights(), expected.model.get_weights(), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.long
@pytest.mark.ranks
def test_a_job_that_scales_its_batch_may_get_more_ranks(directory):
    """From one rank, with batches of one sample, to all."""

    def fit_scaled(world, directory, **more):
        return training.fit(
            lambda: make_model(0.001),
            SOURCE,
            global_batch_size=1,
            epochs=1,
            world=world,
            scale_batch=True,
            model_dir=directory,
            observers=(),
            **more,
        )

    # Each rank trains alone, and all compute the same: averages change nothing.
    kill = {"callbacks": [oracle.killed_after(3)], "save_every_steps": 1}
    with pytest.raises(oracle.KilledError):
        fit_scaled(World(), f"{directory}-{RANK}", **kill)
    hvd.allreduce(0, name="written")
    result = fit_scaled(World(rank=RANK, size=SIZE), f"{directory}-0")
    taken = result.start_step
    assert 0 < taken <= 3
    assert result.step == taken + -(-(SAMPLES - taken) // SIZE)


def test_arguments_that_do_not_fit_are_one_clear_line():
    with pytest.raises(JobError, match="epochs=2 and max_steps=3"):
        fit(max_steps=3)
    with pytest.raises(JobError, match="epochs=0; expected 1 or more"):
        fit(epochs=0)
    with pytest.raises(JobError, match="max_steps=None; expected 1 or more"):
        fit(epochs=None, max_steps=lambda ranks: None)
    with pytest.raises(TypeError, match="batch_size; expected global_batch_size"):
        fit(batch_size=3)
    with pytest.raises(TypeError, match=r"shuffle; expected make_model, .*max_minutes"):
        fit(shuffle=True)
    with pytest.raises(JobError, match="a BestExporter without validation"):
        fit(validation=None, exporters=[training.BestExporter()])
    with pytest.raises(JobError, match="unchanged with seed; expected other keys"):
        fit(unchanged={"seed": 3})
    if SIZE > 1:
        with pytest.raises(JobError, match=f"batch of 1 for {SIZE} ranks"):
            training.fit(make_model, SOURCE, global_batch_size=1, epochs=1, world=WORLD)
    with pytest.raises(JobError, match=r"epochs=1\.5; expected 1 or more, an integer"):
        fit(epochs=1.5)
    with pytest.raises(JobError, match="without targets for a model with a loss"):
        fit(X, validation=None)
    with pytest.raises(JobError, match="a list of 2 arrays of 50 samples; expected a"):
        fit([X, Y])
    with pytest.raises(JobError, match="validation: Received list without samples"):
        fit(validation=[])
    if SIZE > 1:
        with pytest.raises(JobError, match="validation: Received 1 samples for"):
            fit(validation=(X[:1], Y[:1]))
        with pytest.raises(JobError, match=r"source=.*expected the same on all ranks"):
            fit((X[RANK:], Y[RANK:]))
        # As a script of Horovod shards its arrays.
        shard = slice(RANK, SAMPLES // SIZE * SIZE, SIZE)
        with pytest.raises(JobError, match="on rank 1 with other samples than on rank"):
            fit((X[shard], Y[shard]))
