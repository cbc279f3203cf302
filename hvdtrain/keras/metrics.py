"""Metrics over the samples of all ranks: states are reduced, and not results.

The mean of two ranks' results is right only for metrics that are plain means over
equally many samples. The sums inside a metric can be added for any of them; the
result is then computed once, from the totals, as one process would have done.
"""

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.dtypes import as_tensorflow
from hvdtrain.collectives.objects import group_by_value, name_values
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    needs_communication,
)
from hvdtrain.collectives.transport import Sum

# An array, if the result of a metric is not a scalar.
Result: TypeAlias = float | np.ndarray


def reduce_metrics(
    metrics: Sequence[keras.Metric],
    *,
    device: str = "",
    process_set: ProcessSet = global_process_set,
) -> dict[str, Result]:
    """Return what `metrics` would be, had one process seen all ranks' samples.

    Every rank of `process_set` must call it. The metrics themselves keep their
    local states. To evaluate a model exactly where ranks have unequal data:

        from hvdtrain.keras import metrics

        model.evaluate(data_of_this_rank, verbose=0)
        results = metrics.reduce_metrics(model.metrics)

    Each state variable is combined according to its Keras `aggregation`: "sum" (what
    `Metric.add_variable` gives) and "none" are added, "mean" is averaged,
    "only_first_replica" is taken from the first rank. The metrics of Keras have sums. A
    metric of your own whose state is, for example, a maximum cannot be combined that
    way: states that are not known to be sums are added up with a warning.

    Args:
        metrics: such as `model.metrics`.
        device: where the states are summed; "" is the default device.

    Returns:
        The keys and values of `model.get_metrics_result()`, flat.

    Raises:
        ValueError: on every rank, if a metric has no variables yet on one of them.
    """
    snapshots = [local_states(metric_variables(metrics))]
    (states,) = reduce_states(
        metrics, snapshots, device=device, process_set=process_set
    )
    return results(metrics, states)


def metric_variables(metrics: Iterable[keras.Metric]) -> list[keras.Variable]:
    """Return the state variables of all `metrics`, in one order on all ranks."""
    return [variable for metric in metrics for variable in metric.variables]


def local_states(variables: Iterable[keras.Variable]) -> list[np.ndarray]:
    """Return copies of the values of `variables`."""
    # np.array copies: on the CPU, numpy() of a variable may share its memory.
    return [np.array(variable.numpy()) for variable in variables]


def are_sums(metrics: Sequence[keras.Metric]) -> list[bool]:
    """Return for each of `metric_variables(metrics)` whether it is known to be a sum.

    It is known if a method `result` of Keras computes the result from the state. The
    `aggregation` is no evidence: it is "sum" by default, for any state of a user.
    """
    known = {
        id(variable)
        for metric in _with_inner_metrics(metrics)
        for variable in _states_known_to_keras(metric)
    }
    return [id(variable) in known for variable in metric_variables(metrics)]


def _with_inner_metrics(metrics: Iterable[keras.Metric]) -> Iterator[keras.Metric]:
    for metric in metrics:
        yield metric
        # The metrics of `compile` are in a container that does not track them. In a
        # user's class, this attribute may be anything.
        inner = getattr(metric, "metrics", None)
        inner = inner if isinstance(inner, list | tuple) else []
        tracked = [m for m in inner if isinstance(m, keras.Metric)]
        yield from _with_inner_metrics([*metric._metrics, *tracked])


def _states_known_to_keras(metric: keras.Metric) -> list[keras.Variable]:
    is_of_keras = type(metric).result.__module__.startswith("keras.")
    return metric._variables if is_of_keras else []


@functools.cache
def _warn_of_state(state: str, metric: str, kind: str) -> None:
    warnings.warn(
        f"The state {state!r} of the metric {metric!r} ({kind}) is added up over the "
        "ranks, and is not known to be a sum: the result is wrong if it is a maximum, "
        "for example, which Keras cannot aggregate. Keep sums in attributes that are "
        "keras.metrics.Sum or Mean; reduce a maximum by hvd.allreduce in a callback.",
        stacklevel=4,
    )


