"""Learning rates of the callbacks: hand-computed, resumed, and with momentum."""

import gc
import weakref

import keras
import numpy as np
import pytest

from hvdtrain.keras import callbacks
from hvdtrain.keras.callbacks.learning_rate import set_learning_rate

STEPS = 4
INPUTS = np.array([[1.0], [2.0], [-1.0], [0.5]], "float32")
TARGETS = np.array([[2.0], [1.0], [0.0], [-1.0]], "float32")


class RateRecorder(keras.callbacks.Callback):
    """Notes the learning rate of every batch that Keras reports."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))


@pytest.fixture
def four_ranks(monkeypatch):
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 4)
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: 0)


def linear_model(optimizer, **compile_args):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.array([[0.5]], "float32")])
    model.compile(optimizer, "mse", **compile_args)
    return model


def fit(model, callback, epochs=3, **fit_args):
    recorder = RateRecorder()
    history = model.fit(
        INPUTS,
        TARGETS,
        batch_size=1,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[callback, recorder],
        **fit_args,
    )
    return recorder.rates, history.history


def rates_of(callback, compile_args=None, **fit_args):
    # Eagerly: a step of this model takes less time than its tracing.
    compile_args = compile_args or {"run_eagerly": True}
    model = linear_model(keras.optimizers.SGD(0.5), **compile_args)
    return fit(model, callback, **fit_args)[0]


@pytest.mark.usefixtures("four_ranks")
def test_warmup_rises_linearly_to_the_exact_rate():
    rates = rates_of(callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2))
    # 0.8 / 4 * (1 + 3 * s / 8) for steps s = 1 ... 8
    expected = [0.275, 0.35, 0.425, 0.5, 0.575, 0.65, 0.725, 0.8] + 4 * [0.8]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert rates[7:] == 5 * [float(np.float32(0.8))]


@pytest.mark.usefixtures("four_ranks")
def test_warmup_rises_to_the_rate_of_the_optimizer():
    rates = rates_of(callbacks.LearningRateWarmupCallback(warmup_epochs=1), epochs=2)
    # 0.5 / 4 * (1 + 3 * s / 4) for steps s = 1 ... 4
    np.testing.assert_allclose(rates, [0.21875, 0.3125, 0.40625, 0.5] + 4 * [0.5])


@pytest.mark.usefixtures("four_ranks")
def test_warmup_keeps_the_rate_of_the_first_fit():
    model = linear_model(keras.optimizers.SGD(0.5))
    warmup = callbacks.LearningRateWarmupCallback(warmup_epochs=2)
    first, _ = fit(model, warmup, epochs=1)
    second, _ = fit(model, warmup, epochs=2, initial_epoch=1)
    expected = 0.125 * (1 + 3 * np.arange(1, 9) / 8)
    np.testing.assert_allclose(first + second, expected, rtol=1e-6)


@pytest.mark.usefixtures("four_ranks")
def test_warmup_of_half_an_epoch():
    rates = rates_of(
        callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=0.5), epochs=1
    )
    np.testing.assert_allclose(rates, [0.5, 0.8, 0.8, 0.8], rtol=1e-6)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("steps_per_execution", [2, 3, 7])
def test_warmup_by_executions_ends_with_the_exact_rate(steps_per_execution):
    rates = rates_of(
        callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2),
        compile_args={"steps_per_execution": steps_per_execution},
        epochs=2,
    )
    ends = [
        min(start + steps_per_execution, STEPS) + STEPS * epoch
        for epoch in range(2)
        for start in range(0, STEPS, steps_per_execution)
    ]
    expected = [0.2 * (1 + 3 * end / 8) for end in ends]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert rates[-1] == float(np.float32(0.8))


def test_warmup_of_one_rank_is_constant(monkeypatch):
    monkeypatch.setattr("horovod.tensorflow.size", lambda: 1)
    rates = rates_of(callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2))
    assert rates == 12 * [float(np.float32(0.8))]


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(("start", "end"), [(1, 3), (4, 5)])
def test_resumed_warmup_has_the_rates_of_the_uninterrupted_run(start, end):
    def warmup():
        return callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=5)

    whole = rates_of(warmup(), epochs=5)
    resumed = rates_of(warmup(), initial_epoch=start, epochs=end)
    assert resumed == whole[start * STEPS : end * STEPS]


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(("verbose", "rank", "says"), [(1, 0, 1), (0, 0, 0), (1, 1, 0)])
def test_rank_0_says_when_the_warmup_is_over(verbose, rank, says, monkeypatch, capsys):
    monkeypatch.setattr("horovod.tensorflow.rank", lambda: rank)
    rates_of(
        callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2, verbose=verbose)
    )
    line = "Epoch 2: finished gradual learning rate warmup to 0.8."
    assert capsys.readouterr().out.count(line) == says


def test_staircase_changes_once_an_epoch():
    rates = rates_of(callbacks.LearningRateScheduleCallback(0.8, 0.5))
    np.testing.assert_allclose(rates, 4 * [0.8] + 4 * [0.4] + 4 * [0.2], rtol=1e-6)


def test_constant_multiplier_decays_from_its_start_epoch():
    rates = rates_of(
        callbacks.LearningRateScheduleCallback(0.8, 0.5, start_epoch=1, end_epoch=2)
    )
    np.testing.assert_allclose(rates, 4 * [0.5] + 8 * [0.8], rtol=1e-6)


def test_smooth_schedule_asks_for_every_batch():
    rates = rates_of(
        callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 1 + epoch, staircase=False
        ),
        epochs=2,
    )
    np.testing.assert_allclose(rates, 0.1 * (1 + np.arange(8) / 4), rtol=1e-6)


def test_epoch_logs_hold_the_rate():
    model = linear_model(keras.optimizers.SGD(0.5))
    _, history = fit(model, callbacks.LearningRateScheduleCallback(0.8, 0.5), epochs=2)
    np.testing.assert_allclose(history["lr"], [0.8, 0.4], rtol=1e-6)


@pytest.mark.usefixtures("four_ranks")
def test_resumed_training_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    def train(model, **fit_args):
        fit(model, callbacks.LearningRateWarmupCallback(0.1, 3), **fit_args)
        return model

    def new_model():
        return linear_model(keras.optimizers.SGD(0.1, momentum=0.9))

    whole = train(new_model(), epochs=3)
    train(new_model(), epochs=1).save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    train(resumed, initial_epoch=1, epochs=3)
    assert resumed.get_weights() == whole.get_weights()


def rate_of_step(step):
    return 0.01 * (1 + step)


def goyal_sgd(steps, momentum, nesterov):
    """The form of the paper, with lr outside: u = m u + g, w -= lr u."""
    w, u = 0.5, 0.0
    for step in range(steps):
        x, y = INPUTS[step % STEPS, 0], TARGETS[step % STEPS, 0]
        gradient = 2 * x * (w * x - y)
        u = momentum * u + gradient
        direction = momentum * u + gradient if nesterov else u
        w -= rate_of_step(step) * direction
    return w


def goyal_rmsprop(steps, momentum):
    w, u, square = 0.5, 0.0, 0.0
    for step in range(steps):
        x, y = INPUTS[step % STEPS, 0], TARGETS[step % STEPS, 0]
        gradient = 2 * x * (w * x - y)
        square = 0.9 * square + 0.1 * gradient**2
        u = momentum * u + gradient / np.sqrt(square + 1e-7)
        w -= rate_of_step(step) * u
    return w


def trained_weight(optimizer, correction=True, **compile_args):
    model = linear_model(optimizer, **compile_args)
    callback = callbacks.LearningRateScheduleCallback(
        0.01,
        lambda epoch: 1 + epoch * STEPS,
        staircase=False,
        momentum_correction=correction,
    )
    fit(model, callback)
    return float(model.get_weights()[0][0, 0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_of_sgd(nesterov):
    def sgd():
        return keras.optimizers.SGD(0.01, momentum=0.9, nesterov=nesterov)

    expected = goyal_sgd(12, 0.9, nesterov)
    assert trained_weight(sgd()) == pytest.approx(expected, abs=2e-6)
    assert abs(trained_weight(sgd(), correction=False) - expected) > 1e-3


def test_momentum_correction_inside_a_loss_scale_optimizer():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=8.0
    )
    expected = goyal_sgd(12, 0.9, nesterov=False)
    assert trained_weight(optimizer) == pytest.approx(expected, abs=2e-6)


def test_momentum_correction_of_rmsprop():
    optimizer = keras.optimizers.RMSprop(0.01, rho=0.9, momentum=0.9)
    assert trained_weight(optimizer) == pytest.approx(goyal_rmsprop(12, 0.9), abs=2e-6)


def test_optimizers_without_such_a_velocity_are_left_alone():
    assert trained_weight(keras.optimizers.Adam(0.01)) == trained_weight(
        keras.optimizers.Adam(0.01), correction=False
    )


def test_a_rate_of_zero_does_not_spoil_the_velocity():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = linear_model(optimizer)
    model.fit(INPUTS, TARGETS, verbose=0)
    for rate in (0.0, 0.1):
        set_learning_rate(optimizer, rate)
    assert np.isfinite(optimizer.momentums[0].numpy()).all()


def optimizer_with_velocities(*values, dtype="float32"):
    optimizer = keras.optimizers.SGD(0.3, momentum=0.9)
    optimizer.build([keras.Variable([0.0], dtype=dtype) for _ in values])
    for velocity, value in zip(optimizer.momentums, values, strict=True):
        velocity.assign([value])
    return optimizer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_velocities_are_multiplied_by_the_ratio_of_the_stored_rates(dtype):
    optimizer = optimizer_with_velocities(0.7, -1.3, dtype=dtype)
    old = [velocity.numpy() for velocity in optimizer.momentums]
    set_learning_rate(optimizer, 0.1)
    rate = optimizer.learning_rate.numpy()
    factor = old[0].dtype.type(float(rate) / float(np.float32(0.3)))
    assert rate == np.float32(0.1)
    for before, velocity in zip(old, optimizer.momentums, strict=True):
        np.testing.assert_array_equal(velocity.numpy(), before * factor, strict=True)


def test_each_optimizer_has_its_own_correction():
    optimizers = [optimizer_with_velocities(1.0), optimizer_with_velocities(1.0, 2.0)]
    for optimizer in optimizers:
        set_learning_rate(optimizer, 0.6)
    set_learning_rate(optimizers[0], 1.2)
    velocities = [[float(v[0]) for v in opt.momentums] for opt in optimizers]
    np.testing.assert_allclose(velocities[0], [4.0], rtol=1e-6)
    np.testing.assert_allclose(velocities[1], [2.0, 4.0], rtol=1e-6)


def test_the_rate_that_the_optimizer_has_changes_nothing():
    optimizer = optimizer_with_velocities(1.0)
    optimizer.learning_rate = 0.6  # by someone else: no correction
    set_learning_rate(optimizer, 0.6)
    assert optimizer.momentums[0].numpy() == [1.0]


def test_an_optimizer_is_freed_after_a_correction():
    optimizer = optimizer_with_velocities(1.0)
    set_learning_rate(optimizer, 0.1)
    reference = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert reference() is None


def test_unknown_number_of_steps_is_an_error():
    def batches():
        yield INPUTS, TARGETS

    callback = callbacks.LearningRateWarmupCallback(0.8)
    model = linear_model(keras.optimizers.SGD(0.5))
    with pytest.raises(ValueError, match="Pass steps_per_epoch"):
        model.fit(batches(), verbose=0, callbacks=[callback])


def test_a_schedule_in_the_optimizer_is_an_error():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    callback = callbacks.LearningRateScheduleCallback(0.8, 0.5)
    model = linear_model(keras.optimizers.SGD(schedule))
    with pytest.raises(ValueError, match="Create the optimizer with a number"):
        model.fit(INPUTS, TARGETS, verbose=0, callbacks=[callback])


def test_a_missing_initial_rate_is_an_error():
    with pytest.raises(ValueError, match="initial_lr"):
        callbacks.LearningRateScheduleCallback(None, 0.5)
