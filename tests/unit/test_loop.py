"""What happens after steps, and in which order. The steps themselves are faked."""

import keras
import pytest
import toy

from hvdtrain import training
from hvdtrain.checkpoint.snapshot import capture
from hvdtrain.job import World
from hvdtrain.job.world import PreemptedError
from hvdtrain.training import evaluation, loop, periodic_save

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def events(monkeypatch):
    """Note what happens, in its order; steps and evaluations compute nothing."""
    events = []

    def make_steps(model, *_):
        def take(count):
            model.optimizer.iterations.assign_add(count)
            # The speed decides where the ranks vote, which splits the steps.
            if events[-1].endswith(" steps"):
                count += int(events.pop().split()[0])
            events.append(f"{count} steps")
            return {"loss": 1.0}

        return take

    def evaluate(*_, **options):
        events.append("evaluation")
        return {"loss": 2.0}

    def save(*arguments, **options):
        events.append("save")
        return capture(*arguments, **options)

    monkeypatch.setattr(loop, "make_steps", make_steps)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    monkeypatch.setattr(periodic_save, "capture", save)
    return events


class Recorder(keras.callbacks.Callback):
    """Notes the calls of a user's callback; `act(name, model)` is called in each."""

    def __init__(self, events, act=lambda name, model: None):
        super().__init__()
        self._events, self._act = events, act

    def _note(self, name):
        self._events.append(name)
        self._act(name, self.model)

    def on_train_begin(self, logs=None):
        self._note("train begins")

    def on_epoch_begin(self, epoch, logs=None):
        self._note(f"epoch {epoch} begins")

    def on_train_batch_begin(self, batch, logs=None):
        self._note(f"batch {batch} begins")

    def on_train_batch_end(self, batch, logs=None):
        self._note(f"batch {batch} ends")

    def on_epoch_end(self, epoch, logs=None):
        self._note(f"epoch {epoch} ends with {sorted(logs)}")

    def on_train_end(self, logs=None):
        self._note("train ends")


def train(directory, callback, *, max_steps=7, throttle_steps=0, **config):
    def model_fn():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    return training.train_and_evaluate(
        model_fn,
        training.TrainSpec(
            input_fn=toy.batches,
            max_steps=max_steps,
            pass_steps=4,
            local_batch_size=toy.BATCH,
            steps_per_execution=2,
            callbacks=lambda plan: [callback],
        ),
        training.EvalSpec(
            input_fn=lambda: toy.batches(0, 1), throttle_steps=throttle_steps
        ),
        training.RunConfig(model_dir=str(directory), **config),
        world=World(),
    )


def test_the_order_after_steps(events, tmp_path):
    train(tmp_path, Recorder(events), throttle_steps=3, save_every_steps=3)
    assert events == [
        *("train begins", "epoch 0 begins"),
        *("batch 0 begins", "2 steps", "batch 1 ends"),
        # What is due by steps splits an execution, which callbacks do not see.
        *("batch 2 begins", "1 steps", "evaluation", "save", "1 steps", "batch 3 ends"),
        *("epoch 0 ends with ['loss', 'val_loss']", "epoch 1 begins"),
        *("batch 0 begins", "2 steps", "evaluation", "batch 1 ends", "save"),
        *("batch 2 begins", "1 steps", "batch 2 ends"),
        # The training is saved before its last evaluation, and then with its result.
        *("save", "evaluation", "epoch 1 ends with ['loss', 'val_loss']", "save"),
        "train ends",
    ]


def test_a_callback_ends_the_training_within_an_epoch(events, tmp_path):
    def stop(name, model):
        if name == "batch 1 ends":
            model.stop_training = True

    result = train(tmp_path, Recorder(events, stop), save_every_steps=2)
    assert events[3:] == [
        *("2 steps", "batch 1 ends", "save", "evaluation"),
        *("epoch 0 ends with ['loss', 'val_loss']", "save", "train ends"),
    ]
    assert result.step == 2


def test_a_callback_ends_the_training_at_the_end_of_an_epoch(events, tmp_path):
    def stop(name, model):
        if name.startswith("epoch 0 ends"):
            model.stop_training = True

    result = train(tmp_path, Recorder(events, stop))
    # Whether the training ends was not known before the callback.
    assert events[-5:] == [
        *("epoch 0 ends with ['loss']", "save", "evaluation", "save", "train ends"),
    ]
    assert result.step == 4


def test_a_stop_is_saved_before_the_run_ends(events, tmp_path):
    with pytest.raises(PreemptedError, match=r"^Stopped at step 1 of 7 by max_minutes"):
        train(tmp_path, Recorder(events), max_minutes=1e-9)
    assert events[-2:] == ["1 steps", "save"]
