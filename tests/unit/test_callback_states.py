"""Callbacks of a job that is killed act as those of the uninterrupted job."""

import collections
import itertools
import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
import toy

from hvdtrain import training
from hvdtrain.checkpoint.per_rank import callbacks_by_rank
from hvdtrain.checkpoint.storage import CheckpointFiles
from hvdtrain.job import JobError, World
from hvdtrain.job.world import PreemptedError
from hvdtrain.training.callback_states import CallbackStates

EPOCH_STEPS, MAX_STEPS = 10, 45


pytestmark = pytest.mark.usefixtures("one_rank")


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
    noise = np.random.default_rng(3).normal(size=(80 * toy.BATCH, 1))
    places = np.arange(start * toy.BATCH, end * toy.BATCH)
    pairs = tf.data.Dataset.from_tensor_slices((toy.X[places], noise[places]))
    options = tf.data.Options()
    options.autotune.enabled = False
    return pairs.batch(toy.BATCH).with_options(options)


def train(
    directory,
    callbacks,
    *,
    steps_per_execution=1,
    model_fn=make_model,
    save_every=0,
    max_steps=MAX_STEPS,
    test_fn=lambda: input_fn(0, 5),
):
    return training.train_and_evaluate(
        model_fn,
        training.TrainSpec(
            input_fn=input_fn,
            max_steps=max_steps,
            pass_steps=EPOCH_STEPS,
            local_batch_size=toy.BATCH,
            steps_per_execution=steps_per_execution,
            callbacks=lambda plan: callbacks,
        ),
        training.EvalSpec(input_fn=test_fn, every_epochs=1),
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


class Counts(keras.callbacks.Callback):
    """Counts the executions that begin, and draws a random number for each."""

    def __init__(self):
        super().__init__()
        self.count, self.drawn = 0, []

    def on_train_batch_begin(self, batch, logs=None):
        self.count += 1
        self.drawn.append(np.random.normal())

    def on_epoch_end(self, epoch, logs=None):
        logs |= {"count": float(self.count), "drawn": float(sum(self.drawn))}

    def get_state(self):
        return {"count": self.count, "drawn": self.drawn}

    def set_state(self, state):
        self.count, self.drawn = state["count"], state["drawn"]


def lower_rate():
    """Return a callback whose hook is an attribute of it, and no method."""

    def lower(epoch, logs):
        rate = callback.model.optimizer.learning_rate
        rate.assign(rate * 0.5)

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=lower)
    return callback


# Executions have four steps, and epochs ten: the second epoch has one from 14 to 18.
def test_a_killed_job_goes_on_within_an_execution(tmp_path):
    def make_callbacks():
        return [AddToBias(), Counts(), lower_rate()]

    check(tmp_path, make_callbacks, kill_after=(16,), steps_per_execution=4)


class Halt(keras.callbacks.Callback):
    """Notes the validation of each epoch, and ends the job after so many."""

    def __init__(self, epochs=None):
        super().__init__()
        self.epochs, self.seen = epochs, []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append([epoch, logs["val_loss"], logs["loss"]])
        self.model.stop_training = len(self.seen) == self.epochs

    def get_state(self):
        return self.seen

    def set_state(self, state):
        self.seen = state


