"""Training on one rank: exact numbers of steps, and what plain Keras computes."""

import dataclasses
import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from toy import BATCH, batches

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import JobError, World
from hvdtrain.keras import metrics
from hvdtrain.native import recorder as flight_recorder
from hvdtrain.training import EvalSpec, RunConfig, TrainSpec, evaluation, progress


@pytest.fixture(autouse=True)
def _horovod(monkeypatch):
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    hvd.init()


class Recorder:
    def __init__(self):
        self.starts = []
        self.progress = []
        self.evaluations = []
        self.checkpoints = []

    def on_start(self, start):
        self.starts.append(start)

    def on_progress(self, progress):
        self.progress.append(progress)

    def on_checkpoint(self, step, text):
        self.checkpoints.append(step)

    def on_evaluation(self, step, metrics):
        self.evaluations.append((step, metrics))


def model(*, learning_rate=0.1):
    keras.utils.set_random_seed(1)
    network = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    )
    network.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(learning_rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return network


def train(
    max_steps,
    *,
    pass_steps=100,
    model_fn=model,
    every_epochs=0,
    model_dir=None,
    more_observers=(),
    **options,
):
    recorder = Recorder()
    result = training.train_and_evaluate(
        model_fn,
        TrainSpec(
            input_fn=batches,
            max_steps=max_steps,
            pass_steps=pass_steps,
            local_batch_size=BATCH,
            **options,
        ),
        EvalSpec(input_fn=lambda: batches(0, 10), every_epochs=every_epochs),
        RunConfig(model_dir=model_dir and str(model_dir)),
        world=World(),
        observers=[recorder, *more_observers],
    )
    return result, recorder


@pytest.mark.parametrize(
    ("max_steps", "pass_steps", "steps_per_execution"),
    [(1, 100, 1), (7, 3, 3), (20, 7, 20), (23, 100, 5), (101, 25, 20)],
)
def test_number_of_steps_is_exact(max_steps, pass_steps, steps_per_execution):
    result, recorder = train(
        max_steps, pass_steps=pass_steps, steps_per_execution=steps_per_execution
    )
    assert int(result.model.optimizer.iterations) == max_steps
    assert recorder.progress[-1].step == max_steps
    assert recorder.progress[-1].seconds_left == 0
    assert recorder.evaluations[-1][0] == max_steps


def test_result_is_that_of_plain_keras():
    plain = model()
    history = plain.fit(batches(0, 25), verbose=0).history
    loss, accuracy = plain.evaluate(batches(0, 10), verbose=0)
    result, recorder = train(25, pass_steps=25, steps_per_execution=10)
    for mine, theirs in zip(
        result.model.get_weights(), plain.get_weights(), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert result.train_metrics["loss"] == pytest.approx(history["loss"][0], rel=1e-6)
    assert result.test_metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert result.test_metrics["accuracy"] == pytest.approx(accuracy, rel=1e-6)
    assert recorder.evaluations == [(25, result.test_metrics)]
    (start,) = recorder.starts
    assert dataclasses.astuple(start)[:4] == (0, 25, 1, BATCH)
    assert start.process_seconds > 0


SEQUENCES = np.random.RandomState(0).normal(size=(16, 5, 3)).astype("float32")


class Calls(keras.layers.Layer):
    """Counts its calls in a weight and in a variable that Keras does not list."""

    def build(self, shape):
        self.weight = self.add_weight(initializer="zeros", trainable=False)
        self.variable = tf.Variable(0.0)

    def call(self, x):
        self.weight.assign_add(1.0)
        self.variable.assign_add(1.0)
        return x


class Stateful(keras.Model):
    """Is not built before its first call."""

    def __init__(self, **options):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.calls, self.drop = Calls(), keras.layers.Dropout(0.5)
        self.recurrent = keras.layers.SimpleRNN(4, stateful=True)
        self.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), **options)

    def call(self, x, training=False):
        return self.recurrent(self.drop(self.calls(x), training=training))

    @property
    def state(self):
        numbers = [self.calls.variable, *self.recurrent.states, *self.variables]
        return [number.numpy() for number in numbers]


def sequences(start_step, end_step):
    x = SEQUENCES[np.arange(start_step * BATCH, end_step * BATCH) % 16]
    pairs = tf.data.Dataset.from_tensor_slices((x, x.sum(1) @ np.ones((3, 4), "f")))
    return pairs.batch(BATCH, drop_remainder=True)


