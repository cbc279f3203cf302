"""Ranks with unequal numbers of batches."""

import keras

from hvdtrain.collectives import ops
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.keras.variables import replicated_variables


class JoinCallback(keras.callbacks.Callback):
    """Lets a rank whose data is exhausted wait for the others, epoch by epoch.

    The ranks that still have batches go on, and their gradients are averaged over
    themselves (Horovod's `join` alone divides by all ranks). When the last one is
    done, every rank takes its weights and optimizer state: what a waiting rank
    missed. It happens before validation, and at the end of an epoch without one.

    Put it before callbacks that talk at the end of an epoch. While a rank waits, the
    others may only reduce dense tensors: use `sparse_as_dense=True` with embeddings,
    no bfloat16 compression, no `SyncBatchNormalization`, no process sets, and
    callbacks that talk between epochs only.

    Source: `join` and its cost are Horovod's; see `horovod.tensorflow.join`.
    """

    def __init__(self):
        super().__init__()
        self._is_training = False

    def set_model(self, model):
        """Takes the model; marks it as one whose ranks may take unequal steps."""
        super().set_model(model)
        model._hvdtrain_joins = True

    def on_train_end(self, logs=None):
        """Removes the mark: the next `fit` may be without this callback."""
        self.model._hvdtrain_joins = False

    def on_epoch_begin(self, epoch, logs=None):
        """Notes that there are batches to come."""
        self._is_training = True

    def on_test_begin(self, logs=None):
        """Joins before `fit` validates."""
        self._join()

    def on_epoch_end(self, epoch, logs=None):
        """Joins, unless validation came before."""
        self._join()

    def _join(self):
        if not self._is_training:
            return
        self._is_training = False
        if not needs_communication(global_process_set):
            return
        last_rank = int(ops.join())
        ops.broadcast_variables(replicated_variables(self.model), last_rank)
