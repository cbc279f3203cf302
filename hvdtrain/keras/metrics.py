"""Metrics over the samples of all ranks: states are reduced, and not results.

The mean of two ranks' results is right only for metrics that are plain means over
equally many samples. The sums inside a metric can be added for any of them; the
result is then computed once, from the totals, as one process would have done.

Each way to a metric over all ranks goes through `addends`, a sum over the ranks, and
`combined`: `reduce_metrics`, `MetricAverageCallback`, the evaluations and reports of
`training`, and `keras.distribution`.
"""

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

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
State: TypeAlias = np.ndarray | tf.Tensor

_EXTREMES = {"max": tf.reduce_max, "min": tf.reduce_min}
_AGGREGATIONS = ("sum", "none", "mean", "only_first_replica", *_EXTREMES)


def set_aggregation(variable: keras.Variable, aggregation: str) -> keras.Variable:
    """Declare how the ranks' values of a metric's state are combined; return it.

    Like the argument `aggregation` of `Metric.add_variable`, which has neither "max"
    nor "min":

        def __init__(self, **options):
            super().__init__(**options)
            largest = self.add_variable((), "zeros", name="largest")
            self.largest = metrics.set_aggregation(largest, "max")

    Args:
        aggregation: "sum" or "none", "mean", "only_first_replica", "max" or "min".

    Raises:
        ValueError: for another name.
    """
    if aggregation not in _AGGREGATIONS:
        raise ValueError(
            f"Received aggregation={aggregation!r} for {variable.name!r}; expected one "
            f"of {', '.join(_AGGREGATIONS)}."
        )
    variable._hvdtrain_aggregation = aggregation
    return variable


def _aggregation(variable: keras.Variable) -> str:
    return getattr(variable, "_hvdtrain_aggregation", variable.aggregation)


class Share(NamedTuple):
    """The rank of this process among the ranks with a value, and their number.

    Attributes:
        rank: None if this rank has no value.
        size: number of ranks with a value.
    """

    rank: int | None
    size: int


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
    metric of your own whose state is a maximum declares it by `set_aggregation`. States
    that are not known to be sums are added up with a warning.

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
    return [
        id(variable) in known and _aggregation(variable) not in _EXTREMES
        for variable in metric_variables(metrics)
    ]


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
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def warn_of_states(metrics: Sequence[keras.Metric]) -> None:
    """Warn once of each metric that the sum of states may give another value.

    Call it on one rank.
    """
    for metric in _with_inner_metrics(metrics):
        kind = f"{metric.name!r} ({type(metric).__name__})"
        for variable in metric._variables:
            is_declared = hasattr(variable, "_hvdtrain_aggregation")
            is_added = _aggregation(variable) in ("sum", "none")
            if is_added and not is_declared and not _states_known_to_keras(metric):
                _warn(
                    f"The state {variable.name!r} of the metric {kind} is added up "
                    "over the ranks, and is not known to be a sum: the result is wrong "
                    "if it is a maximum, for example. Declare it by hvdtrain.keras."
                    "metrics.set_aggregation(variable, 'max'), or 'sum', or keep sums "
                    "in attributes that are keras.metrics.Sum or Mean."
                )
        if joined := joined_samples(metric):
            _warn(
                f"The metric {kind} is computed of the samples of a batch ({joined}), "
                "by each rank from its own batch: the result is a mean over ranks, and "
                "not the result of one process. Compute it of hvd.allgather(y_true) "
                "and hvd.allgather(y_pred), or of the predictions for all samples."
            )


def joined_samples(function: keras.Metric | keras.losses.Loss) -> str:
    """Return what a metric or loss of Keras computes of several samples, or ""."""
    options = getattr(function, "_fn_kwargs", None)
    if not isinstance(options, dict):
        return ""
    if _has_own_call(function):
        return ""
    inner = getattr(function, "_fn", getattr(function, "fn", None))
    if inner is keras.losses.circle:
        return "their pairs"
    of_batches = (keras.losses.dice, keras.losses.tversky)
    axis = options.get("axis", None if inner in of_batches else -1)
    axes = axis if isinstance(axis, list | tuple) else [axis]
    return f"axis={axis}" if None in axes or 0 in axes else ""


