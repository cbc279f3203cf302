"""Callbacks that act between two steps, and the end of a training at an epoch."""

import keras

from hvdtrain.job.agreement import gather


class StepCallback(keras.callbacks.Callback):
    """Calls `act` between two steps, or at the end of the epoch if that follows.

    At the end of an epoch all callbacks before this one have done what they do there:
    moving statistics are averaged, and the learning rate of the next epoch is set.

    Args:
        plan: the `Plan`.

    Attributes:
        plan: the `Plan`.
        step: global steps taken.
        epoch_steps: those of the current epoch.
        acts_within_executions: see `fitting.fit`.
    """

    acts_within_executions = True

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.step = self.epoch_steps = 0

    @property
    def is_last(self):
        """Whether the training ends here; a callback may have set `stop_training`."""
        return self.step == self.plan.max_steps or self.model.stop_training

    def note_step(self):
        """Is called before `act`."""

    def act(self, *, is_epoch_end):
        """Is called between two steps, on all ranks."""
        raise NotImplementedError

    def on_epoch_begin(self, epoch, logs=None):
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        """Acts, unless the epoch ends here."""
        self.epoch_steps = batch + 1
        self.step = self.plan.step(self._epoch, batch + 1)
        self.note_step()
        if not (self.plan.is_epoch_end(self.step) or self.model.stop_training):
            self.act(is_epoch_end=False)

    def on_epoch_end(self, epoch, logs=None):
        """Acts."""
        self.act(is_epoch_end=True)


class StopAtEpochEndCallback(keras.callbacks.Callback):
    """Ends `fit` on all ranks if one has set `stop_training` by the end of an epoch.

    The others would wait for it in the next collective.

    Args:
        world: the `World`.
    """

    def __init__(self, world):
        super().__init__()
        self._world = world

    def on_epoch_end(self, epoch, logs=None):
        """Gathers `stop_training`."""
        stops = gather(self._world, bool(self.model.stop_training))
        self.model.stop_training = any(stops)
