"""A training that ends early and continues, against the uninterrupted one."""

import dataclasses
import functools
import gc
import hashlib
import io
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import time
import warnings
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from toy import BATCH, X, Y, batches

from hvdtrain import training
from hvdtrain.banner import banner
from hvdtrain.checkpoint.header import Checkpoint, FirstBatch, Header
from hvdtrain.checkpoint.per_rank import PerRankState
from hvdtrain.checkpoint.restoring import Start
from hvdtrain.checkpoint.storage import CheckpointFiles
from hvdtrain.job import JobError, World
from hvdtrain.job.world import PreemptedError
from hvdtrain.keras.callbacks import fit_start
from hvdtrain.training import (
    EvalSpec,
    RunConfig,
    TrainSpec,
    building,
    inputs,
    run_directory,
)
from hvdtrain.training.observers import Console

EPOCH_STEPS = 10


class KilledError(Exception):
    """Ends a training without any of its cleaning up."""


class KillAfter(keras.callbacks.Callback):
    """Stands for kill -9: leaves `fit` after so many batches of this process.

    And not before `is_time()`: a slow disk leaves out checkpoints.
    """

    def __init__(self, batches, is_time=lambda: True):
        super().__init__()
        self._left = batches
        self._is_time = is_time

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if self._left <= 0:
            if self._is_time():
                raise KilledError
            time.sleep(0.05)


# Keras 3.12 keeps its global generator in `set_random_seed`: of two trainings in this
# process, the second one would draw other numbers.
HAS_NEW_GENERATOR = tuple(map(int, keras.__version__.split(".")[:2])) > (3, 12)


class Draws(keras.callbacks.Callback):
    """Logs numbers of the global random generators, and draws when things begin.

    And the test loss that callbacks see.
    """

    def on_train_begin(self, logs=None):
        random.random()

    def on_epoch_begin(self, epoch, logs=None):
        np.random.normal()

    def on_epoch_end(self, epoch, logs=None):
        logs["python"] = random.gauss(0, 1)
        logs["numpy"] = np.random.normal()
        logs["seen"] = logs.get("val_loss", -1.0)
        if HAS_NEW_GENERATOR:
            logs["keras"] = float(keras.random.normal(()))


pytestmark = pytest.mark.usefixtures("one_rank")


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network(optimizer, *, units=8):
    keras.utils.set_random_seed(1)
    return unseeded(optimizer, units=units)


def unseeded(optimizer, *, units=8):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(units, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(2),
        ]
    )
    model.compile(
        optimizer,
        loss=LOSS,
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(1, name="top"),
        ],
    )
    return model


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def train(
    directory,
    *,
    make_model=network,
    make_optimizer=momentum,
    max_steps=35,
    killed_after=None,
    units=8,
    local_batch_size=BATCH,
    save_every_steps=1,
    evaluation=None,
    input_fn=batches,
    callbacks=(),
    repeat=False,
    scale_from=None,
    steps_per_execution=1,
    check_input=True,
    observers=(),
    **config,
):
    callbacks = [*callbacks, *([KillAfter(killed_after)] if killed_after else [])]
    return training.train_and_evaluate(
        lambda: make_model(make_optimizer(), units=units),
        TrainSpec(
            input_fn=input_fn,
            max_steps=max_steps,
            pass_steps=EPOCH_STEPS,
            local_batch_size=local_batch_size,
            steps_per_execution=steps_per_execution,
            repeat=repeat,
            callbacks=(lambda plan: callbacks) if callbacks else None,
            scale_from=scale_from,
            check_input=check_input,
        ),
        evaluation or EvalSpec(input_fn=lambda: batches(0, 5), throttle_steps=6),
        RunConfig(
            model_dir=directory and str(directory),
            save_every_steps=save_every_steps,
            **config,
        ),
        world=World(),
        observers=observers,
    )


@functools.cache
def uninterrupted():
    return train(None)


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory):
    """The directory of a job of ten steps, which no test changes."""
    directory = tmp_path_factory.mktemp("first_steps")
    train(directory, max_steps=10)
    return directory


@pytest.fixture
def started(first_steps, tmp_path):
    """Return the directory of a job that has ended after ten steps."""
    return shutil.copytree(first_steps, tmp_path / "started")


def state(result):
    variables = *result.model.variables, *result.model.optimizer.variables
    return [variable.numpy() for variable in variables]


def assert_equal(result, expected):
    for found, wanted in zip(state(result), state(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert result.history == expected.history
    assert result.test_metrics == expected.test_metrics


OPTIMIZERS = {
    "momentum, accumulation": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=3
    ),
    "adam, averaged weights, schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.01, 35), use_ema=True
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        momentum(), dynamic_growth_steps=4
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        # Also on two ranks: tests/parallel/test_resuming.py.
        pytest.param("momentum, accumulation", marks=pytest.mark.long),
        "adam, averaged weights, schedule",
        pytest.param("loss scale", marks=pytest.mark.long),
    ],
)
def test_a_killed_job_computes_what_the_uninterrupted_one_computes(tmp_path, name):
    make_optimizer = OPTIMIZERS[name]
    options = {"make_optimizer": make_optimizer, "callbacks": [Draws()]}
    expected = train(None, **options)
    # Within an epoch, and within the next one.
    for batches_of_this_run in (7, 9):
        with pytest.raises(KilledError):
            train(tmp_path, killed_after=batches_of_this_run, **options)
    result = train(tmp_path, **options)
    # The last step of a run has no checkpoint; nor have those that came while the one
    # before was still being written.
    assert 0 < result.start_step <= 14
    assert_equal(result, expected)
    assert len(result.history["loss"]) == 4


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.release)]
)
@pytest.mark.long
def test_a_checkpoint_of_two_ranks_continues_on_one(tmp_path, dtype):
    def make_model(optimizer, *, units):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(units, "relu"), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
        model.compile(optimizer, "mse", metrics=["mae"])
        return model

    options = {
        "make_model": make_model,
        "make_optimizer": OPTIMIZERS["momentum, accumulation"],
    }
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        expected = train(None, **options)
        kill = KillAfter(8, lambda: within_window(files(tmp_path)))
        with pytest.raises(KilledError):
            train(tmp_path, callbacks=[kill], **options)
        rewrite_for_two_ranks(files(tmp_path))
        result = train(tmp_path, **options)
    finally:
        keras.config.set_dtype_policy(before)
    assert result.start_step
    assert banner(result.start).endswith(
        f"{files(tmp_path).path(result.start_step)}, which 2 ranks wrote"
    )
    assert_equal(result, expected)