class NotTraceable(keras.losses.Loss):
    def call(self, y, predictions):
        assert float(keras.ops.sum(y)) == float(y.numpy().sum())
        return keras.ops.mean((y - predictions) ** 2, axis=-1)


@pytest.mark.parametrize(
    "run_eagerly", [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_building_a_model_changes_no_state(run_eagerly):
    def make():
        return Stateful(loss="mse", run_eagerly=run_eagerly)

    plain, drop_in = make(), make()
    plain.fit(sequences(0, 4), verbose=0)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    drop_in.fit(sequences(0, 4), callbacks=[broadcast], verbose=0)
    result = training.train_and_evaluate(
        make,
        TrainSpec(
            input_fn=sequences, max_steps=4, pass_steps=4, local_batch_size=BATCH
        ),
        EvalSpec(input_fn=None),
        world=World(),
    )
    assert plain.state[0] == 4
    for model in (drop_in, result.model):
        for found, wanted in zip(model.state, plain.state, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_model_that_cannot_be_traced_is_called():
    result, _ = train(2, model_fn=functools.partial(eager, NotTraceable()))
    assert int(result.model.optimizer.iterations) == 2


def eager(loss):
    network = keras.Sequential([keras.layers.Dense(1)])
    network.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
    return network


def test_evaluates_every_so_many_epochs_and_at_the_end():
    seen = keras.callbacks.History()
    _, recorder = train(
        50,
        pass_steps=10,
        every_epochs=2,
        steps_per_execution=1,
        callbacks=lambda plan: [seen],
    )
    assert [step for step, _ in recorder.evaluations] == [20, 40, 50]
    # Callbacks see the test metrics of epochs with an evaluation.
    assert len(seen.history["loss"]) == 5
    assert seen.history["val_loss"] == [m["loss"] for _, m in recorder.evaluations]


def test_callbacks_see_test_metrics_as_in_plain_keras():
    def callbacks():
        plateau = keras.callbacks.ReduceLROnPlateau(
            monitor="val_loss", factor=0.5, patience=1, min_delta=0.03
        )
        stopping = keras.callbacks.EarlyStopping(
            monitor="val_loss", patience=3, min_delta=0.03
        )
        return [plateau, stopping, keras.callbacks.History()]

    plain, expected = model(), callbacks()
    plain.fit(
        batches(0, 200),
        steps_per_epoch=10,
        epochs=20,
        validation_data=batches(0, 10),
        callbacks=expected,
        verbose=0,
    )
    found = callbacks()
    result, recorder = train(
        200, pass_steps=10, every_epochs=1, callbacks=lambda plan: found
    )
    history, wanted = (each[-1].history for each in (found, expected))
    assert 4 < len(wanted["loss"]) < 20
    assert history == {k: pytest.approx(v, rel=1e-6) for k, v in wanted.items()}
    assert [each["val_loss"] for each in [history]] == [
        [metrics["loss"] for _, metrics in recorder.evaluations]
    ]
    # The history of the job is that of training metrics.
    assert result.history.keys() == {"loss", "accuracy", "learning_rate"}


class Evaluated(keras.callbacks.Callback):
    """Notes the calls of an evaluation and their logs."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_test_begin(self, logs=None):
        self.calls.append(("begin", self.params["epochs"], {**logs}))

    def on_test_batch_begin(self, batch, logs=None):
        self.calls.append(("batch begins", batch, {**logs}))

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(("batch ends", batch, {k: float(v) for k, v in logs.items()}))

    def on_test_end(self, logs=None):
        self.calls.append(("end", None, {k: float(v) for k, v in logs.items()}))


@pytest.mark.parametrize("use_ema", [False, True])
def test_an_evaluation_copies_weights_that_averages_replace(use_ema):
    network = model()
    optimizer = keras.optimizers.SGD(0.1, use_ema=use_ema)
    network.compile(hvd.DistributedOptimizer(optimizer), "mse")
    network.optimizer.build(network.trainable_variables)
    copy = mock.patch.object(metrics, "local_states", wraps=metrics.local_states)
    with copy as copied, evaluation.evaluated_weights(network, steps=0):
        kernel = network.trainable_variables[0]
    variables = copied.call_args_list[0].args[0]
    assert any(variable is kernel for variable in variables) == use_ema


def test_evaluations_are_no_end_of_a_fit(tmp_path, monkeypatch):
    ends = mock.Mock(wraps=flight_recorder.end_fit)
    monkeypatch.setattr(flight_recorder, "end_fit", ends)
    for starts in (1, 2):
        _, recorder = train(20, pass_steps=10, every_epochs=1, model_dir=tmp_path)
        assert len(recorder.evaluations) == (2 if starts == 1 else 0)
        # The second job finds a training that is finished.
        assert ends.call_count == 1


class Regularized(keras.Model):
    """Has a loss of its activity, and notes its losses when the training begins."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2, activity_regularizer="l2")
        self.compile(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )

    def call(self, x):
        return self.dense(x)


class Losses(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.found = [float(loss) for loss in self.model.losses]


def test_a_model_has_no_losses_before_its_first_step(tmp_path):
    losses = Losses()
    for steps in (1, 2):
        train(
            steps,
            model_fn=Regularized,
            model_dir=tmp_path,
            callbacks=lambda plan: [losses],
        )
        assert losses.found == []


def test_callbacks_are_called_in_evaluations_as_in_plain_keras():
    expected, found = Evaluated(), Evaluated()
    model().fit(
        batches(0, 20),
        steps_per_epoch=10,
        epochs=2,
        validation_data=batches(0, 2),
        callbacks=[expected],
        verbose=0,
    )
    training.train_and_evaluate(
        model,
        TrainSpec(
            input_fn=batches,
            max_steps=20,
            pass_steps=10,
            local_batch_size=BATCH,
            callbacks=lambda plan: (each for each in [found]),
        ),
        EvalSpec(input_fn=lambda: batches(0, 2), every_epochs=1),
        world=World(),
    )
    assert len(expected.calls) == 12
    for (name, number, logs), wanted in zip(found.calls, expected.calls, strict=True):
        assert (name, number) == wanted[:2]
        assert logs == pytest.approx(wanted[2], rel=1e-6)


def test_bfloat16_as_the_default_dtype(tmp_path):
    keras.config.set_floatx("bfloat16")
    try:
        expected, _ = train(20, pass_steps=10)
        for max_steps in (10, 20):
            result, _ = train(max_steps, pass_steps=10, model_dir=tmp_path)
    finally:
        keras.config.set_floatx("float32")
    assert result.start_step == 10
    assert result.history == expected.history
    assert {type(loss) for loss in result.history["loss"]} == {float}


class FailingObserver:
    """Has one of the methods."""

    def on_evaluation(self, step, metrics):
        raise KeyError("a bug on purpose")


@pytest.mark.long
def test_an_observer_of_few_methods_does_not_cost_the_last_checkpoint(tmp_path):
    def run(*observers):
        return train(40, pass_steps=20, model_dir=tmp_path, more_observers=observers)[0]

    with pytest.raises(KeyError, match="a bug on purpose"):
        run(FailingObserver())
    result = run()
    assert result.start_step == 40
    expected, _ = train(40, pass_steps=20)
    assert result.history == expected.history
    assert result.test_metrics == expected.test_metrics


def test_epochs_are_passes_and_evaluations_are_on_their_steps():
    """Also where executions are no divisors of a pass, or of these steps."""
    plain = model()
    history = plain.fit(
        batches(0, 100), steps_per_epoch=24, epochs=5, verbose=0
    ).history
    recorder = Recorder()
    result = training.train_and_evaluate(
        model,
        TrainSpec(
            input_fn=batches, max_steps=100, pass_steps=24, local_batch_size=BATCH
        ),
        EvalSpec(input_fn=lambda: batches(0, 10), every_epochs=2, throttle_steps=30),
        world=World(),
        observers=[recorder],
    )
    assert result.history == {k: pytest.approx(v, rel=1e-5) for k, v in history.items()}
    found = [step for step, _ in recorder.evaluations]
    assert found == [30, 48, 60, 90, 96, 100]


def test_callbacks_are_called_once_in_an_execution():
    calls = []
    recorder = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: calls.append(batch),
        on_train_batch_end=lambda batch, logs: calls.append(batch),
    )
    train(13, pass_steps=8, steps_per_execution=5, callbacks=lambda plan: [recorder])
    assert calls == [0, 4, 5, 7, 0, 4]


def test_broken_loss_ends_the_job():
    with pytest.raises(JobError, match="loss became nan"):
        train(100, model_fn=lambda: model(learning_rate=1e30), steps_per_execution=5)


def test_speed_and_time():
    result, _ = train(40, steps_per_execution=1)
    assert result.train_seconds > 0
    assert result.samples_per_second > 40 * BATCH / result.train_seconds


class Autoencoder(keras.Model):
    """A `train_step` of the user's own, without a compiled loss and without `call`."""

    def __init__(self, loss_name):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.coder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
        self.tracker = keras.metrics.Mean(name=loss_name)
        self.compile(keras.optimizers.SGD(0.1))

    @property
    def metrics(self):
        return [self.tracker]

    def reconstruct(self, data):
        loss = keras.ops.mean((self.coder(data[0]) - data[0]) ** 2)
        self.tracker.update_state(loss)
        return loss

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.reconstruct(data)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {self.tracker.name: self.tracker.result()}

    def test_step(self, data):
        self.reconstruct(data)
        return {self.tracker.name: self.tracker.result()}


@pytest.mark.parametrize(
    "loss_name", ["distance", pytest.param("loss", marks=pytest.mark.long)]
)
def test_a_train_step_without_a_compiled_loss(tmp_path, loss_name):
    expected = Autoencoder(loss_name)
    expected.fit(batches(0, 12), shuffle=False, verbose=0)
    for max_steps in (5, 12):
        result, recorder = train(
            max_steps, model_fn=lambda: Autoencoder(loss_name), model_dir=tmp_path
        )
    assert result.start_step == 5
    assert {*recorder.progress[-1].metrics} == {loss_name} == {*result.test_metrics}
    for found, wanted in zip(result.model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_model_that_is_compiled_again_has_its_new_metrics():
    network = model()
    train(25, model_fn=lambda: network, steps_per_execution=5)
    top = keras.metrics.SparseTopKCategoricalAccuracy(1, name="top")
    network.compile(network.optimizer, network.loss, metrics=[top])
    result, _ = train(25, model_fn=lambda: network, steps_per_execution=5)
    expected = network.evaluate(batches(0, 10), verbose=0, return_dict=True)
    assert result.test_metrics == pytest.approx(expected)


@pytest.mark.parametrize("makes_function", [False, True])
def test_a_callback_that_compiles_the_model_is_refused(makes_function):
    def compile_again(*_, **__):
        hook.model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
        if makes_function:
            hook.model.make_train_function()

    hook = keras.callbacks.LambdaCallback(on_train_batch_end=compile_again)
    with pytest.raises(JobError, match="a callback has compiled again"):
        train(20, steps_per_execution=5, callbacks=lambda plan: [hook])


def test_a_warmup_by_executions_reaches_the_rate(monkeypatch):
    monkeypatch.setattr("hvdtrain.keras.callbacks.learning_rate.hvd.size", lambda: 4)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=1)
    rates = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(
            float(warmup.model.optimizer.learning_rate.numpy())
        )
    )
    train(
        16, pass_steps=8, steps_per_execution=3, callbacks=lambda plan: [warmup, note]
    )
    # 0.8 / 4 * (1 + 3 * s / 8) for the executions that end at s = 3, 6, 8.
    np.testing.assert_allclose(rates, [0.425, 0.65, 0.8, 0.8, 0.8, 0.8], rtol=1e-6)


class Counter(Autoencoder):
    """Its only metric is a number of steps, which is always finite."""

    def reconstruct(self, data):
        loss = keras.ops.mean((self.coder(data[0]) - data[0]) ** 2)
        self.tracker.update_state(1.0)
        return loss


@pytest.mark.parametrize("kind", [Autoencoder, Counter])
def test_the_weights_are_checked_without_a_loss(kind):
    def diverging():
        network = kind("distance")
        network.compile(keras.optimizers.SGD(1e30))
        return network

    with pytest.raises(JobError, match="finite"):
        train(12, model_fn=diverging)


def test_weights_are_not_read_for_reports_of_finite_metrics(monkeypatch):
    check = mock.Mock(wraps=progress.check_finite)
    monkeypatch.setattr(progress, "check_finite", check)
    _, recorder = train(12, model_fn=lambda: Autoencoder("distance"))
    assert len(recorder.progress) > 1
    # At the end of the only epoch.
    assert [call.args[2] for call in check.call_args_list] == [12]
