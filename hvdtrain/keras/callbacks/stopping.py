"""Ends training on all ranks at the same step."""

import keras
import numpy as np

from hvdtrain.collectives import ops
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Max
from hvdtrain.keras.callbacks.every import EverySteps
from hvdtrain.keras.variables import all_ranks_of


class StopTogetherCallback(keras.callbacks.Callback):
    """Ends `fit` on all ranks at the same step when one of them sets `stop_training`.

    A callback that acts on the state of its own rank (`TerminateOnNaN` on the local
    loss, a time limit, a signal) sets `model.stop_training` on that rank alone; the
    other ranks would block in the next collective. This callback delays the request:
    every `every_steps` steps one reduction finds out whether any rank of the
    optimizer's `process_set` has one, and if so, all of them stop.

    Put it last in the list of callbacks. Callbacks that act on the logs of an epoch
    only need `MetricAverageCallback` before them.

    Args:
        every_steps: training steps from one reduction to the next; there is another
            one at the end of every epoch.
    """

    def __init__(self, every_steps=100):
        super().__init__()
        self._is_due = EverySteps(every_steps)
        self._is_requested = False

    def on_train_begin(self, logs=None):
        """Discards the state of a previous `fit`."""
        self._is_due.reset()
        self._is_requested = False

    def on_train_batch_end(self, batch, logs=None):
        """Keeps a request to stop until the next reduction."""
        self._is_requested |= bool(self.model.stop_training)
        self.model.stop_training = self._is_due(batch) and self._agree()

    def on_epoch_end(self, epoch, logs=None):
        """Stops all ranks if one of them requests it."""
        self._is_requested |= bool(self.model.stop_training)
        self.model.stop_training = self._agree()

    def _agree(self):
        process_set = all_ranks_of(self.model.optimizer)
        if not needs_communication(process_set):
            return self._is_requested
        requests = ops.allreduce(
            np.int32(self._is_requested),
            name="StopTogether",
            op=Max,
            process_set=process_set,
        )
        self._is_requested = bool(requests.numpy())
        return self._is_requested
