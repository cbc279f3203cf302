"""A training on several ranks that ends early and continues; and unequal shares."""

import functools
import math
import pathlib
import shutil
import warnings

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.checkpoint.snapshot import capture
from hvdtrain.checkpoint.storage import CheckpointFiles
from hvdtrain.data import Sampler
from hvdtrain.job import JobError, World, agreement
from hvdtrain.job.world import PreemptedError
from hvdtrain.training import EvalSpec, RunConfig, TrainSpec

RANK, SIZE = hvd.rank(), hvd.size()
WORLD = World(rank=RANK, size=SIZE)
STEPS, EPOCH_STEPS, SAMPLES = 16, 6, 50
GLOBAL_BATCH_SIZE = 2 * SIZE + 1
X = np.random.RandomState(0).normal(size=(SAMPLES, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def model(*layers, optimizer):
    dense = [keras.layers.Dense(8, "relu"), *layers, keras.layers.Dense(1)]
    network = keras.Sequential([keras.Input((4,)), *dense])
    network.compile(optimizer, "mse", metrics=["mae"])
    return network


def sampler(world):
    return Sampler(
        num_samples=SAMPLES,
        global_batch_size=GLOBAL_BATCH_SIZE,
        seed=0,
        rank=world.rank,
        size=world.size,
    )


def batches(start_step, end_step, world=WORLD):
    places = sampler(world).indices(start_step, end_step)
    options = tf.data.Options()
    # The end of an iterator waits for the end of a period of it, up to 10 s.
    options.autotune.enabled = False
    pairs = tf.data.Dataset.from_tensor_slices((X[places], Y[places]))
    return pairs.with_options(options)


def train(
    model_fn,
    *,
    directory=None,
    callbacks=(),
    save_every_steps=1,
    observers=(),
    input_fn=batches,
):
    return training.train_and_evaluate(
        model_fn,
        TrainSpec(
            input_fn=input_fn,
            max_steps=STEPS,
            pass_steps=EPOCH_STEPS,
            local_batch_size=sampler(WORLD).local_batch_size,
            steps_per_execution=1,
            callbacks=lambda plan: callbacks,
        ),
        EvalSpec(input_fn=lambda: batches(0, 3), throttle_steps=5),
        RunConfig(model_dir=directory, save_every_steps=save_every_steps, seed=1),
        world=WORLD,
        observers=observers,
    )


class LogTestLoss(keras.callbacks.Callback):
    """Logs the test loss that the callbacks of this rank see."""

    def on_epoch_end(self, epoch, logs=None):
        logs["seen"] = logs["val_loss"]


class OfRank(keras.callbacks.Callback):
    """Has a state of which a part differs by rank."""

    def __init__(self):
        super().__init__()
        self.arrays, self.restored = [np.arange(4), np.zeros(SIZE)], None

    def on_train_batch_end(self, batch, logs=None):
        self.arrays[1][RANK] += 1

    def get_state(self):
        return {"arrays": self.arrays}

    def set_state(self, state):
        self.arrays = self.restored = state["arrays"]


class Count(keras.layers.Layer):
    """Adds variables that Keras does not list: calls, and sums of each rank."""

    def __init__(self):
        super().__init__()
        self.count, self.sums = tf.Variable(0.0), [tf.Variable(tf.zeros((4,)))]

    def call(self, x):
        sums = self.sums[0].assign_add(keras.ops.mean(x, axis=0))
        return x + 0.01 * self.count.assign_add(1.0) + 0.01 * sums


def frozen_and_random(*layers):
    return model(
        keras.layers.Dense(4, trainable=False),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3),
        *layers,
        optimizer=keras.optimizers.SGD(
            0.05, momentum=0.9, gradient_accumulation_steps=3
        ),
    )


def values(result):
    return [
        v.numpy() for v in (*result.model.variables, *result.model.optimizer.variables)
    ]


def assert_equal(result, expected):
    for found, wanted in zip(values(result), values(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert result.history == expected.history
    assert result.test_metrics == expected.test_metrics


def test_a_killed_job_computes_what_the_uninterrupted_one_computes(directory):
    counts = []

    def model_fn():
        counts.append(Count())
        return frozen_and_random(counts[-1])

    expected = train(model_fn, callbacks=[LogTestLoss()])
    # Within the second epoch; twice: tests/unit/test_resuming.py.
    callbacks = [LogTestLoss(), OfRank(), oracle.killed_after(9)]
    with pytest.raises(oracle.KilledError):
        train(model_fn, directory=directory, callbacks=callbacks)
    of_rank = OfRank()
    callbacks = [LogTestLoss(), of_rank]
    result = train(model_fn, directory=directory, callbacks=callbacks)
    assert 0 < result.start_step < STEPS
    assert_equal(result, expected)
    np.testing.assert_array_equal(of_rank.restored[0], np.arange(4))
    steps = np.zeros(SIZE)
    steps[RANK] = STEPS
    np.testing.assert_array_equal(of_rank.arrays[1], steps)
    oracle.assert_bitwise_equal_over_ranks(result.history["seen"])
    assert float(counts[-1].count) == float(counts[0].count) == STEPS
    found, wanted = counts[-1].sums[0].numpy(), counts[0].sums[0].numpy()
    np.testing.assert_array_equal(found, wanted)
    assert SIZE == 1 or np.ptp(hvd.allgather(wanted[None], name="sums"), 0).any()
    if RANK == 0:
        files = CheckpointFiles(pathlib.Path(directory) / "checkpoints")
        kinds = [name.partition("/")[0] for name in files.read(STEPS).arrays]
        # Kernel and bias that are frozen, the count, and moving statistics, which are
        # equal at the end of an epoch.
        assert kinds.count("replicated") == 5
        # The seed, sums of this rank and six accumulated gradients.
        assert [kinds.count(f"rank{rank}") for rank in range(SIZE)] == [8] * SIZE


@pytest.mark.parametrize("everywhere", [False, True])
def test_variables_of_the_steps_of_some_ranks_are_not_stored(everywhere):
    network = frozen_and_random()
    hvd.DistributedOptimizer(network.optimizer).build(network.trainable_variables)
    capture_with = functools.partial(capture, network, WORLD, everywhere=everywhere)
    expected = capture_with()
    own = [tf.Variable(0.0)] if RANK == 0 else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured = capture_with(unlisted=own)
    assert (captured is None) is (expected is None)
    if captured:
        assert captured.unlisted == 0
        assert captured.arrays.keys() == expected.arrays.keys()
    text = "list: variable:0 on rank 0 and none on rank"
    assert sum(text in str(each.message) for each in caught) == (RANK == 0)


@pytest.mark.parametrize("everywhere", [False, True])
def test_frozen_weights_are_kept_once_unless_they_differ(everywhere):
    network = frozen_and_random()
    hvd.DistributedOptimizer(network.optimizer).build(network.trainable_variables)
    frozen = network.layers[1]
    frozen.kernel.assign(keras.ops.ones_like(frozen.kernel))
    frozen.bias.assign(keras.ops.ones_like(frozen.bias) * RANK)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured = capture(network, WORLD, everywhere=everywhere)
    if RANK and not everywhere:
        assert captured is None
        return
    names = {
        name
        for name in captured.arrays
        if name.endswith((frozen.kernel.path, frozen.bias.path))
    }
    assert names == {
        f"replicated/0000/{frozen.kernel.path}",
        *(f"rank{rank}/0001/{frozen.bias.path}" for rank in range(SIZE)),
    }
    texts = [str(each.message) for each in caught]
    expected = [f"{frozen.bias.path} is frozen, and differs by rank"] * (RANK == 0)
    assert [text.split(", as")[0] for text in texts] == expected


class Reports(list):
    on_progress = list.append


@pytest.mark.ranks
def test_reports_add_up_to_the_epoch():
    def model_fn():
        network = model(optimizer=keras.optimizers.SGD(0.05))
        hits = keras.metrics.TruePositives(0.0, name="hits")
        network.compile(network.optimizer, "mse", metrics=[hits])
        return network

    reports = Reports()
    result = train(model_fn, observers=[reports])
    first_step = STEPS - STEPS % EPOCH_STEPS
    hits = [each.metrics["hits"] for each in reports if each.step > first_step]
    expected = result.history["hits"][-1]
    assert expected > 0
    assert hits if RANK == 0 else not reports
    assert not hits or sum(hits) == expected


@pytest.mark.parametrize(
    "event",
    ["on_epoch_end", pytest.param("on_train_batch_end", marks=pytest.mark.long)],
)
def test_one_rank_may_end_the_training_at_the_end_of_an_epoch(event):
    """Also one whose callbacks are not on the other ranks."""

    def stop(number, logs):
        network.stop_training = int(network.optimizer.iterations) == 2 * EPOCH_STEPS

    network = model(optimizer=keras.optimizers.SGD(0.05))
    callbacks = [keras.callbacks.LambdaCallback(**{event: stop})] if RANK else []
    result = train(lambda: network, callbacks=callbacks)
    assert len(result.history["loss"]) == 2
    assert int(network.optimizer.iterations) == 2 * EPOCH_STEPS


def test_options_that_differ_are_an_error_on_all_ranks():
    with pytest.raises(JobError, match=r"^Received save_every_steps=1 on rank 0 and"):
        train(model_fn=None, save_every_steps=1 + RANK)


@pytest.mark.long
def test_an_input_may_be_what_rank_0_has_found(directory, monkeypatch):
    # Ranks that wait for others exchange this at once.
    monkeypatch.setattr(agreement, "_POLL_SECONDS", 0.0)

    def input_fn(start_step, end_step):
        order = np.random.RandomState(1).permutation(SAMPLES) if RANK == 0 else None
        order = hvd.broadcast_object(order, name="order")
        places = order[sampler(WORLD).indices(start_step, end_step)]
        return tf.data.Dataset.from_tensor_slices((X[places], Y[places]))

    def model_fn():
        return model(optimizer=keras.optimizers.SGD(0.05))

    expected = train(model_fn, input_fn=input_fn)
    result = train(model_fn, input_fn=input_fn, directory=directory)
    assert_equal(result, expected)


def train_scaled(world, directory, **config):
    """Train with four samples a rank, until the limits in `config`."""
    config = RunConfig(model_dir=directory, seed=1, **config)
    here = training.position(config, world)
    part = Sampler(
        num_samples=SAMPLES,
        global_batch_size=4 * world.size,
        seed=0,
        rank=world.rank,
        size=world.size,
        start_step=here.step,
        start_sample=here.sample,
    )

    def input_fn(start_step, end_step):
        places = part.indices(start_step, end_step)
        return tf.data.Dataset.from_tensor_slices((X[places], Y[places]))

    return training.train_and_evaluate(
        lambda: model(optimizer=keras.optimizers.SGD(0.02 * world.size, momentum=0.9)),
        TrainSpec(
            input_fn=input_fn,
            max_steps=part.steps(2),
            pass_steps=part.pass_steps,
            local_batch_size=part.local_batch_size,
            steps_per_execution=1,
            scale_from=here,
        ),
        EvalSpec(input_fn=lambda: batches(0, 3)),
        config,
        world=world,
    )


def stopped_position(world, directory):
    """Train to the first report; return the `Position` of the checkpoint there."""
    with pytest.raises(PreemptedError):
        train_scaled(world, directory, max_minutes=1e-9)
    return training.position(RunConfig(model_dir=directory), world)


@pytest.mark.long
def test_a_scaled_job_takes_every_sample_once_with_the_rates_of_its_ranks(directory):
    first = stopped_position(WORLD, directory)
    # Each rank goes on alone, and all compute the same: its averages change nothing.
    own = f"{directory}-{RANK}"
    shutil.copytree(directory, own)
    second = stopped_position(World(), own)
    result = train_scaled(WORLD, f"{directory}-0")
    again = train_scaled(WORLD, f"{directory}-0")
    assert (again.start_step, again.test_metrics) == (result.step, result.test_metrics)
    assert 0 < first.step < second.step
    assert second.sample - first.sample == 4 * (second.step - first.step)
    expected, losses, sizes = oracle.on_one_process(
        lambda: scaled_on_one_process(first.step, second.step)
    )
    oracle.assert_bitwise_equal_over_ranks(result.model.get_weights())
    for found, wanted in zip(result.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=3e-5)
    # The first start has two epochs of equal length; both changes are in the first.
    steps = math.ceil(math.ceil(2 * SAMPLES / (4 * SIZE)) / 2)
    assert second.step < steps
    means = [
        np.average(losses[i : i + steps], weights=sizes[i : i + steps])
        for i in range(0, len(losses), steps)
    ]
    np.testing.assert_allclose(result.history["loss"], means, rtol=1e-5)


def scaled_on_one_process(first_step, second_step):
    """Weights, and losses and sizes of batches, of two epochs."""
    keras.utils.set_random_seed(1)
    optimizer = keras.optimizers.SGD(0.02 * SIZE, momentum=0.9)
    network = model(optimizer=optimizer)
    order = Sampler(num_samples=SAMPLES, global_batch_size=1, seed=0)
    order = order.indices(0, 3 * SAMPLES).ravel()
    sizes, losses, place = [], [], 0
    while place < 2 * SAMPLES:
        step = len(sizes)
        ranks = 1 if first_step <= step < second_step else SIZE
        if step in (first_step, second_step):
            # The momentum contains the rate.
            optimizer.learning_rate.assign(0.02 * ranks)
            factor = ranks / SIZE if ranks == 1 else ranks
            for velocity in optimizer.momentums:
                velocity.assign(velocity * factor)
        batch = order[place : place + 4 * ranks]
        losses.append(network.train_on_batch(X[batch], Y[batch])[0])
        network.reset_metrics()
        sizes.append(len(batch))
        place += len(batch)
    return network.get_weights(), losses, sizes


@pytest.mark.long
@pytest.mark.ranks
def test_ranks_with_unequal_shares_compute_what_one_process_computes():
    """A global batch that is no multiple of the number of ranks."""

    def model_fn():
        return model(optimizer=keras.optimizers.SGD(0.05, momentum=0.9))

    def one_process():
        keras.utils.set_random_seed(1)
        network = model_fn()
        one = World()
        network.fit(batches(0, STEPS, one), shuffle=False, verbose=0)
        return network.get_weights()

    result = train(model_fn)
    oracle.assert_bitwise_equal_over_ranks(result.model.get_weights())
    expected = oracle.on_one_process(one_process)
    for found, wanted in zip(result.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=3e-5)
