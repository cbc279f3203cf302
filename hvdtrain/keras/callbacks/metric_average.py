"""Metrics of an epoch over the samples of all ranks."""

import numbers
import statistics

import keras
import numpy as np

from hvdtrain.collectives.objects import allgather_object
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.keras.metrics import (
    is_result,
    local_states,
    metric_variables,
    reduce_states,
    results,
)
from hvdtrain.keras.variables import get_process_set


class MetricAverageCallback(keras.callbacks.Callback):
    """Makes the logs of each epoch those of one process with all ranks' samples.

    Horovod's callback averages the ranks' results. This one combines the metrics'
    states, so that AUC, precision, F1 or IoU are right too, and ranks may have seen
    different numbers of samples. That holds for the training metrics and for those
    of `validation_data`, with their prefix `val_`; a rank without validation data
    gets the others' results. The ranks are those of the optimizer's `process_set`.

    Put it before the callbacks that read logs (`ReduceLROnPlateau`,
    `EarlyStopping`, `ModelCheckpoint`, `TensorBoard`, ...): they then read the same
    numbers on every rank, and act in the same epoch.

    Logged numbers that are no metric of the model (a learning rate, or the
    losses that a user's `train_step` returns) are averaged over the ranks that log
    them. Metrics that have not been built, before the first batch, are left out.

    Args:
        device: where the states are summed; "" is the default device.

    Raises:
        ValueError: at the end of an epoch, on every rank, if some ranks have had no
            batch, so that their metrics have not been built.
    """

    def __init__(self, device=""):
        super().__init__()
        self._device = device
        self._training_states = None
        self._epoch_logs = {}

    def on_epoch_begin(self, epoch, logs=None):
        """Discards the states of the previous epoch."""
        self._training_states = None

    def on_test_begin(self, logs=None):
        """Copies the training metrics, which validation resets."""
        self._training_states = local_states(metric_variables(self.model.metrics))

    def on_epoch_end(self, epoch, logs=None):
        """Replaces the values in `logs` by those of the whole job."""
        if not needs_communication(get_process_set(self.model.optimizer)):
            return
        logs = {} if logs is None else logs
        current = local_states(metric_variables(self.model.metrics))
        if self._training_states is None:
            states = {"": current}
        else:
            states = {"": self._training_states, "val_": current}
        self._epoch_logs = self._of_all_ranks(logs, states)
        logs.update(self._epoch_logs)

    def on_train_end(self, logs=None):
        """Repeats the last epoch's values: `fit` passes the local ones again."""
        if logs is not None:
            logs.update(self._epoch_logs)

    def _of_all_ranks(self, logs, states):
        tracked = self._results(states)
        report = {
            key: (value, is_result(value, key, tracked)) for key, value in logs.items()
        }
        # Ranks may have different keys, and a collective for a key that only some of
        # them have would block: so the keys are gathered first.
        process_set = get_process_set(self.model.optimizer)
        everyone = allgather_object(
            (list(states), report), name="MetricLogs", process_set=process_set
        )
        if any("val_" in prefixes for prefixes, _ in everyone):
            states.setdefault("val_", [np.zeros_like(s) for s in states[""]])
        exact = self._results(self._reduce(states, process_set))
        return _merge([report for _, report in everyone], exact)

    def _reduce(self, states, process_set):
        snapshots = reduce_states(
            self.model.metrics,
            list(states.values()),
            device=self._device,
            process_set=process_set,
        )
        return dict(zip(states, snapshots, strict=True))

    def _results(self, states):
        return {
            prefix + name: value
            for prefix, snapshot in states.items()
            for name, value in results(self.model.metrics, snapshot).items()
        }


def _merge(reports, exact):
    merged = {}
    for key in sorted(set().union(*reports)):
        entries = [report[key] for report in reports if key in report]
        values = [value for value, _ in entries]
        if all(is_tracked for _, is_tracked in entries):
            merged[key] = exact[key]
        elif all(_is_number(value) for value in values):
            merged[key] = statistics.mean(map(float, values))
    return merged


def _is_number(value):
    # Of Python or NumPy, and arrays and tensors without axes; no bool, no str.
    is_scalar = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    return is_scalar and np.asarray(value).dtype.kind in "iuf"
