"""Callbacks that keep an elastic state up to date under `fit`."""

import functools
import warnings
from collections.abc import Iterator

import keras

from hvdtrain.keras.callbacks import fit_start
from hvdtrain.keras.elastic.state import KerasState
from hvdtrain.keras.variables import get_inner_optimizer


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state every so many batches, and at the end of every epoch.

    The commit is made after all callbacks have run for the batch or epoch, whatever
    their order: just before the next one begins.

    Args:
        batches_per_commit: calls of the training step from one commit to the next.
    """

    def __init__(self, state: KerasState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0
        self._is_due = False

    def on_train_begin(self, logs: dict | None = None) -> None:
        # Commits are due in the same batches on all ranks, also on those that joined
        # the job later.
        self._batches = 0
        self._is_due = False

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._commit_if_due()

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._commit_if_due()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._batches += 1
        self._is_due |= self._batches % self.batches_per_commit == 0

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._is_due = True

    def on_train_end(self, logs: dict | None = None) -> None:
        self._commit_if_due()

    def _commit_if_due(self) -> None:
        if self._is_due:
            self._is_due = False
            self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Counts the batches of an epoch in `state.batch`; shortens one that is resumed.

    The first epoch after a restart takes no training steps for the batches that
    `state.batch` counts as done. `fit` still calls the callbacks for these batches, so
    that every callback receives the true number of each batch, but takes no data.

    If the number of steps of an epoch has changed since, as with
    `steps_per_epoch=500 // hvd.size()`, `state.batch` is changed in proportion, and
    rounded down: a batch may be repeated, and none is left out.

    Args:
        state: the `KerasState`, made with `batch=0`. A start value other than 0 counts
            if the optimizer has taken steps: it is where a checkpoint was made.
    """

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state
        self._skips_next = False

    def on_train_begin(self, logs: dict | None = None) -> None:
        # An interrupt while batches were skipped leaves the stand-in of that `fit`.
        fit_start.restore(self.model)
        self._skips_next = False
        self.state.batch = self._first_batch()
        self.state.epoch_steps = self.params.get("steps")
        if self.state.batch:
            step = functools.partial(self._skip_or_train, self.model)
            fit_start.substitute(self.model, step)

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        # Training starts with the first execution that has a batch that is not done.
        last = batch + self.model.steps_per_execution - 1
        self._skips_next = last < self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.state.batch = max(self.state.batch, batch + 1)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        fit_start.restore(self.model)
        self.state.batch = 0

    def _first_batch(self) -> int:
        state, steps = self.state, self.params.get("steps")
        batch = state.batch
        if batch and not int(get_inner_optimizer(state.optimizer)._iterations):
            warnings.warn(
                f"state.batch counts the batches that are done. Received: {batch}, "
                "with an optimizer that has taken no step; expected 0. Training starts "
                "at batch 0. Pass batch=0 to KerasState.",
                stacklevel=2,
            )
            return 0
        if not steps:
            return batch
        if state.epoch_steps:
            batch = batch * steps // state.epoch_steps
        # The metrics of an epoch without a single step have no result.
        return min(batch, steps - 1)

    def _skip_or_train(self, model: keras.Model, iterator: Iterator) -> dict:
        if self._skips_next:
            # Set anew before each batch: a later fit without this callback trains.
            self._skips_next = False
            return {}
        train_function = fit_start.restore(model)
        assert train_function  # `fit` has made it.
        return train_function(iterator)


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Counts the epochs of the job in `state.epoch`, over restarts.

    `fit` may be called with `epochs=total - state.epoch`, as Horovod's examples do,
    or with `epochs=total, initial_epoch=state.epoch`.

    Args:
        state: the `KerasState`, made with `epoch=0`.
    """

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self.state = state
        # From the epochs of `fit` to the epochs of the job.
        self._offset: int | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        self._offset = None

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        if self._offset is None:
            self._offset = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        assert self._offset is not None
        self.state.epoch = self._offset + epoch + 1
