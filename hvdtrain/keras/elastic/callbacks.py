"""Callbacks that keep an elastic state up to date under `fit`."""

import keras

from hvdtrain.keras import train_functions


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state every so many batches, and at the end of every epoch.

    The commit is made when all callbacks have seen the batch or epoch, whatever
    their order: just before what comes next.

    Args:
        state: the `KerasState`.
        batches_per_commit: calls of the training step from one commit to the next.
    """

    def __init__(self, state, batches_per_commit=1):
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0
        self._is_due = False

    def on_train_begin(self, logs=None):
        """Starts counting anew, the same on every rank."""
        self._batches = 0
        self._is_due = False

    def on_epoch_begin(self, epoch, logs=None):
        """Commits the epoch before."""
        self._commit_if_due()

    def on_train_batch_begin(self, batch, logs=None):
        """Commits the batch before."""
        self._commit_if_due()

    def on_train_batch_end(self, batch, logs=None):
        """Counts the batch."""
        self._batches += 1
        self._is_due |= self._batches % self.batches_per_commit == 0

    def on_epoch_end(self, epoch, logs=None):
        """Has the epoch committed."""
        self._is_due = True

    def on_train_end(self, logs=None):
        """Commits the last epoch."""
        self._commit_if_due()

    def _commit_if_due(self):
        if self._is_due:
            self._is_due = False
            self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Counts the batches of an epoch in `state.batch`; shortens one that goes on.

    The first epoch after a restart takes no training steps for the batches that
    `state.batch` says are done: their turns pass without a step and without taking
    data, so that every callback sees the true number of each batch.

    Args:
        state: the `KerasState`, made with `batch=0`.
    """

    def __init__(self, state):
        super().__init__()
        self.state = state

    def on_train_begin(self, logs=None):
        """Passes over the batches that are done."""
        # A fit that an interrupt ended while it skipped has left its stand-in.
        train_functions.restore(self.model)
        if self.state.batch:
            train_functions.substitute(self.model, lambda iterator: {})

    def on_train_batch_begin(self, batch, logs=None):
        """Trains from the first batch on that is not done."""
        if batch >= self.state.batch:
            train_functions.restore(self.model)

    def on_train_batch_end(self, batch, logs=None):
        """Counts up to `batch`, the last one of the step."""
        self.state.batch = max(self.state.batch, batch + 1)

    def on_epoch_end(self, epoch, logs=None):
        """Starts the next epoch at its first batch."""
        train_functions.restore(self.model)
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Counts the epochs of the job in `state.epoch`, over restarts.

    `fit` may be called with `epochs=total - state.epoch`, as Horovod's examples do,
    or with `epochs=total, initial_epoch=state.epoch`.

    Args:
        state: the `KerasState`, made with `epoch=0`.
    """

    def __init__(self, state):
        super().__init__()
        self.state = state
        self._offset = None

    def on_train_begin(self, logs=None):
        """Forgets the `fit` before."""
        self._offset = None

    def on_epoch_begin(self, epoch, logs=None):
        """Learns from the first epoch where `fit` starts to count."""
        if self._offset is None:
            self._offset = self.state.epoch - epoch

    def on_epoch_end(self, epoch, logs=None):
        """Counts the epoch as done."""
        self.state.epoch = self._offset + epoch + 1