def _warn_of_other_states(metrics: Sequence[keras.Metric]) -> None:
    for metric in _with_inner_metrics(metrics):
        for variable in metric._variables:
            is_added = variable.aggregation in ("sum", "none")
            if is_added and not _states_known_to_keras(metric):
                _warn_of_state(variable.name, metric.name, type(metric).__name__)


def reduce_states(
    metrics: Sequence[keras.Metric],
    snapshots: list[list[np.ndarray]],
    *,
    device: str = "",
    process_set: ProcessSet = global_process_set,
) -> list[list[np.ndarray]]:
    """Combine several snapshots of `metrics` over all ranks, in one reduction.

    A snapshot is the `local_states` of the `metric_variables`. All ranks have the same
    metrics and equally many snapshots.
    """
    if not needs_communication(process_set):
        return snapshots
    variables = metric_variables(metrics)
    _check_same_number(variables, process_set)
    if not variables:
        return snapshots
    sent = [
        state
        for snapshot in snapshots
        for state in addends(variables, snapshot, process_set)
    ]
    with tf.device(device):
        totals = ops.grouped_allreduce(
            sent, name="MetricStates", op=Sum, process_set=process_set
        )
    arrays = iter([total.numpy() for total in totals])
    # After the reduction: where warnings are errors, the other ranks would block in it.
    if process_set.rank() == 0:
        _warn_of_other_states(metrics)
    return [
        combined(variables, [next(arrays) for _ in variables], process_set)
        for _ in snapshots
    ]


def addends(
    variables: Sequence[keras.Variable],
    states: list[np.ndarray],
    process_set: ProcessSet,
) -> list[np.ndarray]:
    """Return what this rank adds to the sums from which `combined` computes."""
    is_first = process_set.rank() == 0
    return [
        state
        if is_first or variable.aggregation != "only_first_replica"
        else np.zeros_like(state)
        for variable, state in zip(variables, states, strict=True)
    ]


def combined(
    variables: Sequence[keras.Variable],
    totals: list[np.ndarray],
    process_set: ProcessSet,
) -> list[np.ndarray]:
    """Return the states of one process, from sums over the ranks."""
    size = process_set.size()
    return [
        (total / size if variable.aggregation == "mean" else total).astype(total.dtype)
        for variable, total in zip(variables, totals, strict=True)
    ]


def results(
    metrics: Sequence[keras.Metric], states: Sequence[np.ndarray]
) -> dict[str, Result]:
    """Return the results of `metrics` in some states, flat, as Keras puts them in logs.

    There is one state for each of `metric_variables(metrics)`. Metrics that have not
    been built are left out.
    """
    # In this scope the variables read as `states`; their values do not change.
    with keras.StatelessScope(
        list(zip(metric_variables(metrics), states, strict=True))
    ):
        # Keras builds the metrics of compile with the first batch; before, result()
        # raises.
        built = [metric for metric in metrics if getattr(metric, "built", True)]
        return _flatten({metric.name: metric.result() for metric in built})


def is_result(value: Any, name: str, results_by_name: Mapping[str, Result]) -> bool:
    """Return whether a logged `value` is the result of the metric of this name.

    A `train_step` or a callback may log something else under the name of a metric.
    """
    result = results_by_name.get(name)
    if result is None or np.shape(value) != np.shape(result):
        return False
    return np.allclose(value, result, rtol=1e-4, equal_nan=True)


def _check_same_number(
    variables: Sequence[keras.Variable], process_set: ProcessSet
) -> None:
    # A reduction of different numbers of tensors fails with an error that does not name
    # the metrics.
    counts = ops.allgather([len(variables)], "MetricCounts", process_set=process_set)
    groups = group_by_value(counts.numpy().tolist(), process_set.ranks)
    if len(groups) > 1:
        raise ValueError(
            "The ranks' metrics differ. The number of state variables is "
            f"{name_values(groups)}. Metrics get their variables with their first "
            "batch: compile the same metrics and give at least one batch to every rank."
        )


def _flatten(results_by_name: Mapping[str, Any]) -> dict[str, Result]:
    flat: dict[str, Result] = {}
    for name, value in results_by_name.items():
        if isinstance(value, dict):
            flat.update(_flatten(value))
            continue
        value = as_tensorflow(value).numpy()
        flat[name] = float(value) if value.ndim == 0 else value
    return flat