def within_window(files):
    return [step for step in files.steps() if step % 3]


def rewrite_for_two_ranks(files):
    """Make the newest checkpoint one of two ranks, in the middle of a window.

    The mean of their accumulated gradients, and the sum of their metrics, are those of
    the checkpoint before.
    """
    step = within_window(files)[0]
    before = files.read(step)
    arrays = dict(before.arrays)
    for name, array in before.arrays.items():
        kind, _, rest = name.partition("/")
        if kind == "rank0":
            is_sum = "gradient_accumulator" in rest
            arrays[name] = array * array.dtype.type(2) if is_sum else array
            arrays[f"rank1/{rest}"] = np.zeros_like(array)
        elif kind == "metrics0":
            half = (array / 2).astype(array.dtype)
            arrays[name] = arrays[f"metrics1/{rest}"] = half
        elif kind == "random0":
            arrays[f"random1/{rest}"] = array
    assert any("gradient_accumulator" in name for name in arrays)
    for later in files.steps():
        if later > step:
            for path in files.path(later).parent.glob(f"step-{later:08}*"):
                path.unlink()
    sizes = (BATCH // 2, BATCH // 2)
    header = dataclasses.replace(before.header, local_batch_sizes=sizes)
    files.write(Checkpoint(header=header, arrays=arrays))


class Noise(keras.losses.Loss):
    """Draws numbers, and has a weight that grows with each call."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)
        self.calls = tf.Variable(0.0)

    def call(self, y, predictions):
        noise = keras.random.normal(keras.ops.shape(predictions), seed=self.seeds)
        weight = self.calls.assign_add(1.0)
        errors = keras.ops.square(predictions - noise - keras.ops.cast(y, "float32"))
        return keras.ops.mean(errors, axis=-1) / weight


class Decay(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self):
        self.rate, self.seeds = tf.Variable(0.1), keras.random.SeedGenerator(2)

    def __call__(self, step):
        noise = keras.random.uniform((), seed=self.seeds)
        return self.rate.assign(self.rate * (0.9 + 0.1 * noise))


class Scale(tf.Module):
    def __init__(self):
        super().__init__()
        self.variable = tf.Variable(1.0)


class Unlisted(keras.Model):
    """Uses variables that are in no list of Keras, and a second optimizer."""

    def __init__(self, optimizer, *, is_built):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.attribute, self.scale = tf.Variable(0.0), Scale()
        self.rows = {"list": [tf.Variable(0.0), tf.Variable(tf.zeros((6,)))]}
        self.recurrent = keras.layers.SimpleRNN(3, stateful=True)
        self.dense = keras.layers.Dense(1)
        self.bias = self.add_weight(shape=(1,), initializer="zeros")
        self.sums = [tf.Variable(tf.zeros((3, 1))), tf.Variable(tf.zeros((1,)))]
        self.second = keras.optimizers.SGD(0.05, momentum=0.5)
        if is_built:
            self.second.build([self.bias])
        closed_over = tf.Variable(1.0)
        self.grow = lambda: closed_over.assign_add(0.001)
        self.closed_over = lambda: closed_over

    def call(self, x):
        # Keras' stateful layers need to know the size of a batch.
        x = tf.ensure_shape(x, (BATCH, 6))
        x = x * self.grow() + self.attribute.assign_add(0.001)
        mean = self.rows["list"][1].assign_add(keras.ops.mean(x, axis=0) / 10)
        x = x * self.scale.variable.assign(self.scale.variable * 0.99) - mean
        return self.dense(self.recurrent(x[:, None])) + self.bias

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(loss, [self.bias, *self.dense.trainable_variables])
        self.second.apply(gradients[:1], [self.bias])
        for total, gradient in zip(self.sums, gradients[1:], strict=True):
            total.assign_add(gradient)
        count = self.rows["list"][0].assign_add(1.0)
        is_end = tf.cast(count % 4 == 0, "float32")
        self.optimizer.apply(
            [total * is_end for total in self.sums], self.dense.trainable_variables
        )
        for total in self.sums:
            total.assign(total * (1 - is_end))
        return self.compute_metrics(x, y, None)

    @property
    def unlisted(self):
        loss, schedule = self.loss, self.optimizer._learning_rate
        variables = [
            *(self.attribute, self.scale.variable, *self.rows["list"], *self.sums),
            *(*self.recurrent.states, *self.second.variables, self.closed_over()),
            *(loss.calls, loss.seeds.state, schedule.rate, schedule.seeds.state),
        ]
        return [variable.numpy() for variable in variables]


@pytest.mark.parametrize(
    ("run_eagerly", "steps_per_execution", "killed_after"),
    [(False, 4, 2), pytest.param(True, 1, 7, marks=pytest.mark.release)],
)
@pytest.mark.release
def test_state_that_keras_does_not_list(
    tmp_path, run_eagerly, steps_per_execution, killed_after
):
    def make_model(optimizer, *, units, is_built=True):
        model = Unlisted(optimizer, is_built=is_built)
        model.compile(keras.optimizers.SGD(Decay()), Noise(), run_eagerly=run_eagerly)
        return model

    options = {"max_steps": 12, "steps_per_execution": steps_per_execution}
    continued = functools.partial(train, tmp_path / "continued", **options)
    # Without checkpoints, a step that runs eagerly is not traced.
    whole = tmp_path / "whole" if run_eagerly else None
    expected = train(whole, make_model=make_model, **options)
    with pytest.raises(KilledError):
        continued(make_model=make_model, killed_after=killed_after)
    result = continued(make_model=functools.partial(make_model, is_built=run_eagerly))
    assert 0 < result.start_step < 12
    assert_equal(result, expected)
    for found, wanted in zip(
        result.model.unlisted, expected.model.unlisted, strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    again = continued(make_model=make_model)
    assert again.samples_per_second == 0
    for found, wanted in zip(
        again.model.unlisted, expected.model.unlisted, strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


class Counting(keras.Model):
    """Counts its steps in Python, and reads a number in them."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.dense, self.steps, self.losses_seen = keras.layers.Dense(2), 0, []

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.steps += 1
        logs = super().train_step(data)
        self.losses_seen.append(float(logs["loss"]))
        return logs


def test_an_eager_step_is_not_traced_without_checkpoints():
    def make_model(optimizer, *, units):
        model = Counting()
        model.compile(optimizer, LOSS, run_eagerly=True)
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = train(None, make_model=make_model, max_steps=5)
    assert result.model.steps == len(result.model.losses_seen) == 5


class Counts(keras.Model):
    """Counts its steps in a variable that Keras does not list."""

    def __init__(self, shape):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.dense, self.counts = keras.layers.Dense(2), [tf.Variable(tf.zeros(shape))]

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        if self.counts[0].shape.rank:
            self.counts[0].assign_add(tf.ones_like(self.counts[0]))
        return super().train_step(data)


class CountFromBegin(keras.callbacks.Callback):
    """Replaces `train_step` when the training begins."""

    def on_train_begin(self, logs=None):
        step, model = self.model.train_step, self.model

        def train_step(data):
            model.counts[0].assign_add(1.0)
            return step(data)

        model.train_step = train_step


@pytest.mark.parametrize(
    ("shapes", "callbacks", "text", "counts"),
    [
        ([(2,), (3,)], (), r"\(2,\) and .* uses \S+ of shape \(3,\)", [4] * 3),
        pytest.param(
            *([(), ()], [CountFromBegin()], "float32 where .* uses none", 4),
            marks=pytest.mark.release,
        ),
        ([(2,), ()], (), "float32 where .* uses none", 0),
    ],
)
@pytest.mark.long
def test_variables_that_do_not_match_start_anew(
    tmp_path, shapes, callbacks, text, counts
):
    def make_model(optimizer, *, units):
        model = Counts(shapes.pop(0))
        model.compile(optimizer, LOSS)
        return model

    shapes = [shapes[0], *shapes]
    options = {
        "make_model": make_model,
        "make_optimizer": OPTIMIZERS["momentum, accumulation"],
        "callbacks": callbacks,
    }
    expected = train(None, max_steps=9, **options)
    train(tmp_path, max_steps=5, **options)
    with pytest.warns(match=f"The checkpoint of step 5 has .*{text}") as caught:
        result = train(tmp_path, max_steps=9, **options)
    assert len([each for each in caught if "start anew" in str(each.message)]) == 1
    assert result.start_step == 5
    np.testing.assert_array_equal(result.model.counts[0], counts)
    assert_equal(result, expected)


def normalized(rows):
    """Return a `make_model` whose first layer is adapted to `rows`."""

    def make_model(optimizer, *, units):
        keras.utils.set_random_seed(1)
        normalization = keras.layers.Normalization()
        normalization.adapt(rows)
        model = keras.Sequential(
            [keras.Input((6,)), normalization, keras.layers.Dense(2)]
        )
        model.compile(optimizer, LOSS)
        return model

    return make_model


@pytest.mark.long
def test_a_resumed_job_normalizes_by_the_rows_of_its_first_run(tmp_path):
    first, other = normalized(X), normalized(5 * X + 10)
    expected = train(None, make_model=first)
    with pytest.raises(KilledError):
        train(tmp_path, make_model=first, killed_after=9)
    for is_finished in (False, True):
        result = train(tmp_path, make_model=other)
        assert (result.start_step == 35) is is_finished
        assert_equal(result, expected)
        found, wanted = (r.model.predict(X, verbose=0) for r in (result, expected))
        np.testing.assert_array_equal(found, wanted)


def binned(bins_rows=X, words=(1, 1, 1, 2, 2, 3)):
    """Return a `make_model` with bins and a vocabulary that are adapted to these.

    A second layer of the same class has the vocabulary that the first one returns.
    """

    def make_model(optimizer, *, units):
        keras.utils.set_random_seed(1)
        bins = keras.layers.Discretization(num_bins=4)
        bins.adapt(bins_rows)
        lookup = keras.layers.IntegerLookup(max_tokens=4)
        lookup.adapt(np.array(words))
        inputs = keras.Input((6,))
        second = keras.layers.IntegerLookup(vocabulary=[0, 1, 2, 3, 4])
        outputs = keras.layers.Embedding(6, 3)(second(lookup(bins(inputs))))
        outputs = keras.layers.Dense(2)(keras.layers.Flatten()(outputs))
        model = keras.Model(inputs, outputs)
        model.compile(optimizer, LOSS)
        return model

    return make_model


@pytest.mark.long
def test_a_job_with_other_bins_than_its_checkpoint_is_refused(tmp_path):
    expected = train(None, make_model=binned())
    with pytest.raises(KilledError):
        train(tmp_path, make_model=binned(), killed_after=9)
    for make_model, name in (
        (binned(bins_rows=X + 1), "bin_boundaries"),
        (binned(words=(3, 3, 3, 2, 2, 1)), "vocabulary"),
    ):
        with pytest.raises(JobError, match=f"Received the {name} of the la") as error:
            train(tmp_path, make_model=make_model)
        assert "checkpoint of step" in str(error.value)
        assert "\n" not in str(error.value)
    assert_equal(train(tmp_path, make_model=binned()), expected)


@pytest.mark.long
def test_the_comparison_sees_what_is_not_restored(tmp_path, monkeypatch):
    expected = uninterrupted()
    with pytest.raises(KilledError):
        train(tmp_path, killed_after=7)
    monkeypatch.setattr(PerRankState, "assign", lambda *_: None)
    result = train(tmp_path)
    with pytest.raises(AssertionError):
        assert_equal(result, expected)


def test_a_finished_job_trains_nothing_and_returns_the_last_metrics(tmp_path):
    expected = train(tmp_path, max_steps=12)
    again = train(tmp_path, max_steps=12, killed_after=1)
    assert again.start_step == 12
    assert again.samples_per_second == 0
    assert again.train_seconds == pytest.approx(expected.train_seconds)
    assert_equal(again, expected)


def test_a_job_prints_where_it_continues_or_that_it_had_finished(tmp_path):
    def lines(**options):
        file = io.StringIO()
        train(tmp_path, observers=[Console(file, has_bar=False)], **options)
        return file.getvalue().splitlines()

    new = lines(max_steps=10)
    assert not [line for line in new if line.startswith("continues")]
    assert any(line.startswith("step 10/10, epoch 1/1  loss ") for line in new)
    [evaluation] = [line for line in new if line.startswith("evaluation at step 10: ")]
    metrics = evaluation.partition(": ")[2]
    path = files(tmp_path).path(10)
    before = f"had finished before: step 10 of 10 in {path}  {metrics}"
    assert lines(max_steps=10) == [before]
    longer = lines(max_steps=12)
    assert f"continues      at step 10 from {path}" in longer
    assert any(line.startswith("step 12/12, epoch 2/2  loss ") for line in longer)


@pytest.mark.long
def test_a_longer_job_continues_a_finished_one(started):
    result = train(started, max_steps=12)
    assert result.start_step == 10
    assert int(result.model.optimizer.iterations) == 12


def files(directory):
    return CheckpointFiles(directory / "checkpoints")


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path):
    expected = uninterrupted()
    kill = KillAfter(8, lambda: len(files(tmp_path).steps()) > 1)
    with pytest.raises(KilledError):
        train(tmp_path, callbacks=[kill])
    newest, before = files(tmp_path).steps()[:2]
    files(tmp_path).path(newest).write_bytes(b"")
    with pytest.warns(UserWarning, match=rf"0{newest}.*Continuing from step {before}"):
        result = train(tmp_path)
    assert result.start_step == before
    assert_equal(result, expected)


