"""Metrics over the samples of all ranks: states are reduced, and not results.

The mean of two ranks' results is right only for metrics that are plain means over
equally many samples. The sums inside a metric can be added for any of them; the
result is then computed once, from the totals, as one process would have done.
"""

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.dtypes import as_tensorflow
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
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
    "only_first_replica" is taken from the first rank. A metric of your own whose
    state is, for example, a maximum cannot be combined that way.

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
    variables = metric_variables(metrics)
    (states,) = reduce_states(
        variables, [local_states(variables)], device=device, process_set=process_set
    )
    return results(metrics, states)


def metric_variables(metrics):
    """The state variables of all `metrics`, in the order of every rank."""
    return [variable for metric in metrics for variable in metric.variables]


def local_states(variables):
    """Copies of the values of `variables`, as NumPy arrays."""
    # np.array copies: on the CPU, numpy() of a variable may share its memory.
    return [np.array(variable.numpy()) for variable in variables]


def reduce_states(variables, snapshots, *, device="", process_set=global_process_set):
    """Combines several snapshots of `variables` over all ranks, in one reduction.

    Args:
        variables: list of metric variables.
        snapshots: list of lists of arrays, each as `local_states` returns it; of
            the same length on every rank.
        device: where the states are summed.
        process_set: the ranks that take part.

    Returns:
        The combined snapshots, the same on every rank.
    """
    if not needs_communication(process_set):
        return snapshots
    _check_same_number(variables, process_set)
    if not variables:
        return snapshots
    is_first = process_set.rank() == 0
    sent = [
        state
        if is_first or variable.aggregation != "only_first_replica"
        else np.zeros_like(state)
        for snapshot in snapshots
        for variable, state in zip(variables, snapshot, strict=True)
    ]
    with tf.device(device):
        totals = ops.grouped_allreduce(
            sent, name="MetricStates", op=Sum, process_set=process_set
        )
    totals = iter([total.numpy() for total in totals])
    return [
        [_combined(variable, next(totals), process_set) for variable in variables]
        for _ in snapshots
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


def _is_built(metric):
    # Keras builds the metrics of compile with the first batch; before, result() raises.
    return getattr(metric, "built", True)


def _combined(variable, total, process_set):
    if variable.aggregation == "mean":
        return (total / process_set.size()).astype(total.dtype)
    return total


def _check_same_number(variables, process_set):
    # Different numbers of tensors would be refused without naming the metrics.
    counts = ops.allgather([len(variables)], "MetricCounts", process_set=process_set)
    counts = counts.numpy().tolist()
    if len(set(counts)) > 1:
        raise ValueError(
            "The ranks' metrics differ. Numbers of state variables, by rank: "
            f"{counts}. Metrics get their variables with their first batch: compile "
            "the same metrics and give at least one batch to every rank."
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
