"""Metrics over the samples of all ranks: states are reduced, and not results.

The mean of two ranks' results is right only for metrics that are plain means over
equally many samples. The sums inside a metric can be added for any of them; the
result is then computed once, from the totals, as one process would have done.
"""

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

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


def reduce_metrics(metrics, *, device="", process_set=global_process_set):
    """Returns what `metrics` would be, had one process seen all ranks' samples.

    Every rank of `process_set` must call it. The metrics themselves keep their
    local states. To evaluate a model on unequal shards, exactly:

        from hvdtrain.keras import metrics

        model.evaluate(shard, verbose=0)
        results = metrics.reduce_metrics(model.metrics)

    Each state variable is combined according to its Keras `aggregation`: "sum" (what
    `Metric.add_variable` gives) and "none" are added, "mean" is averaged,
    "only_first_replica" is taken from the first rank. The metrics of Keras have sums. A
    metric of your own whose state is, for example, a maximum cannot be combined that
    way: states of which it is not known are added up with a warning.

    Args:
        metrics: list of `keras.Metric`, such as `model.metrics`.
        device: where the states are summed; "" is the default device.
        process_set: the ranks that take part.

    Returns:
        Dict from a metric's name to a float, or to an array for a metric whose
        result is one: the keys and values of `model.get_metrics_result()`, flat.

    Raises:
        ValueError: on every rank, if a metric has no variables yet on one of them.
    """
    snapshots = [local_states(metric_variables(metrics))]
    (states,) = reduce_states(
        metrics, snapshots, device=device, process_set=process_set
    )
    return results(metrics, states)


def metric_variables(metrics):
    """The state variables of all `metrics`, in the order of every rank."""
    return [variable for metric in metrics for variable in metric.variables]


def local_states(variables):
    """Copies of the values of `variables`, as NumPy arrays."""
    # np.array copies: on the CPU, numpy() of a variable may share its memory.
    return [np.array(variable.numpy()) for variable in variables]


def are_sums(metrics: Sequence[keras.Metric]) -> list[bool]:
    """Return for each of `metric_variables(metrics)` whether it is known to be a sum.

    Those are the states from which a method `result` of Keras computes the result. By
    default a metric of a user has "sum" as `aggregation`, whatever its states are.
    """
    known = {id(v) for part in _parts(metrics) for v in _states_of_keras(part)}
    return [id(variable) in known for variable in metric_variables(metrics)]


def _parts(metrics: Iterable) -> Iterator[keras.Metric]:
    """Yield the metrics and those inside them."""
    for metric in metrics:
        yield metric
        # Those of `compile` are in a container that does not track them. A user's class
        # may have anything else of this name.
        inside = getattr(metric, "metrics", None)
        inside = inside if isinstance(inside, list | tuple) else []
        inside = [part for part in inside if isinstance(part, keras.Metric)]
        yield from _parts([*metric._metrics, *inside])


def _states_of_keras(metric: keras.Metric) -> list[keras.Variable]:
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
    for part in _parts(metrics):
        for variable in part._variables:
            is_added = variable.aggregation in ("sum", "none")
            if is_added and not _states_of_keras(part):
                _warn_of_state(variable.name, part.name, type(part).__name__)


def reduce_states(
    metrics: Sequence[keras.Metric],
    snapshots: list[list[np.ndarray]],
    *,
    device: str = "",
    process_set: ProcessSet = global_process_set,
) -> list[list[np.ndarray]]:
    """Combines several snapshots of `metrics` over all ranks, in one reduction.

    Args:
        metrics: list of `keras.Metric`.
        snapshots: list of lists of arrays, each as `local_states` returns it for the
            `metric_variables`; of the same length on every rank.
        device: where the states are summed.
        process_set: the ranks that take part.

    Returns:
        The combined snapshots, the same on every rank.
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
    totals = iter([total.numpy() for total in totals])
    # After the reduction: a warning may be an error, for which no rank is to wait.
    if process_set.rank() == 0:
        _warn_of_other_states(metrics)
    return [
        combined(variables, [next(totals) for _ in variables], process_set)
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


def results(metrics, states):
    """Results that `metrics` have in the given states, as Keras puts them in logs.

    Args:
        metrics: list of `keras.Metric`.
        states: list of arrays, one for each of `metric_variables(metrics)`.

    Returns:
        Flat dict from name to float, or to an array where a result is one; without
        metrics that have not been built.
    """
    # In this scope the variables read as `states`, and stay what they are.
    with keras.StatelessScope(
        list(zip(metric_variables(metrics), states, strict=True))
    ):
        return _flatten({m.name: m.result() for m in metrics if _is_built(m)})


def is_result(value: object, name: str, found: Mapping[str, object]) -> bool:
    """Whether a logged `value` is the result of a metric: one of `results`, `found`.

    A `train_step` or a callback may log something else under the name of a metric.
    """
    if name not in found or np.shape(value) != np.shape(found[name]):
        return False
    return np.allclose(value, found[name], rtol=1e-4, equal_nan=True)


def _is_built(metric):
    # Keras builds the metrics of compile with the first batch; before, result() raises.
    return getattr(metric, "built", True)


def _check_same_number(variables, process_set):
    # Different numbers of tensors would be refused without naming the metrics.
    counts = ops.allgather([len(variables)], "MetricCounts", process_set=process_set)
    groups = group_by_value(counts.numpy().tolist(), process_set.ranks)
    if len(groups) > 1:
        raise ValueError(
            "The ranks' metrics differ. The number of state variables is "
            f"{name_values(groups)}. Metrics get their variables with their first "
            "batch: compile the same metrics and give at least one batch to every rank."
        )


def _flatten(results_by_name):
    flat = {}
    for name, value in results_by_name.items():
        if isinstance(value, dict):
            flat.update(_flatten(value))
            continue
        value = as_tensorflow(value).numpy()
        flat[name] = float(value) if value.ndim == 0 else value
    return flat