def test_a_checkpoint_that_cannot_be_read_now_is_kept(started, monkeypatch):
    names = sorted((started / "checkpoints").iterdir())
    with monkeypatch.context() as patch:
        quick = functools.partial(CheckpointFiles, sleep=lambda seconds: None)
        patch.setattr(run_directory, "CheckpointFiles", quick)
        error = mock.Mock(side_effect=OSError(5, "Input/output error"))
        patch.setattr(hashlib, "file_digest", error)
        # One line, and no step from an older checkpoint, which would replace it.
        with pytest.raises(JobError, match=r"^Cannot read .*10\.json: Input/output"):
            train(started)
    assert sorted((started / "checkpoints").iterdir()) == names
    assert train(started, max_steps=12).start_step == 10


def test_no_usable_checkpoint_is_an_error_and_nothing_is_deleted(started):
    steps = files(started).steps()
    for step in steps:
        files(started).path(step).write_bytes(b"damaged")
    names = sorted(path.name for path in (started / "checkpoints").iterdir())
    assert len(names) == 2 * len(steps) > 2
    with pytest.raises(JobError, match=r"No checkpoint can be used.*json: ") as caught:
        train(started)
    assert all(str(files(started).path(step)) in str(caught.value) for step in steps)
    assert sorted(path.name for path in (started / "checkpoints").iterdir()) == names


