"""No rank stops alone."""

import keras
import numpy as np

from hvdtrain.collectives import ops
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Max
from hvdtrain.keras.callbacks.every import EverySteps
from hvdtrain.keras.optimizer import process_set_of


class StopTogetherCallback(keras.callbacks.Callback):
    """Lets all ranks stop at the same step when one of them wants to.

    A callback that decides on what its own rank sees (`TerminateOnNaN` on the local
    loss, a time limit, a signal) sets `model.stop_training` on that rank alone; the
    others would wait for it for ever. With this callback the wish is held back, and
    granted on every rank of the optimizer's `process_set` at the next step at which
    the ranks ask each other.

    Put it last in the list of callbacks. Callbacks that decide on the logs of an
    epoch need nothing but `MetricAverageCallback` before them.

    Args:
        every_steps: training steps from one question to the next; it costs one
            small reduction. Ranks also ask at the end of every epoch.
    """

    def __init__(self, every_steps=100):
        super().__init__()
        self._is_due = EverySteps(every_steps)
        self._wants_to_stop = False

    def on_train_begin(self, logs=None):
        """Forgets a `fit` before."""
        self._is_due.reset()
        self._wants_to_stop = False

    def on_train_batch_end(self, batch, logs=None):
        """Holds back a wish to stop until all ranks are asked."""
        self._wants_to_stop |= bool(self.model.stop_training)
        self.model.stop_training = self._is_due(batch) and self._agree()

    def on_epoch_end(self, epoch, logs=None):
        """Asks all ranks."""
        self._wants_to_stop |= bool(self.model.stop_training)
        self.model.stop_training = self._agree()

    def _agree(self):
        process_set = process_set_of(self.model.optimizer)
        if not needs_communication(process_set):
            return self._wants_to_stop
        wishes = ops.allreduce(
            np.int32(self._wants_to_stop),
            name="StopTogether",
            op=Max,
            process_set=process_set,
        )
        self._wants_to_stop = bool(wishes.numpy())
        return self._wants_to_stop
