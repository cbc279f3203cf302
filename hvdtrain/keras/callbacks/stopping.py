"""Ends training on all ranks at the same step."""

from collections.abc import Sequence
from typing import ClassVar

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.process_sets import ProcessSet, needs_communication
from hvdtrain.collectives.transport import Max
from hvdtrain.keras.callbacks.fit_start import SharedCallback, joins
from hvdtrain.keras.callbacks.joining import JoinCallback
from hvdtrain.keras.consistency import compute_checksum
from hvdtrain.keras.replication import get_hook, get_local_keys, get_training_ranks
from hvdtrain.keras.variables import optimizers_inside, variable_key
from hvdtrain.output import name_ranks
from hvdtrain.sharding.shards import is_split_over_ranks


class EverySteps:
    """Returns True once in `every_steps` training steps.

    It counts across epochs, and several steps per call with `steps_per_execution`.
    Equal calls return equal results on every rank: collectives may depend on them.
    """

    def __init__(self, every_steps: int) -> None:
        if not isinstance(every_steps, int) or every_steps < 1:
            raise ValueError(
                f"every_steps must be a positive integer. Received: {every_steps!r}"
            )
        self._every_steps = every_steps
        self.reset()

    def reset(self) -> None:
        """Set the count to zero, when training begins.

        Otherwise ranks that joined an elastic job later would have another count.
        """
        self._last_batch = -1
        self._steps = 0

    def __call__(self, batch: int) -> bool:
        """Count the steps up to `batch`: the last one done, from 0 in each epoch."""
        is_new_epoch = batch <= self._last_batch
        self._steps += batch + 1 if is_new_epoch else batch - self._last_batch
        self._last_batch = batch
        if self._steps < self._every_steps:
            return False
        self._steps = 0
        return True


class StopTogetherCallback(SharedCallback):
    """Ends `fit` on all ranks at the same step when one of them sets `stop_training`.

    A callback that acts on the state of its own rank (`TerminateOnNaN` on the local
    loss, a time limit, a signal) sets `model.stop_training` on that rank alone; the
    other ranks would block in the next collective. This callback delays the request:
    every `every_steps` steps one reduction finds out whether any rank of the
    optimizer's `process_set` has one, and if so, all of them stop.

    When training ends, a callback may change the weights of its own rank:
    `EarlyStopping(restore_best_weights=True)` on rank 0, say. All ranks then take the
    weights of the first rank that has changed its own.

    Put it last in the list of callbacks; only `ConsistencyCheckCallback` may follow.
    Callbacks that act only on the logs of an epoch need no more than
    `MetricAverageCallback` before them.

    Args:
        every_steps: training steps from one reduction to the next; there is another
            one at the end of every epoch. None for that one only: a request within an
            epoch is not delayed, and must come from all ranks. With `JoinCallback` it
            is the only one, since the ranks' steps differ: a rank that stops joins.

    Raises:
        ValueError: at the end of `fit`, on every rank, if only some of them have
            changed their shards of a model that is sharded over ranks.
    """

    stops_together: ClassVar[bool] = True
    belongs_after: ClassVar = (
        JoinCallback,
        keras.callbacks.EarlyStopping,
        keras.callbacks.TerminateOnNaN,
    )

    def __init__(self, every_steps: int | None = 100) -> None:
        super().__init__()
        self._is_due = EverySteps(every_steps) if every_steps is not None else None
        self._is_requested = False
        # Of the weights at the end of the last epoch.
        self._checksum: int | None = None

    def on_train_begin(self, logs: dict | None = None) -> None:
        if self._is_due:
            self._is_due.reset()
        self._is_requested = False
        self._checksum = None

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._is_due is None or joins(self):
            return
        # A request is kept until the next reduction: `fit` stops on no rank before.
        self._is_requested |= bool(self.model.stop_training)
        self.model.stop_training = self._is_due(batch) and self._agree()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._is_requested |= bool(self.model.stop_training)
        self.model.stop_training = self._agree()
        if self.model.stop_training or epoch + 1 == self.params["epochs"]:
            self._checksum = self._final_checksum()

    def on_train_end(self, logs: dict | None = None) -> None:
        process_set = get_training_ranks(self.model.optimizer)
        if not needs_communication(process_set):
            return
        checksum = compute_checksum(self._weights(is_trainable=True))
        is_changed = self._checksum not in (None, checksum)
        rows = ops.allgather(
            np.array([[is_changed, checksum]], "int64"),
            "WeightsAtEnd",
            process_set=process_set,
        )
        flags, checksums = rows.numpy().T.tolist()
        changed = [
            rank for rank, flag in zip(process_set.ranks, flags, strict=True) if flag
        ]
        if is_split_over_ranks(self.model.variables):
            _check_none_or_all(changed, process_set)
        elif changed and len(set(checksums)) > 1:
            weights = self._weights(is_trainable=False)
            ops.broadcast_variables(weights, changed[0], process_set)

    def _final_checksum(self) -> int:
        """Return a checksum of the weights that `fit` will leave.

        With `use_ema`, it assigns moving averages to them before on_train_end: that
        is no change by a callback.
        """
        optimizer, weights = self.model.optimizer, self.model.trainable_weights
        has_averages = any(
            getattr(each, "use_ema", False) for each in optimizers_inside(optimizer)
        )
        before = [tf.identity(weight) for weight in weights] if has_averages else []
        if has_averages:
            hook = get_hook(optimizer)
            # The flight recorder counts the ends of `fit`; this is none.
            (hook.finalize if hook else optimizer.finalize_variable_values)(weights)
        checksum = compute_checksum(self._weights(is_trainable=True))
        # The next checkpoint of a training needs the weights that have no average.
        for weight, value in zip(weights, before, strict=False):
            weight.assign(value)
        return checksum

    def _weights(self, *, is_trainable: bool) -> list[keras.Variable]:
        """Return the weights that are not local, or the trainable ones of them."""
        # The moving averages of `BatchNormalization` differ by rank.
        model, local_keys = self.model, get_local_keys(self.model.optimizer)
        weights = model.trainable_weights if is_trainable else model.weights
        return [weight for weight in weights if variable_key(weight) not in local_keys]

    def _agree(self) -> bool:
        process_set = get_training_ranks(self.model.optimizer)
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


def _check_none_or_all(changed: Sequence[int], process_set: ProcessSet) -> None:
    if 0 < len(changed) < process_set.size():
        raise ValueError(
            "Only some ranks have changed the weights of a sharded model at the end "
            f"of training. Received: changes on {name_ranks(changed)}. Put callbacks "
            "such as EarlyStopping(restore_best_weights=True) on every rank, after "
            "hvd.callbacks.MetricAverageCallback()."
        )