def test_a_checkpoint_of_another_optimizer_is_an_error(started):
    with pytest.raises(
        JobError, match=r"(?i)it has sgd\S*iteration where the model has lion/"
    ):
        train(started, make_optimizer=keras.optimizers.Lion)


def test_a_checkpoint_of_another_model_is_an_error(started):
    with pytest.raises(JobError, match=r"another model.*\(6, 9\).*\(6, 8\)"):
        train(started, units=9)


def test_branches_that_have_changed_places_are_an_error(tmp_path):
    def make_model(optimizer, *, units, order):
        x = keras.Input((6,))
        outputs = [keras.layers.Dense(2, name=f"branch_{n}")(x) for n in order]
        model = keras.Model(x, keras.layers.Add()(outputs))
        model.compile(optimizer, LOSS, run_eagerly=True)
        return model

    first = functools.partial(make_model, order=(1, 2))
    train(tmp_path, make_model=first, max_steps=1)
    with pytest.raises(
        JobError, match=r"has branch_1/kernel where the model has branch_2/kernel: make"
    ):
        train(tmp_path, make_model=functools.partial(make_model, order=(2, 1)))
    assert train(tmp_path, make_model=first, max_steps=2).start_step == 1


@pytest.mark.long
def test_metrics_may_be_added_and_removed_within_an_epoch(tmp_path):
    def with_one_more(optimizer, *, units):
        model = network(optimizer, units=units)
        names = {"top": 1, "all": 2, "accuracy": 1}
        scores = [
            keras.metrics.SparseTopKCategoricalAccuracy(k, name=name)
            for name, k in names.items()
        ]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=scores)
        return model

    expected = uninterrupted()
    with pytest.raises(KilledError):
        train(tmp_path, killed_after=5)
    text = r"step \d has no states of the metrics all: they start there"
    with pytest.warns(UserWarning, match=text), pytest.raises(KilledError):
        train(tmp_path, killed_after=2, make_model=with_one_more)
    result = train(tmp_path)
    assert 0 < result.start_step < 9
    for found, wanted in zip(state(result), state(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for name in ("loss", "top", "accuracy"):
        assert result.history[name] == expected.history[name]


@pytest.mark.long
def test_another_learning_rate_is_taken_and_said(tmp_path):
    def slower():
        return keras.optimizers.SGD(0.01, momentum=0.9)

    train(tmp_path, max_steps=10)
    with pytest.warns(UserWarning, match="is 0.01; it was 0.1 before step 10"):
        result = train(tmp_path, max_steps=12, make_optimizer=slower)
    assert float(result.model.optimizer.learning_rate) == pytest.approx(0.01)
    # The change is that of the run before.
    assert train(tmp_path, max_steps=14, make_optimizer=slower).start_step == 12


def test_other_data_are_refused(tmp_path):
    train(tmp_path, max_steps=2, unchanged={"data": "a", "seed": 1})
    with pytest.raises(JobError, match=r"unchanged=.*expected values that JSON can"):
        RunConfig(unchanged={"path": object()})
    assert RunConfig(unchanged={"shape": (2, 3)}).unchanged == {"shape": [2, 3]}
    assert RunConfig(unchanged={"size": np.int64(5)}).unchanged == {"size": 5}
    with pytest.raises(JobError, match=r"^Received seed=2; expected 1, with which"):
        train(tmp_path, max_steps=6, unchanged={"data": "a", "seed": 2})
    # Also after a run that has left it out.
    train(tmp_path, max_steps=6, unchanged={"data": "a"})
    with pytest.raises(JobError, match=r"^Received seed=2; expected 1, with which"):
        train(tmp_path, max_steps=8, unchanged={"data": "a", "seed": 2})


def double_batches(start_step, end_step):
    return batches(2 * start_step, 2 * end_step).unbatch().batch(2 * BATCH)


def test_another_global_batch_is_refused(started):
    with pytest.raises(JobError, match=r"global batch of 8 samples .* expected 4"):
        train(started, local_batch_size=2 * BATCH, input_fn=double_batches)


def test_what_a_job_that_scales_its_batch_refuses(started, tmp_path):
    here = training.position(RunConfig(model_dir=str(started)), World())
    assert here == training.Position(step=10, sample=10 * BATCH, original_size=1)
    # It scales with the number of ranks only.
    with pytest.raises(JobError, match=r"global batch of 8 samples .* expected 4"):
        train(started, local_batch_size=8, input_fn=double_batches, scale_from=here)
    other = training.Position(step=9, sample=9 * BATCH, original_size=1)
    with pytest.raises(JobError, match=r"scale_from of step 9; expected 10"):
        train(started, scale_from=other)
    found = files(started).read(10)
    scaled = dataclasses.replace(found.header, sample=12 * BATCH)
    files(started).write(dataclasses.replace(found, header=scaled))
    with pytest.raises(JobError, match=r"step 10 after 48 samples; expected 40: .*Set"):
        train(started)
    new = training.position(RunConfig(), World())
    with pytest.raises(JobError, match="repeat and scale_from; expected one"):
        train(None, scale_from=new, repeat=True)
    accumulating = OPTIMIZERS["momentum, accumulation"]
    with pytest.raises(JobError, match=r"accumulates gradients .* expected none"):
        train(tmp_path / "new", scale_from=new, make_optimizer=accumulating)


def test_a_damaged_checkpoint_is_no_position(started):
    newest, before = files(started).steps()[:2]
    files(started).path(newest).write_bytes(b"")
    here = training.position(RunConfig(model_dir=str(started)), World())
    assert (here.step, here.sample) == (before, before * BATCH)


def header(**fields):
    required = {
        "local_batch_sizes": (BATCH,),
        "global_batch_size": BATCH,
        "sample": 0,
        "original_size": 1,
        "fit_epoch_steps": EPOCH_STEPS,
        "steps_per_execution": 1,
    }
    return Header(**required | fields)


def test_a_job_that_a_callback_has_ended_stays_ended_with_another_batch():
    # 21 steps of 8 samples are left of it: 42 of 4.
    start = Start(header=header(step=14, finished=35, global_batch_size=8))
    assert start.is_finished(56, global_batch_size=4)
    assert not start.is_finished(58, global_batch_size=4)
    assert not start.is_finished(36, global_batch_size=8)


@pytest.mark.long
def test_a_limit_of_time_stops_the_job_with_a_checkpoint(tmp_path):
    expected = uninterrupted()
    with pytest.raises(PreemptedError, match="Stopped at step") as caught:
        train(tmp_path, max_minutes=1e-9, save_every_steps=0)
    (step,) = files(tmp_path).steps()
    assert f"step {step} of 35" in str(caught.value)
    result = train(tmp_path)
    assert result.start_step == step
    assert_equal(result, expected)


@pytest.mark.release
def test_a_signal_stops_a_job_whose_input_is_slow(tmp_path):
    """Within an execution; the job that continues computes the same bits."""

    def input_fn(start, end, *, is_slow=True):
        def read(step):
            if is_slow:
                time.sleep(0.1)
                if step == 23:
                    os.kill(os.getpid(), signal.SIGUSR1)
            return np.int64(step)

        steps = tf.data.Dataset.range(start, end).map(
            lambda step: tf.numpy_function(read, [step], tf.int64)
        )
        pairs = tf.data.Dataset.zip(steps, batches(start, end))
        return pairs.map(lambda step, pair: pair)

    fast = functools.partial(input_fn, is_slow=False)
    options = {"max_steps": 60, "steps_per_execution": 20}
    expected = train(None, input_fn=fast, **options)
    with pytest.raises(PreemptedError, match="Stopped at step") as caught:
        train(tmp_path, input_fn=input_fn, save_every_steps=0, **options)
    (step,) = files(tmp_path).steps()
    assert f"Stopped at step {step} of 60 by SIGUSR1" in str(caught.value)
    # tf.data reads one batch ahead.
    assert 22 <= step <= 26
    assert_equal(train(tmp_path, input_fn=fast, **options), expected)


def test_evaluations_within_an_epoch_change_nothing():
    spec = EvalSpec(input_fn=lambda: batches(0, 5))
    assert_equal(uninterrupted(), train(None, evaluation=spec))


def test_a_part_of_the_test_set():
    spec = EvalSpec(input_fn=lambda: batches(0, 20), steps=3)
    result = train(None, max_steps=2, evaluation=spec)
    expected = result.model.evaluate(batches(0, 3), verbose=0, return_dict=True)
    assert result.test_metrics == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "value"), [("keep_max", 0), ("save_every_steps", -1), ("max_minutes", -1)]
)
def test_a_number_out_of_range(name, value):
    with pytest.raises(JobError, match=f"Received {name}={value}; expected"):
        RunConfig(**{name: value})


