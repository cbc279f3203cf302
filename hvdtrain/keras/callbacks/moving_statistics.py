"""The same moving statistics of BatchNormalization on every rank."""

import keras

from hvdtrain.collectives import ops
from hvdtrain.keras.callbacks import start
from hvdtrain.keras.moving_statistics import average_moving_statistics
from hvdtrain.keras.variables import process_set_of


class AverageMovingStatisticsCallback(keras.callbacks.Callback):
    """Combines the moving statistics of `BatchNormalization` over the ranks.

    Each rank updates moving mean and variance from its own batches. Without this
    callback, validation and the model that rank 0 saves depend on the rank. With it
    the statistics are combined once per epoch, before validation, or at the end of an
    epoch without one: see `average_moving_statistics` for what is computed, and for
    its error. `SyncBatchNormalization` needs no such callback, and is exact.

    Put it on every rank: a rank without it leaves the others blocked in the
    reduction. Put it before `MetricAverageCallback` and callbacks that evaluate or
    save at the end of an epoch, and after `JoinCallback`, whose broadcast replaces
    all statistics by those of the rank that has taken the most steps. A model that is
    saved within an epoch holds the statistics of its rank.
    """

    def __init__(self):
        super().__init__()
        self._is_due = False
        self._steps = 0

    def on_train_begin(self, logs=None):
        """Makes the statistics equal: from here on steps are counted."""
        # A model that is built on some ranks only is broadcast on the first batch.
        if ops.is_true_on_all_ranks(
            start.is_built(self.model),
            name="MovingStatisticsBuilt",
            process_set=process_set_of(self.model.optimizer),
        ):
            average_moving_statistics(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        """Starts counting steps."""
        self._is_due = True
        self._steps = 0

    def on_train_batch_end(self, batch, logs=None):
        """Counts steps: `batch` is the last one done, from 0 on in its epoch."""
        self._steps = batch + 1

    def on_test_begin(self, logs=None):
        """Combines the statistics before `fit` validates."""
        self._average()

    def on_epoch_end(self, epoch, logs=None):
        """Combines the statistics, unless validation came before."""
        self._average()

    def _average(self):
        # One reduction per epoch on every rank, also if only some ranks validate.
        if self._is_due:
            average_moving_statistics(self.model, steps=self._steps)
        self._is_due = False