@pytest.mark.parametrize("epochs", [None, pytest.param(2, marks=pytest.mark.release)])
@pytest.mark.long
def test_a_stop_in_the_evaluation_of_an_epoch_does_not_end_the_epoch(tmp_path, epochs):
    def many():
        return input_fn(0, 5).repeat(40)

    def stopped_after(evaluations):
        calls = itertools.count()

        def stop(number):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.02)
            return number

        def test_fn():
            # The first call checks what the function returns.
            if next(calls) <= evaluations:
                return many()
            numbers = tf.data.Dataset.range(200).map(
                lambda number: tf.numpy_function(stop, [number], tf.int64)
            )
            return tf.data.Dataset.zip(numbers, many()).map(lambda _, pair: pair)

        return test_fn

    def callbacks(halt):
        # Adds the learning rate to the history.
        plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5)
        return [plateau, halt]

    expected, found = Halt(epochs), Halt(epochs)
    whole = train(None, callbacks(expected), test_fn=many)
    # In the second evaluation of the job, and again in the run that continues there.
    for evaluations in (1, 0):
        with pytest.raises(PreemptedError, match="step 20 of"):
            train(tmp_path, callbacks(Halt(epochs)), test_fn=stopped_after(evaluations))
    result = train(tmp_path, callbacks(found), test_fn=many)
    assert found.seen == expected.seen
    assert len(found.seen) == (epochs or 5)
    assert (result.step, result.history) == (whole.step, whole.history)
    for mine, theirs in zip(
        result.model.get_weights(), whole.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.release
def test_the_best_of_a_model_checkpoint_is_kept(tmp_path):
    def make_callback():
        return keras.callbacks.ModelCheckpoint(
            tmp_path / "best.weights.h5",
            "val_loss",
            save_best_only=True,
            save_weights_only=True,
        )

    class Unreachable(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            first.best = -1.0

    first, second = make_callback(), make_callback()
    callbacks = [first, Unreachable(), Kill(tmp_path, 12)]
    with pytest.raises(KilledError):
        train(tmp_path, callbacks, save_every=12)
    (tmp_path / "best.weights.h5").unlink()
    train(tmp_path, [second])
    assert second.best == -1.0
    # Also in a job that is made longer.
    third = make_callback()
    train(tmp_path, [third], max_steps=MAX_STEPS + 10)
    assert third.best == -1.0
    assert not (tmp_path / "best.weights.h5").exists()


class Saved(keras.callbacks.ModelCheckpoint):
    """Notes what is saved, in a file of this directory."""

    def _save_model(self, epoch, batch, logs):
        step = int(self.model.optimizer.iterations)
        super()._save_model(epoch, batch, logs)
        with open(f"{self.filepath}.txt", "a") as file:
            file.write(f"{step} {self.best}\n")


def model_checkpoints(directory, names=("best", "worst", "often")):
    """Callbacks in the order of `names`."""
    options = {
        "best": {"initial_value_threshold": 3.0},
        "worst": {"mode": "max"},
        "often": {"save_freq": 7, "save_best_only": False},
    }
    return [
        Saved(
            str(directory / f"{name}.weights.h5"),
            **{"monitor": "val_loss", "save_best_only": True} | options[name],
            save_weights_only=True,
        )
        for name in names
    ]


@pytest.mark.long
def test_model_checkpoints_of_a_killed_job_write_what_the_others_write(tmp_path):
    """With another order in each run, and one more in the last one."""
    expected, killed = tmp_path / "expected", tmp_path / "killed"
    expected.mkdir()
    killed.mkdir()
    train(None, model_checkpoints(expected))
    for step, names in ((12, ("best", "often")), (25, ("often", "best"))):
        callbacks = [*model_checkpoints(killed, names), Kill(tmp_path, step)]
        with pytest.raises(KilledError):
            train(tmp_path, callbacks, save_every=step)
    names = ("worst", "often", "best")
    with pytest.warns(
        UserWarning, match=r"^The callback Saved\(val_loss, max, .* anew"
    ):
        train(tmp_path, model_checkpoints(killed, names))
    for name in ("best", "often"):
        path = f"{name}.weights.h5.txt"
        lines = (killed / path).read_text().splitlines()
        # A save after the last checkpoint of a killed run is repeated.
        wanted = (expected / path).read_text().splitlines()
        assert len(wanted) > 1
        assert {*lines} == {*wanted}
        models = make_model(), make_model()
        for model, directory in zip(models, (killed, expected), strict=True):
            model.load_weights(directory / f"{name}.weights.h5")
        for found, other in zip(*(m.get_weights() for m in models), strict=True):
            np.testing.assert_array_equal(found, other)


def test_a_longer_job_than_one_that_has_ended_waits_anew(tmp_path):
    def stopping():
        return [keras.callbacks.EarlyStopping("loss", patience=2, min_delta=10)]

    assert train(tmp_path, stopping()).step == 30
    # Two more epochs without an improvement, after the first one.
    assert train(tmp_path, stopping(), max_steps=80).step == 60


def test_arguments_of_a_later_run_are_its_own():
    before = keras.callbacks.EarlyStopping("loss", patience=2)
    states = CallbackStates([before])
    before.on_train_begin()
    before.wait, before.best = 1, np.float32(0.5)
    arrays = states.capture()
    now = keras.callbacks.EarlyStopping("loss", patience=7)
    CallbackStates([now]).restore(arrays)
    assert (now.patience, now.wait, now.best) == (7, 1, 0.5)


class Holder(keras.callbacks.Callback):
    def __init__(self, state=None):
        super().__init__()
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_values_of_a_state_keep_their_types():
    before = {
        "list": [1, 2.5, None, True, "text", float("inf")],
        "tuple": (np.arange(3, dtype="int16"), {"a": np.float32(2)}),
    }
    now = Holder()
    CallbackStates([now]).restore(CallbackStates([Holder(before)]).capture())
    assert now.state["list"] == before["list"]
    array, number = now.state["tuple"]
    assert (array.dtype, array.tolist()) == ("int16", [0, 1, 2])
    assert (type(number["a"]), number["a"]) == (np.float32, 2)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"model": object()}, "object"),
        ({"counts": collections.Counter("abc")}, "Counter"),
        ([np.complex128(1)], "complex128"),
    ],
)
def test_a_state_that_cannot_be_saved_is_left_out(state, name):
    with pytest.warns(match=rf"callback Holder has a value of type {name}; expected"):
        arrays = CallbackStates([Holder(state)]).capture()
    now = Holder("as it was made")
    CallbackStates([now]).restore(arrays)
    assert now.state == "as it was made"