@pytest.mark.parametrize("value", [42.4, 40.0, math.nan, "40", None])
def test_a_number_that_is_no_integer(value):
    with pytest.raises(
        JobError, match=rf"max_steps={value}; expected 1 or more, an int"
    ):
        train(None, max_steps=value)


@pytest.mark.long
def test_numbers_of_numpy_are_integers(tmp_path):
    count = np.int64
    spec = EvalSpec(
        input_fn=lambda: batches(0, 20), steps=count(3), throttle_steps=count(2)
    )
    options = {"save_every_steps": count(2), "keep_max": count(2), "seed": count(3)}
    with pytest.raises(KilledError):
        train(tmp_path, max_steps=count(8), killed_after=7, evaluation=spec, **options)
    assert len(files(tmp_path).steps()) == 2
    result = train(tmp_path, max_steps=count(8), evaluation=spec, **options)
    assert 0 < result.start_step < 8
    assert_equal(result, train(None, max_steps=8, evaluation=spec, seed=3))


@pytest.mark.parametrize("path", ["no://bucket/run", pathlib.Path("no://bucket/run")])
def test_an_address_is_no_directory(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(model_dir=path)
    for use in (
        lambda: training.make_observers(io.StringIO(), model_dir=path),
        lambda: run_directory.prepare(path),
        lambda: training.position(config, World()),
    ):
        with pytest.raises(JobError, match=r"^Cannot open no://bucket/run"):
            use()
    assert not list(tmp_path.iterdir())


def test_the_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunConfig(model_dir="~/run").model_dir == str(tmp_path / "run")


def test_a_model_that_is_not_compiled():
    with pytest.raises(JobError, match=r"Received Sequential .* compiled Keras model"):
        training.train_and_evaluate(
            lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)]),
            TrainSpec(
                input_fn=batches, max_steps=1, pass_steps=1, local_batch_size=BATCH
            ),
            EvalSpec(input_fn=lambda: batches(0, 1)),
            world=World(),
        )


