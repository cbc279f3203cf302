"""Callbacks of a job that is killed act as those of the uninterrupted job."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
import toy

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import World
from hvdtrain.training.callback_states import CallbackStates
from hvdtrain.training.checkpoint.storage import CheckpointFiles

EPOCH_STEPS, MAX_STEPS = 10, 45


@pytest.fixture(autouse=True, scope="module")
def _horovod():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CONTROLLER", "gloo")
        patch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
        hvd.init()


class KilledError(Exception):
    """Ends a job without a chance to save."""


class Kill(keras.callbacks.Callback):
    """Ends the job in a later step than this one, of which there is a checkpoint."""

    def __init__(self, directory, step):
        super().__init__()
        self._files = CheckpointFiles(directory / "checkpoints")
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) <= self._step:
            return
        deadline = time.monotonic() + 30
        while self._step not in self._files.steps():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        raise KilledError


def make_model(optimizer=None):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    return model


def input_fn(start, end):
    # Noise: the loss rises and falls.
    noise = np.random.default_rng(3).normal(size=(MAX_STEPS * toy.BATCH, 1))
    places = np.arange(start * toy.BATCH, end * toy.BATCH)
    pairs = tf.data.Dataset.from_tensor_slices((toy.X[places], noise[places]))
    options = tf.data.Options()
    options.autotune.enabled = False
    return pairs.batch(toy.BATCH).with_options(options)


def train(
    directory, callbacks, *, steps_per_execution=1, model_fn=make_model, save_every=0
):
    return training.train_and_evaluate(
        model_fn,
        training.TrainSpec(
            input_fn=input_fn,
            max_steps=MAX_STEPS,
            pass_steps=EPOCH_STEPS,
            local_batch_size=toy.BATCH,
            steps_per_execution=steps_per_execution,
            callbacks=lambda plan: callbacks,
        ),
        training.EvalSpec(input_fn=lambda: input_fn(0, 5), every_epochs=1),
        training.RunConfig(
            model_dir=directory and str(directory), save_every_steps=save_every
        ),
        world=World(),
    )


def check(tmp_path, make_callbacks, *, kill_after, **options):
    """Compare a job that is killed after steps with the uninterrupted one."""
    expected = train(None, make_callbacks(), **options)
    for step in kill_after:
        callbacks = [*make_callbacks(), Kill(tmp_path, step)]
        with pytest.raises(KilledError):
            train(tmp_path, callbacks, save_every=step, **options)
    result = train(tmp_path, make_callbacks(), **options)
    assert result.start_step == kill_after[-1]
    states = (
        [v.numpy() for v in (*r.model.variables, *r.model.optimizer.variables)]
        for r in (result, expected)
    )
    for found, wanted in zip(*states, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert result.step == expected.step
    assert result.history == expected.history
    return result


class AddToBias(keras.callbacks.Callback):
    """Changes weights in each hook that begins something."""

    def on_train_begin(self, logs=None):
        self.model.layers[0].set_weights(
            [np.full_like(w, 0.1) for w in self.model.layers[0].get_weights()]
        )

    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[1].bias.assign_add([1.0])

    def on_train_batch_begin(self, batch, logs=None):
        self.model.layers[1].bias.assign_add([0.25])


class Halve(keras.callbacks.Callback):
    """Halves the rate in the second of its calls; its state has methods."""

    def __init__(self):
        super().__init__()
        self.calls, self.losses = 0, {}

    def on_epoch_end(self, epoch, logs=None):
        self.calls += 1
        self.losses[str(epoch)] = (epoch, np.float32(logs["loss"]))
        if self.calls == 2:
            rate = self.model.optimizer.learning_rate
            rate.assign(rate / (2 + self.losses["0"][1]))

    def get_state(self):
        return {"calls": self.calls, "losses": self.losses}

    def set_state(self, state):
        self.calls, self.losses = state["calls"], state["losses"]


def changes():
    return [
        keras.callbacks.ReduceLROnPlateau("loss", patience=2, factor=0.5, min_delta=10),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        AddToBias(),
        Halve(),
    ]


def stops():
    # The third epoch is the first one without an improvement by 10.
    return [
        keras.callbacks.EarlyStopping(
            "loss", patience=2, min_delta=10, restore_best_weights=True
        ),
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
    ]


WITHIN, AT_END = (13, 25), (10,)


@pytest.mark.parametrize(
    ("make_callbacks", "kill_after"),
    [
        (changes, WITHIN),
        pytest.param(changes, AT_END, marks=pytest.mark.long),
        pytest.param(stops, WITHIN, marks=pytest.mark.long),
        (stops, AT_END),
    ],
)
def test_a_killed_job_has_the_callbacks_of_the_uninterrupted_one(
    tmp_path, make_callbacks, kill_after
):
    use_ema = make_callbacks is stops

    def model_fn():
        return make_model(keras.optimizers.SGD(0.05, use_ema=use_ema))

    result = check(tmp_path, make_callbacks, kill_after=kill_after, model_fn=model_fn)
    assert result.step == (30 if make_callbacks is stops else MAX_STEPS)


def test_a_killed_job_goes_on_within_an_execution(tmp_path):
    # Checkpoints of each step split the executions of four steps.
    check(tmp_path, lambda: [AddToBias()], kill_after=(14,), steps_per_execution=4)


def test_the_best_of_a_model_checkpoint_is_kept(tmp_path):
    saved = tmp_path / "best.weights.h5"

    def make_callbacks():
        checkpoint = keras.callbacks.ModelCheckpoint(
            saved, "val_loss", save_best_only=True, save_weights_only=True
        )
        return [checkpoint]

    first = make_callbacks()
    with pytest.raises(KilledError):
        train(tmp_path, [*first, Kill(tmp_path, 12)], save_every=12)
    second = make_callbacks()
    train(tmp_path, second)
    assert second[0].best <= first[0].best


def test_arguments_of_a_later_run_are_its_own():
    before = keras.callbacks.EarlyStopping("loss", patience=2)
    states = CallbackStates([before])
    before.wait, before.best = 1, np.float32(0.5)
    arrays = states.capture()
    now = keras.callbacks.EarlyStopping("loss", patience=7)
    CallbackStates([now]).restore(arrays)
    assert (now.patience, now.wait, now.best) == (7, 1, 0.5)


def test_values_of_a_state_keep_their_types():
    class Holder(keras.callbacks.Callback):
        state = None

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    before, now = Holder(), Holder()
    before.state = {
        "list": [1, 2.5, None, True, "text", float("inf")],
        "tuple": (np.arange(3, dtype="int16"), {"a": np.float32(2)}),
    }
    CallbackStates([now]).restore(CallbackStates([before]).capture())
    assert now.state["list"] == before.state["list"]
    array, number = now.state["tuple"]
    assert (array.dtype, array.tolist()) == ("int16", [0, 1, 2])
    assert (type(number["a"]), number["a"]) == (np.float32, 2)
    before.state = {"model": object()}
    with pytest.warns(match=r"^Holder\.get_state\(\) returned .* of type object; exp"):
        CallbackStates([before]).capture()


def test_a_callback_whose_state_is_not_saved_is_named_once(recwarn):
    class Counts(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.limit, self.calls = 3, 0

    counts = Counts()
    states = CallbackStates([counts, keras.callbacks.LambdaCallback()])
    states.capture()
    assert not recwarn.list
    counts = Counts()
    states = CallbackStates([counts])
    counts.calls = 1
    for _ in range(2):
        states.capture()
    [warning] = recwarn.list
    text = "the state of the callback Counts, of which calls changed: in a job"
    assert text in str(warning.message)


def test_other_numbers_of_callbacks_of_a_class_start_anew():
    stoppings = [keras.callbacks.EarlyStopping("loss") for _ in range(2)]
    states = CallbackStates(stoppings)
    stoppings[0].wait = 4
    arrays = states.capture()
    now = keras.callbacks.EarlyStopping("loss")
    with pytest.warns(match="1 callbacks of the class EarlyStopping, and .* of 2"):
        CallbackStates([now]).restore(arrays)
    assert now.wait == 0