def test_a_callback_that_has_got_methods_since_starts_anew():
    class Plain(keras.callbacks.Callback):
        pass

    arrays = CallbackStates([Plain()]).capture()
    now = type("Plain", (Holder,), {})("as it was made")
    CallbackStates([now]).restore(arrays)
    assert now.state == "as it was made"


def test_a_callback_whose_state_is_not_saved_is_named_once(recwarn):
    class Calls(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.limit, self.calls, self.seen = 3, 0, []

    callback = Calls()
    CallbackStates([callback, keras.callbacks.LambdaCallback()]).capture()
    assert not recwarn.list
    states = CallbackStates([callback])
    callback.calls = 1
    callback.seen.append(2)
    for _ in range(2):
        states.capture()
    [warning] = recwarn.list
    text = "the state of the callback Calls, of which calls, seen changed: in a job"
    assert text in str(warning.message)


def stoppings(*monitors):
    return [keras.callbacks.EarlyStopping(monitor) for monitor in monitors]


def test_callbacks_of_a_class_are_found_by_their_arguments():
    before = stoppings("loss", "accuracy")
    before[0].wait, before[1].wait = 4, 5
    arrays = CallbackStates(before).capture()
    for now, waits in (
        (stoppings("accuracy", "loss"), [5, 4]),
        (stoppings("accuracy"), [5]),
    ):
        CallbackStates(now).restore(arrays)
        assert [stopping.wait for stopping in now] == waits
    for now, waits in (
        (stoppings("val_loss", "loss", "accuracy"), [0, 4, 5]),
        (stoppings("val_loss", "loss"), [0, 4]),
    ):
        with pytest.warns(
            match=r"^The callback EarlyStopping\(val_loss, auto\) starts"
        ):
            CallbackStates(now).restore(arrays)
        assert [stopping.wait for stopping in now] == waits


def test_a_model_checkpoint_with_another_file_keeps_its_best():
    (before, now) = (keras.callbacks.ModelCheckpoint(f"{n}.keras") for n in "ab")
    before.best = 0.5
    CallbackStates([now]).restore(CallbackStates([before]).capture())
    assert now.best == 0.5


def test_shards_that_a_callback_holds_are_not_given_to_other_ranks():
    stored = {}
    for rank in range(2):
        state = CallbackStates([Holder(np.full(2, rank))]).capture()
        stored |= {f"callbacks{rank}/{name}": value for name, value in state.items()}
    for size, is_same_size, is_sharded, expected in [
        (2, True, True, [0, 1]),
        (1, False, False, [0]),
        (3, False, False, [0, 0, 0]),
        # Of two ranks that are one replica now, and were two.
        (2, False, True, None),
    ]:
        by_rank = callbacks_by_rank(
            stored, size, is_same_size=is_same_size, is_sharded=is_sharded
        )
        holders = [Holder("as it was made") for _ in by_rank]
        for holder, arrays in zip(holders, by_rank, strict=True):
            if expected is None:
                with pytest.warns(match="Holder starts anew: its state has weights"):
                    CallbackStates([holder]).restore(arrays)
            else:
                CallbackStates([holder]).restore(arrays)
        if expected is None:
            assert {holder.state for holder in holders} == {"as it was made"}
        else:
            assert [holder.state[0] for holder in holders] == expected


def test_a_callback_that_restores_by_itself_is_refused(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(JobError, match=r"not have BackupAndRestore.*`model_dir`"):
        train(tmp_path, [backup])
    assert not (tmp_path / "backup").exists()