def test_a_training_that_has_diverged_keeps_its_last_good_checkpoints(started):
    before = files(started).steps()
    with pytest.raises(JobError, match=r"no longer finite|loss became"):
        train(
            started,
            max_steps=35,
            input_fn=lambda start, end: batches(start, end).map(
                lambda x, y: (x * np.inf, y)
            ),
        )
    assert files(started).steps() == before
    errors = json.loads((started / "errors/rank-0.json").read_text())
    assert errors["rank"] == 0
    assert "JobError" in errors["error"]
    assert "Traceback" in errors["traceback"]
    # The next run deletes it.
    train(started, max_steps=10)
    assert not list((started / "errors").iterdir())


def test_a_directory_in_use_is_refused(tmp_path):
    expected = pytest.raises(JobError, match=rf"in use .*process {os.getpid()} on")
    with run_directory.locked(tmp_path), expected:
        training.make_observers(io.StringIO(), model_dir=tmp_path)
        train(tmp_path)
    assert not list(tmp_path.rglob("events*"))
    train(tmp_path, max_steps=2)


def block_checkpoints(directory):
    """Return a callback that lets each save fail, after the checks at the start."""

    def block(logs=None):
        (directory / "checkpoints").rmdir()
        (directory / "checkpoints").touch()

    return keras.callbacks.LambdaCallback(on_train_begin=block)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_checkpoint_that_cannot_be_written(tmp_path, is_last):
    # A file takes the place of the directory until some steps before the last one.
    blocker = block_checkpoints(tmp_path)
    if is_last:
        with pytest.raises(JobError, match=r"Cannot write .*step-0"):
            train(tmp_path, callbacks=[blocker])
        return
    unblock = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: (
            (tmp_path / "checkpoints").unlink() if epoch == 1 else None
        )
    )
    result = train(tmp_path, callbacks=[blocker, unblock])
    assert files(tmp_path).steps()[0] == 35
    assert_equal(result, uninterrupted())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"input_fn": lambda start, end: None},
            "Received NoneType from TrainSpec.input_fn",
        ),
        (
            {"evaluation": EvalSpec(input_fn=lambda: None)},
            "Received NoneType from EvalSpec.input_fn",
        ),
        (
            {"input_fn": lambda start, end: batches(0, 0)},
            "Received no batch from input_fn",
        ),
        ({"local_batch_size": 5}, "Received a batch of 4 samples .*local_batch_size=5"),
        (
            {"evaluation": EvalSpec(input_fn=lambda: batches(0, 0)), "max_steps": 1},
            "Received no sample to evaluate",
        ),
        ({"max_steps": 0}, "Received max_steps=0; expected 1 or more"),
    ],
)
def test_an_input_that_cannot_be_used_is_one_line(options, reason):
    with pytest.raises(JobError, match=f"^{reason}"):
        train(None, **options)


def test_an_input_that_ends_early():
    with pytest.raises(JobError, match=r"^Received 23 batches .* steps 0 to 35; exp"):
        train(None, input_fn=lambda start, end: batches(start, min(end, 23)))


@pytest.mark.long
def test_an_input_that_starts_again_where_it_ends(tmp_path):
    def one_pass(start, end):
        del start, end
        return batches(0, 13)

    expected = train(
        None, input_fn=lambda start, end: batches(start, end, num_samples=13 * BATCH)
    )
    options = {"input_fn": one_pass, "repeat": True}
    with pytest.raises(KilledError):
        train(tmp_path, killed_after=20, **options)
    result = train(tmp_path, **options)
    assert 0 < result.start_step <= 20
    assert_equal(result, expected)


def shuffled(**options):
    pairs = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(400, **options)
    return pairs.repeat().batch(BATCH)


