"""Metrics of an epoch over the samples of all ranks."""

import numbers
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.objects import allgather_object
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.keras.callbacks.fit_start import SharedCallback
from hvdtrain.keras.callbacks.joining import JoinCallback
from hvdtrain.keras.metrics import (
    Share,
    is_result,
    local_states,
    metric_variables,
    names_of_states,
    reduce_states,
    results,
)
from hvdtrain.keras.replication import get_process_set
from hvdtrain.keras.seams import replace

# The value that a rank has logged, and whether it is the result of a metric.
Entry = tuple[Any, bool]


class _Report(NamedTuple):
    """What a rank has at the end of an epoch."""

    # "" for states of the training metrics, "val_" for validation.
    prefixes: list[str]
    # By name in the logs.
    entries: dict[str, Entry]


class _KeptStates:
    """Stands for `model.reset_metrics`; keeps the states from before the resets.

    An evaluation resets the metrics: the validation of `fit`, or one that a callback
    starts before the states of training are read.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._original = vars(model).get("reset_metrics")
        self._reset = replace(model, "reset_metrics", self, by=_KeptStates)
        self.states: list[list[np.ndarray]] = []

    def __call__(self) -> None:
        # In a graph, variables have no value.
        if tf.executing_eagerly():
            variables = metric_variables(self._model.metrics)
            self.states.append(local_states(variables))
        self._reset()

    def remove(self) -> None:
        """Put back what this stands for, unless it was removed before."""
        self.states.clear()
        if vars(self._model).get("reset_metrics") is not self:
            return
        del self._model.reset_metrics
        if self._original is not None:
            replace(self._model, "reset_metrics", self._original, by=_KeptStates)


class MetricAverageCallback(SharedCallback):
    """Logs for each epoch what one process with all ranks' samples would log.

    Horovod's callback averages the ranks' results. This one combines the metrics'
    states, so that AUC, precision, F1 or IoU are right too, and ranks may have seen
    different numbers of samples. Metrics of `validation_data`, with their prefix
    `val_`, are combined as well; a rank without validation data gets the others'
    results. The ranks are those of the optimizer's `process_set`.

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

    belongs_after: ClassVar = (JoinCallback,)

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._device = device
        self._epoch_logs: dict[str, Any] = {}

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        present = vars(model).get("reset_metrics")
        is_kept = isinstance(present, _KeptStates)
        self._kept = present if is_kept else _KeptStates(model)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._kept.states.clear()

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._kept.states.clear()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if not needs_communication(get_process_set(self.model.optimizer)):
            return
        logs = {} if logs is None else logs
        self._epoch_logs = self._combine(logs, self._logged_states(logs))
        logs.update(self._epoch_logs)

    def on_train_end(self, logs: dict | None = None) -> None:
        # `fit` passes the last epoch's logs of this rank again.
        if logs is not None:
            logs.update(self._epoch_logs)
        self._kept.remove()

    def _logged_states(self, logs: dict) -> dict[str, list[np.ndarray]]:
        """Return the states of which `logs` has the results, by the prefix there."""
        present = local_states(metric_variables(self.model.metrics))
        # Metrics get their variables with the first batch.
        kept = [states for states in self._kept.states if len(states) == len(present)]
        candidates = [*kept, present]
        states_by_prefix = {"": present}
        for prefix in ("", "val_"):
            counts = [
                _count_results(logs, self._results({prefix: states}))
                for states in candidates
            ]
            if any(counts):
                place = counts.index(max(counts))
                states_by_prefix[prefix] = candidates[place]
                # Validation comes after training.
                candidates = candidates[place + 1 :]
        return states_by_prefix

    def _combine(
        self, logs: dict, states: dict[str, list[np.ndarray]]
    ) -> dict[str, Any]:
        local_results = self._results(states)
        states_by_name = names_of_states(self.model.metrics)
        entries = {
            key: (
                value,
                key in states_by_name or is_result(value, key, local_results),
            )
            for key, value in logs.items()
        }
        # Ranks may have different keys, and a collective for a key that only some of
        # them have would block: so the keys are gathered first.
        process_set = get_process_set(self.model.optimizer)
        reports = allgather_object(
            _Report(list(states), entries), name="MetricLogs", process_set=process_set
        )
        validated = [i for i, each in enumerate(reports) if "val_" in each.prefixes]
        shares = [Share(process_set.rank(), len(reports))]
        if validated:
            # The states of ranks that have not validated are not counted.
            states.setdefault("val_", states[""])
            index = _position(process_set.rank(), validated)
            shares.append(Share(index, len(validated)))
        reduced = reduce_states(
            self.model.metrics,
            list(states.values()),
            shares=shares,
            device=self._device,
            process_set=process_set,
        )
        exact = self._results(dict(zip(states, reduced, strict=True)))
        return _merge([report.entries for report in reports], exact)

    def _results(self, states: Mapping[str, list[np.ndarray]]) -> dict[str, Any]:
        return {
            prefix + name: value
            for prefix, snapshot in states.items()
            for name, value in results(self.model.metrics, snapshot).items()
        }


def _position(rank: int, ranks: Sequence[int]) -> int | None:
    return ranks.index(rank) if rank in ranks else None


def _count_results(logs: dict, found: Mapping[str, Any]) -> int:
    return sum(is_result(logs[name], name, found) for name in found if name in logs)


def _merge(
    entries_by_rank: Sequence[dict[str, Entry]], exact: Mapping[str, Any]
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in sorted(set().union(*entries_by_rank)):
        entries = [by_key[key] for by_key in entries_by_rank if key in by_key]
        values = [value for value, _ in entries]
        if all(is_tracked for _, is_tracked in entries):
            merged[key] = exact[key]
        elif all(_is_number(value) for value in values):
            merged[key] = statistics.mean(map(float, values))
    return merged


def _is_number(value: object) -> bool:
    # Numbers of Python or NumPy, and arrays and tensors without axes; no bool or str.
    is_scalar = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    return is_scalar and np.asarray(value).dtype.kind in "iuf"
