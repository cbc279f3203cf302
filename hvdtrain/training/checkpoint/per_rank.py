"""What differs by rank in the state of a training, back into the ranks."""

import numpy as np

from hvdtrain.collectives.objects import scatter_object
from hvdtrain.job.agreement import on_chief
from hvdtrain.job.world import World
from hvdtrain.keras.callbacks.broadcast import separate_seeds
from hvdtrain.keras.metrics import metric_variables
from hvdtrain.keras.variables import get_process_set
from hvdtrain.training.checkpoint import state, state_variables
from hvdtrain.training.checkpoint.state_variables import StateVariables, assign
from hvdtrain.training.replicas import Replicas


def regrouped(arrays, variables, local_batch_sizes):
    """Return the arrays as a model with these variables would have written them.

    The update at the end of an accumulation window stays the same, to rounding.

    Args:
        arrays: those of a checkpoint.
        variables: the `StateVariables` of the model.
        local_batch_sizes: samples in a batch of each replica that wrote them.

    Raises:
        OtherModelError: replicas had different values of a frozen table that the model
            divides.
    """
    arrays = dict(arrays)
    replicas = [f"rank{number}" for number in range(len(local_batch_sizes))]
    once, per_replica = (
        _names_by_number(arrays, "tables"),
        _names_by_number(arrays, "rank0"),
    )
    replicated = _names_by_number(arrays, "replicated")
    for number in variables.tables.keys() & replicated.keys():
        name = replicated[number]
        arrays[f"tables/{name}"] = arrays.pop(f"replicated/{name}")
    for number in variables.tables.keys() & per_replica.keys():
        name = per_replica[number]
        values = [arrays.pop(f"{replica}/{name}") for replica in replicas]
        if number in variables.accumulated:
            total = mean(values, weights=local_batch_sizes) * len(values)
            arrays[f"tables/{name}"] = total.astype(values[0].dtype)
        else:
            arrays[f"tables/{name}"] = _common(values, name)
    for number in variables.per_replica.keys() & once.keys():
        name = once[number]
        value = arrays.pop(f"tables/{name}")
        if number not in variables.accumulated:
            arrays[f"replicated/{name}"] = value
            continue
        value = (value / len(replicas)).astype(value.dtype)
        arrays |= {f"{replica}/{name}": value for replica in replicas}
    return arrays


def mean(values, weights=None):
    """Return the mean of arrays, in their dtype."""
    # NumPy computes no mean of bfloat16.
    average = np.average([each.astype("float64") for each in values], 0, weights)
    return np.asarray(average).astype(values[0].dtype)


def _names_by_number(arrays, prefix):
    return {state.number_of(name): name for name in state.by_name(arrays, prefix)}


def _common(values, name):
    if any(not np.array_equal(value, values[0]) for value in values):
        raise state.OtherModelError(
            f"{name.partition('/')[2]} differed by rank, and the model divides it"
        )
    return values[0]


class PerRankState:
    """The arrays of a checkpoint that differ by rank, for this rank. A collective.

    Of a model that is divided over ranks, there is a state of each replica: the ranks
    of one take the same state, and their parts of it.

    Args:
        world: the `World`.
        replicas: the `Replicas`.
        variables: the `StateVariables`, with those that the checkpoint has once.
        arrays: those of a checkpoint on the chief; None elsewhere.
        local_batch_sizes: samples in a batch of each replica that wrote them.
    """

    def __init__(
        self,
        world: World,
        replicas: Replicas,
        variables: StateVariables,
        arrays: dict | None,
        local_batch_sizes: list,
    ):
        self._is_same_size = len(local_batch_sizes) == replicas.size
        self._variables = variables.per_replica

        def read():
            states = states_by_replica(
                arrays, replicas.size, variables, local_batch_sizes
            )
            return [each for n, each in enumerate(states) for _ in replicas.ranks(n)]

        states = on_chief(world, read)
        if world.size > 1:
            states = [scatter_object(states, name="PerRankState")]
        (self._state,) = states

    def assign(self, model):
        """Assign all but the states of metrics. A collective, after the broadcast."""
        found = self._state["rank"]
        assign([self._variables[number] for number in found], found.values())
        if not self._is_same_size:
            separate_seeds(model, get_process_set(model.optimizer))

    def restore_generators(self):
        """Restore the global random generators of this rank."""
        if self._is_same_size:
            state_variables.restore(self._state["random"])

    def assign_metrics(self, model):
        """Assign the states of metrics; those of new ones stay what they are."""
        variables = metric_variables(model.metrics)
        for variable, value in zip(variables, self._state["metrics"], strict=True):
            if value is not None:
                variable.assign(value)

    def release(self):
        """Give back the memory: nothing is assigned any more."""
        self._state = None


def states_by_replica(
    arrays: dict, size: int, variables: StateVariables, local_batch_sizes: list
) -> list[dict]:
    """Return what each replica takes of the arrays of a checkpoint.

    Where the number of replicas has changed: accumulated gradients become their mean,
    so that their window gives the same update; replicas take the moving statistics of
    the replica with their number, or of the first one, as the seeds, which are then
    separated; the states of metrics are divided so that their reduction has the same
    result; and the global random generators are left as they are.

    Args:
        arrays: those of a checkpoint.
        size: number of replicas now.
        variables: the `StateVariables`.
        local_batch_sizes: samples in a batch of each replica that wrote them.

    Returns:
        Dicts: "rank", arrays by their number in `StateVariables.own`; "metrics", a list
        of arrays, None for each variable of a new metric; "random", arrays by name.
    """
    groups, before = state.by_prefix(arrays), range(len(local_batch_sizes))
    numbers = state.metric_numbers(variables.metrics, groups.get("metrics0", {}))
    states = [
        {
            "rank": _values_by_number(groups.get(f"rank{number}", {})),
            "metrics": _metrics(groups.get(f"metrics{number}", {}), numbers),
            "random": groups[f"random{number}"],
        }
        for number in before
    ]
    if len(states) == size:
        return states
    accumulated = _mean_accumulated(states, variables, local_batch_sizes)
    metrics = _combined_metrics(states, variables)
    return [
        {
            "rank": states[n if n in before else 0]["rank"] | accumulated,
            "metrics": metrics[min(n, 1)],
        }
        for n in range(size)
    ]


def _values_by_number(group):
    return {state.number_of(name): value for name, value in group.items()}


def _metrics(group, numbers):
    found = _values_by_number(group)
    return [None if number is None else found[number] for number in numbers]


def _mean_accumulated(states, variables, local_batch_sizes):
    return {
        number: mean([each["rank"][number] for each in states], local_batch_sizes)
        for number in variables.accumulated
        if number in states[0]["rank"]
    }


def _combined_metrics(states, variables):
    """Return the states of metrics for the first replica, and for any other one.

    Their reduction over the new replicas has the result of the old ones.
    """
    first, others = [], []
    by_variable = zip(*(each["metrics"] for each in states), strict=True)
    for variable, values in zip(variables.metrics, by_variable, strict=True):
        first.append(_combined(variable, values))
        is_sum = variable.aggregation not in ("mean", "only_first_replica")
        is_new = first[-1] is None
        others.append(np.zeros_like(first[-1]) if is_sum and not is_new else first[-1])
    return first, others


def _combined(variable, values):
    if values[0] is None:
        return None
    if variable.aggregation == "mean":
        return mean(values)
    if variable.aggregation == "only_first_replica":
        return values[0]
    return np.sum(values, axis=0, dtype=values[0].dtype)