@pytest.mark.long
def test_a_seeded_shuffle_goes_on_where_it_was(tmp_path):
    def input_fn(start, end):
        return shuffled(seed=1).skip(start).take(end - start)

    expected = train(None, input_fn=input_fn)
    # Within an epoch, and through the next one.
    with pytest.raises(KilledError):
        train(tmp_path, killed_after=8, input_fn=input_fn)
    result = train(tmp_path, input_fn=input_fn)
    assert 0 < result.start_step < 10
    assert_equal(result, expected)


OUTSIDE = shuffled(seed=1)
NO_FUNCTIONS = {
    "no seed": (lambda start, end: shuffled().skip(start).take(end - start), False),
    "made outside": (lambda start, end: OUTSIDE.skip(start).take(end - start), False),
    "a pass without seed": (lambda start, end: shuffled().take(13), True),
}


@pytest.mark.parametrize("name", NO_FUNCTIONS)
def test_an_input_that_is_no_function_of_its_steps_is_refused(tmp_path, name):
    input_fn, repeat = NO_FUNCTIONS[name]
    options = {"input_fn": input_fn, "repeat": repeat, "max_steps": 2}
    with pytest.raises(JobError, match="two different batches of step 1 from two call"):
        train(tmp_path, **options)
    if name == "no seed":
        # Where there is nothing to continue from, it is free to do so.
        train(None, **options)


def test_an_input_that_ignores_its_steps_is_refused(tmp_path):
    with pytest.raises(JobError, match=r"batch of step 0 .* also .* steps from 1 on"):
        train(tmp_path, input_fn=lambda start, end: batches(0, 100))
    # One whose batches are all equal may be right.
    constant = batches(0, 1).repeat()
    train(tmp_path, input_fn=lambda start, end: constant, max_steps=2)


def test_changed_data_raise_a_warning(started):
    def others(start, end):
        return batches(start + 1, end + 1)

    with pytest.warns(UserWarning, match="The batch of step 0 differs from that of"):
        train(started, max_steps=12, input_fn=others)


def test_an_input_that_is_not_checked_may_change(tmp_path):
    options = {"input_fn": lambda start, end: shuffled().take(end - start)}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The batch of step 0 differs")
        for max_steps in (2, 4):
            train(tmp_path, max_steps=max_steps, check_input=False, **options)
        # Two replicas had other samples than one has now: of twice the batch, say.
        first = FirstBatch(step=0, digests=["a", "b"])
        before = header(step=0, local_batch_sizes=(2, 2), first_batch=first)
        now = FirstBatch(step=0, digests=["c", "d"])
        inputs.warn_if_changed(now, before, local_batch_sizes=(4, 4))
        with pytest.raises(UserWarning, match="differs"):
            inputs.warn_if_changed(now, before, local_batch_sizes=(2, 2))


def test_an_input_has_the_policy_of_the_main_thread(tmp_path):
    policies = []

    def input_fn(start, end):
        policies.append(keras.layers.Rescaling(2.0).compute_dtype)
        return batches(start, end)

    def make_model(optimizer, *, units):
        model = network(optimizer)
        keras.config.set_dtype_policy("mixed_bfloat16")
        return model

    before = keras.config.dtype_policy()
    try:
        train(tmp_path, make_model=make_model, max_steps=2, input_fn=input_fn)
    finally:
        keras.config.set_dtype_policy(before)
    assert set(policies) == {"bfloat16"}


@pytest.mark.release
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_first_batch_does_not_stay_in_memory(tmp_path, run_eagerly, monkeypatch):
    seen, kept = [], []

    def build(model, call, batch):
        seen.append(weakref.ref(batch[0]))
        fit_start.build(model, call, batch)

    monkeypatch.setattr(building, "fit_start", mock.Mock(build=build))

    def make_model(optimizer, *, units):
        model = keras.Sequential([keras.layers.Dense(2)])
        loss = unseeded(optimizer).loss
        model.compile(optimizer, loss, run_eagerly=run_eagerly)
        return model

    def optionals():
        gc.collect()
        return {id(each): each for each in gc.get_objects() if type(each) is kind}

    def look(batch, logs=None):
        # Those of earlier tests may be tensors of their graphs, which have no value.
        new = [each for key, each in optionals().items() if key not in before]
        kept.append([seen[0](), *[each for each in new if each.has_value()]])

    kind = type(tf.experimental.Optional.empty(tf.TensorSpec(())))
    before = optionals()
    look = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    train(tmp_path, make_model=make_model, max_steps=2, callbacks=[look])
    assert kept == [[None], [None]]


@pytest.mark.long
def test_a_test_set_without_end_is_refused_at_once():
    spec = EvalSpec(input_fn=lambda: batches(0, 20).repeat())
    with pytest.raises(
        JobError, match=r"^Received a dataset without end from EvalSpec"
    ):
        train(None, evaluation=spec, callbacks=[KillAfter(1)])
    spec = dataclasses.replace(spec, steps=3)
    train(None, evaluation=spec, max_steps=2)


@pytest.mark.long
@pytest.mark.parametrize("at", [35, 6])
def test_a_signal_stops_a_job_in_a_long_evaluation(tmp_path, at):
    """The job that continues evaluates there, also after the last step.

    If it is stopped in that evaluation, too, it is still due at this step.
    """
    read = []

    def slow():
        def note(step):
            read.append(step)
            if len(read) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            return np.int64(step)

        steps = tf.data.Dataset.range(200).map(
            lambda step: tf.numpy_function(note, [step], tf.int64)
        )
        return tf.data.Dataset.zip(steps, batches(0, 200)).map(lambda step, pair: pair)

    def spec(input_fn):
        return EvalSpec(input_fn=input_fn, throttle_steps=at)

    options = {"steps_per_execution": 5, "save_every_steps": 0}
    fast = spec(lambda: batches(0, 200))
    expected = train(tmp_path / "whole", evaluation=fast, **options)
    parts = tmp_path / "parts"
    for _ in range(2):
        read.clear()
        with pytest.raises(PreemptedError, match=f"step {at} of 35 by SIGTERM"):
            train(parts, evaluation=spec(slow), **options)
        assert 3 <= len(read) < 100
    with pytest.raises(PreemptedError, match=f"step {at} of 35 by max_minutes=1e-09"):
        train(parts, evaluation=fast, max_minutes=1e-9, **options)
    assert_equal(train(parts, evaluation=fast, **options), expected)
    if at < 35:
        newest = [files(tmp_path / name).read(35) for name in ("whole", "parts")]
        evaluations = [each.header.evaluations for each in newest]
        assert evaluations[0] == evaluations[1]