def _has_own_call(function: keras.Metric | keras.losses.Loss) -> bool:
    """Return whether a user's subclass computes the values, as of gathered samples."""
    name = "call" if isinstance(function, keras.losses.Loss) else "update_state"
    defined_in = next(cls for cls in type(function).__mro__ if name in vars(cls))
    return not defined_in.__module__.startswith("keras.")


def reduce_states(
    metrics: Sequence[keras.Metric],
    snapshots: list[list[np.ndarray]],
    *,
    shares: Sequence[Share] | None = None,
    device: str = "",
    process_set: ProcessSet = global_process_set,
) -> list[list[np.ndarray]]:
    """Combine several snapshots of `metrics` over all ranks, in one reduction.

    A snapshot is the `local_states` of the `metric_variables`. All ranks have the same
    metrics and equally many snapshots, and by default values in all of them.
    """
    if not needs_communication(process_set):
        return snapshots
    variables = metric_variables(metrics)
    _check_same_number(variables, process_set)
    if not variables:
        return snapshots
    every_rank = Share(process_set.rank(), process_set.size())
    shares = shares or [every_rank] * len(snapshots)
    sent = [
        state
        for snapshot, share in zip(snapshots, shares, strict=True)
        for state in addends(variables, snapshot, share)
    ]
    with tf.device(device):
        totals = iter(
            ops.grouped_allreduce(
                sent, name="MetricStates", op=Sum, process_set=process_set
            )
        )
    if process_set.rank() == 0:
        warn_of_states(metrics)
    return [
        [
            state.numpy()
            for state in combined(
                variables, [next(totals) for _ in variables], share.size
            )
        ]
        for share in shares
    ]


def addends(
    variables: Sequence[keras.Variable], states: Sequence[State], share: Share
) -> list[tf.Tensor]:
    """Return what a rank adds to the sums from which `combined` computes."""
    return [
        _addend(_aggregation(variable), tf.convert_to_tensor(state), share)
        for variable, state in zip(variables, states, strict=True)
    ]


def _addend(aggregation: str, state: tf.Tensor, share: Share) -> tf.Tensor:
    if aggregation in _EXTREMES:
        # A row for each rank: the sum over ranks has all values.
        rows = [tf.zeros_like(state)] * share.size
        if share.rank is not None:
            rows[share.rank] = state
        return tf.stack(rows)
    is_first_alone = aggregation == "only_first_replica"
    is_added = share.rank == 0 if is_first_alone else share.rank is not None
    return state if is_added else tf.zeros_like(state)


def combined(
    variables: Sequence[keras.Variable], totals: Sequence[State], size: int
) -> list[tf.Tensor]:
    """Return the states of one process, from sums over ranks.

    Args:
        totals: the sums of `addends`.
        size: number of ranks with a value.
    """
    return [
        _combined(_aggregation(variable), tf.convert_to_tensor(total), size)
        for variable, total in zip(variables, totals, strict=True)
    ]


def _combined(aggregation: str, total: tf.Tensor, size: int) -> tf.Tensor:
    if aggregation in _EXTREMES:
        return _EXTREMES[aggregation](total, axis=0)
    return tf.cast(total / size, total.dtype) if aggregation == "mean" else total


def results(
    metrics: Sequence[keras.Metric], states: Sequence[State]
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


def names_of_states(metrics: Sequence[keras.Metric]) -> set[str]:
    """Return the names of results that are variables, not values.

    Keras' `fit` logs the value that such a variable has after the validation.
    """
    found: dict[str, Any] = {}
    for metric in metrics:
        if getattr(metric, "built", True):
            result = metric.result()
            found |= result if isinstance(result, dict) else {metric.name: result}
    return {name for name, value in found.items() if isinstance(value, keras.Variable)}


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
        value = tf.convert_to_tensor(as_tensorflow(value)).numpy()
        flat[name] = float(value) if value.ndim == 0 else value
    return flat