def test_a_job_that_is_shortened_evaluates_what_it_has(tmp_path):
    spec = EvalSpec(input_fn=lambda: batches(0, 20))
    with pytest.raises(KilledError):
        train(tmp_path, killed_after=9, save_every_steps=4, evaluation=spec)
    with pytest.warns(UserWarning, match="beyond max_steps=1: nothing is trained"):
        result = train(tmp_path, max_steps=1, evaluation=spec)
    assert result.step == result.start_step > 1
    expected = result.model.evaluate(batches(0, 20), verbose=0, return_dict=True)
    assert result.test_metrics == pytest.approx(expected)


def test_a_metric_that_is_not_a_number_is_kept(tmp_path):
    files(tmp_path).write(
        Checkpoint(header=header(step=1, history={"f1": [math.nan]}), arrays={})
    )
    assert math.isnan(files(tmp_path).read(1).header.history["f1"][0])


def test_a_failed_checkpoint_stops_the_job_where_this_is_asked_for(tmp_path):
    options = {"callbacks": [block_checkpoints(tmp_path)], "save_every_steps": 1}
    with pytest.raises(JobError, match=r"Cannot write .*step-0") as caught:
        train(tmp_path, stop_on_failed_save=True, max_steps=2000, **options)
    step = int(re.search(r"step-0*(\d+)", str(caught.value))[1])
    assert step < 2000


def test_the_seed_is_that_of_the_run():
    weights = [
        train(None, seed=seed, make_model=unseeded, max_steps=2).model.get_weights()
        for seed in (3, 3, 4)
    ]
    np.testing.assert_array_equal(weights[0][0], weights[1][0])
    assert (weights[0][0] != weights[2][0]).any()


class StopAfter(keras.callbacks.Callback):
    """Ends the training after a number of steps of the job."""

    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) >= self._steps:
            self.model.stop_training = True


@pytest.mark.long
@pytest.mark.parametrize("steps", [14, 18])
def test_a_callback_ends_the_job_where_it_ends_the_uninterrupted_one(tmp_path, steps):
    spec = EvalSpec(input_fn=lambda: batches(0, 20))
    expected = train(None, callbacks=[StopAfter(steps)], evaluation=spec)
    with pytest.raises(KilledError):
        train(tmp_path, callbacks=[StopAfter(steps)], evaluation=spec, killed_after=12)
    result = train(tmp_path, callbacks=[StopAfter(steps)], evaluation=spec)
    assert int(result.model.optimizer.iterations) == steps
    assert_equal(result, expected)
    # The job is finished: nothing is trained.
    again = train(tmp_path, callbacks=[KillAfter(1)], evaluation=spec)
    assert again.start_step == steps
    assert_equal(again, expected)


@pytest.mark.long
def test_a_scheduler_that_acts_at_the_start_of_an_epoch_acts_once(tmp_path):
    def scheduler():
        return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)

    expected = train(None, callbacks=[scheduler()])
    kill = KillAfter(14, lambda: files(tmp_path).steps()[0] > 10)
    with pytest.raises(KilledError):
        train(tmp_path, callbacks=[scheduler(), kill])
    result = train(tmp_path, callbacks=[scheduler()])
    assert result.start_step > 10
    assert_equal(result, expected)


def two_outputs(optimizer, *, units):
    x = keras.Input((6,))
    hidden = keras.layers.Dense(units)(x)
    heads = [keras.layers.Dense(2, name=name)(hidden) for name in ("a", "b")]
    model = keras.Model(x, heads)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    scores = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    model.compile(optimizer, loss=[loss, loss], metrics=[scores, scores])
    return model


@pytest.mark.long
def test_a_model_with_several_losses(tmp_path):
    def pairs(start, end):
        return batches(start, end).map(lambda x, y: (x, (y, 1 - y)))

    options = {
        "make_model": two_outputs,
        "input_fn": pairs,
        "evaluation": EvalSpec(input_fn=lambda: pairs(0, 20)),
        "seed": 1,
    }
    expected = train(None, **options)
    with pytest.raises(KilledError):
        train(tmp_path, killed_after=7, **options)
    assert_equal(train(tmp_path, **options), expected)


def test_a_metric_whose_result_is_an_array(tmp_path):
    def one_hot(start, end):
        return batches(start, end).map(lambda x, y: (x, tf.one_hot(y, 2)))

    def make_model(optimizer, *, units):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, "softmax")])
        score = keras.metrics.F1Score(average=None, name="f1")
        model.compile(optimizer, "categorical_crossentropy", metrics=[score])
        return model

    result = train(
        tmp_path,
        make_model=make_model,
        input_fn=one_hot,
        evaluation=EvalSpec(input_fn=lambda: one_hot(0, 20)),
        max_steps=2,
    )
    assert np.shape(result.test_metrics["f1"]) == (2,)
    assert list(result.train_metrics) == ["loss"]


def test_an_input_without_end():
    result = train(
        None, max_steps=4, input_fn=lambda start, end: batches(start, end).repeat()
    )
    assert int(result.model.optimizer.iterations) == 4


@pytest.mark.long
def test_a_longer_job_keeps_the_epochs_of_the_one_that_it_continues(tmp_path):
    train(tmp_path, max_steps=35)
    result = train(tmp_path, max_steps=40)
    # 4 epochs of 10 steps, the last one of 5 at first: it is completed.
    assert len(result.history["loss"]) == 4
    assert result.history == train(None, max_steps=40).history
