"""Per-rank state of a checkpoint: seeds, metrics, gradients, random generators.

With another number of replicas than before, the state is converted so that the next
update and the metrics of the epoch stay the same.
"""

import math
import random
from collections.abc import Iterable, Sequence
from typing import TypedDict

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

from hvdtrain.checkpoint.header import (
    CALLBACKS,
    CALLBACKS_JSON,
    METRICS,
    RANDOM,
    RANK,
    REPLICATED,
    TABLES,
    ArrayGroups,
    Arrays,
    OtherModelError,
    array_name,
)
from hvdtrain.checkpoint.state_variables import StateVariables, assign
from hvdtrain.collectives.objects import scatter_object
from hvdtrain.job.agreement import on_chief
from hvdtrain.job.world import World
from hvdtrain.keras import layer_state
from hvdtrain.keras.metrics import metric_variables
from hvdtrain.keras.replication import get_process_set
from hvdtrain.keras.seeds import seed_states, separate_seeds
from hvdtrain.parallel.replicas import Replicas
from hvdtrain.sharding.shards import get_sharding

# A variable of a metric: the key of its path (see `KerasNames.keys`), shape and dtype.
_Described = tuple[str, tuple[int, ...], str]


class ReplicaState(TypedDict, total=False):
    """The state that one replica takes from a checkpoint.

    rank: values by number in `StateVariables.own`.
    metrics: values of `StateVariables.metrics`; None for each new one.
    random: states of the global random generators by name; absent if the number of
        replicas has changed.
    callbacks: states of the callbacks, of each rank.
    """

    rank: dict[int, np.ndarray]
    metrics: list[np.ndarray | None]
    random: dict[str, np.ndarray]
    callbacks: dict[str, np.ndarray]


def regroup(
    arrays: Arrays, variables: StateVariables, local_batch_sizes: Sequence[int]
) -> dict[str, np.ndarray]:
    """Convert arrays between tables sharded over replicas and tables that are not.

    Return the arrays as a model with these variables would have written them. The
    update at the end of an accumulation window stays the same, to rounding: the
    accumulated gradient of a sharded table is a sum over replicas.

    Raises:
        OtherModelError: replicas had different values of a frozen table that the model
            shards.
    """
    groups, arrays = ArrayGroups(arrays), dict(arrays)
    tables, replicated = groups.by_number(TABLES), groups.by_number(REPLICATED)
    per_replica = groups.by_number(RANK.format(0))
    prefixes = [RANK.format(number) for number in range(len(local_batch_sizes))]
    for number in variables.tables.keys() & replicated.keys():
        path = replicated[number].path
        value = arrays.pop(array_name(REPLICATED, number, path))
        arrays[array_name(TABLES, number, path)] = value
    for number in variables.tables.keys() & per_replica.keys():
        path = per_replica[number].path
        values = [arrays.pop(array_name(prefix, number, path)) for prefix in prefixes]
        if number in variables.accumulated:
            total = mean(values, weights=local_batch_sizes) * len(values)
            value = total.astype(values[0].dtype)
        else:
            value = values[0]
            if any(not np.array_equal(other, value) for other in values):
                raise OtherModelError(
                    f"{path} differed by rank, and the model shards it"
                )
        arrays[array_name(TABLES, number, path)] = value
    for number in variables.per_replica.keys() & tables.keys():
        path = tables[number].path
        value = arrays.pop(array_name(TABLES, number, path))
        if number not in variables.accumulated:
            arrays[array_name(REPLICATED, number, path)] = value
            continue
        value = (value / len(prefixes)).astype(value.dtype)
        arrays |= {array_name(prefix, number, path): value for prefix in prefixes}
    return arrays


def mean(
    values: Sequence[np.ndarray], weights: Sequence[float] | None = None
) -> np.ndarray:
    """Return the mean of arrays, in their dtype."""
    # NumPy computes no mean of bfloat16.
    average = np.average([value.astype("float64") for value in values], 0, weights)
    return np.asarray(average).astype(values[0].dtype)


class PerRankState:
    """The arrays of a checkpoint that differ by rank, for this rank. A collective.

    All ranks of a replica take the same state, and assign their shards of it.

    Args:
        variables: variables of the model, with the replicated ones of the checkpoint.
        arrays: arrays of a checkpoint on the chief; not used elsewhere.
        local_batch_sizes: batch sizes of the replicas that wrote the arrays.
    """

    def __init__(
        self,
        world: World,
        replicas: Replicas,
        variables: StateVariables,
        arrays: Arrays,
        local_batch_sizes: Sequence[int],
    ) -> None:
        self._is_same_size = len(local_batch_sizes) == replicas.size
        self._variables = variables.per_replica

        def read() -> list[ReplicaState]:
            states = states_by_replica(
                arrays, replicas.size, variables, local_batch_sizes
            )
            by_rank = [s for n, s in enumerate(states) for _ in replicas.ranks(n)]
            callbacks = callbacks_by_rank(
                arrays,
                world.size,
                is_same_size=self._is_same_size,
                # A stage of a pipeline has none of the variables of the others.
                is_sharded=any(
                    v.variable is None or get_sharding(v.variable) is not None
                    for v in variables.shared
                ),
            )
            pairs = zip(by_rank, callbacks, strict=True)
            return [ReplicaState(**state, callbacks=own) for state, own in pairs]

        states = on_chief(world, read) or []
        # Each rank receives its own state only: the traffic and the memory of a rank do
        # not grow with their number.
        self._state: ReplicaState = (
            scatter_object(states, name="PerRankState") if world.size > 1 else states[0]
        )

    def assign(self, model: keras.Model) -> None:
        """Assign all but the states of metrics. A collective, after the broadcast."""
        values = self._state["rank"]
        assign([self._variables[number] for number in values], values.values())
        layer_state.refresh(model)
        if not self._is_same_size:
            # Replicas without a predecessor have taken the seeds of the first one.
            separate_seeds(seed_states(model), get_process_set(model.optimizer))

    @property
    def callbacks(self) -> Arrays:
        """The states of the callbacks of this rank."""
        return self._state["callbacks"]

    def restore_generators(self) -> None:
        if self._is_same_size:
            restore_generators(self._state["random"])

    def assign_metrics(self, model: keras.Model) -> None:
        """Assign the states of metrics; new metrics keep their initial states."""
        variables = metric_variables(model.metrics)
        for variable, value in zip(variables, self._state["metrics"], strict=True):
            if value is not None:
                variable.assign(value)

    def release(self) -> None:
        """Free the memory: nothing is assigned after this."""
        self._state = {}


def states_by_replica(
    arrays: Arrays,
    size: int,
    variables: StateVariables,
    local_batch_sizes: Sequence[int],
) -> list[ReplicaState]:
    """Return the state that each replica takes from a checkpoint.

    If the number of replicas has changed: accumulated gradients become their mean, so
    that their window gives the same update. Replicas take the moving statistics and the
    seeds of the replica with their number, or of the first one. The states of metrics
    are distributed so that their reduction has the same result. The global random
    generators are not restored.

    Args:
        size: number of replicas now.
        local_batch_sizes: batch sizes of the replicas that wrote the arrays.
    """
    groups, numbers_before = ArrayGroups(arrays), range(len(local_batch_sizes))
    metric_numbers = _metric_numbers(variables, groups)
    states = [
        ReplicaState(
            rank=_values(groups, RANK.format(number)),
            metrics=_metrics(groups, METRICS.format(number), metric_numbers),
            random=groups.by_name(RANDOM.format(number)),
        )
        for number in numbers_before
    ]
    if len(states) == size:
        return states
    accumulated = {
        number: mean([state["rank"][number] for state in states], local_batch_sizes)
        for number in variables.accumulated
        if number in states[0]["rank"]
    }
    first_metrics, other_metrics = _combined_metrics(states, variables)
    return [
        ReplicaState(
            rank=states[n if n in numbers_before else 0]["rank"] | accumulated,
            metrics=first_metrics if n == 0 else other_metrics,
        )
        for n in range(size)
    ]


def callbacks_by_rank(
    arrays: Arrays, size: int, *, is_same_size: bool, is_sharded: bool
) -> list[dict[str, np.ndarray]]:
    """Return the states of the callbacks of each rank, of `size` ranks now.

    If the number of ranks or of replicas has changed, all take the states of rank 0. Of
    a sharded model these have no arrays: they may be shards of its weights.

    Args:
        is_same_size: whether there are as many replicas as before.
        is_sharded: whether ranks have shards of the model.
    """
    groups = ArrayGroups(arrays)
    by_rank = [groups.by_name(CALLBACKS.format(rank)) for rank in range(size + 1)]
    first, count = by_rank[0], sum(map(bool, by_rank))
    if is_same_size and count == size:
        return [first | own for own in by_rank[:size]]
    if is_sharded:
        first = {name: v for name, v in first.items() if name == CALLBACKS_JSON}
    return [first] * size


def _values(groups: ArrayGroups, prefix: str) -> dict[int, np.ndarray]:
    return {number: array.value for number, array in groups.by_number(prefix).items()}


def _metrics(
    groups: ArrayGroups, prefix: str, numbers: Iterable[int | None]
) -> list[np.ndarray | None]:
    values = _values(groups, prefix)
    return [None if number is None else values[number] for number in numbers]


def _combined_metrics(
    states: Sequence[ReplicaState], variables: StateVariables
) -> tuple[list[np.ndarray | None], list[np.ndarray | None]]:
    """Return the states of metrics for the first replica, and for any other one.

    Their reduction over the new replicas equals the reduction over the old ones.
    """
    first: list[np.ndarray | None] = []
    others: list[np.ndarray | None] = []
    by_variable = zip(*(state["metrics"] for state in states), strict=True)
    for variable, values in zip(variables.metrics, by_variable, strict=True):
        combined = _combine(variable, [value for value in values if value is not None])
        is_sum = variable.aggregation not in ("mean", "only_first_replica")
        first.append(combined)
        # The first replica has the sum; the others add zero.
        is_zero = is_sum and combined is not None
        others.append(np.zeros_like(combined) if is_zero else combined)
    return first, others


def _combine(
    variable: keras.Variable, values: Sequence[np.ndarray]
) -> np.ndarray | None:
    if not values:
        return None
    if variable.aggregation == "mean":
        return mean(values)
    if variable.aggregation == "only_first_replica":
        return values[0]
    return np.sum(values, axis=0, dtype=values[0].dtype)


def new_metrics(variables: StateVariables, arrays: Arrays) -> list[str]:
    """Return the names of metrics that a checkpoint has no states of."""
    numbers = _metric_numbers(variables, ArrayGroups(arrays))
    pairs = zip(variables.metrics, numbers, strict=True)
    names = [v.path.rpartition("/")[0] for v, number in pairs if number is None]
    return list(dict.fromkeys(names))


def _metric_numbers(variables: StateVariables, groups: ArrayGroups) -> list[int | None]:
    """Return the number in a checkpoint of each variable of metrics, None if new.

    A metric is found by its name. If several metrics share a name (one for each
    output), they are new unless the checkpoint has equally many.
    """
    metrics, stored = variables.metrics, groups.by_number(METRICS.format(0))
    paths = [variable.path for variable in metrics]
    paths_before = [array.path for array in stored.values()]
    keys, keys_before = variables.names.keys(paths, paths_before)
    now = _by_metric(
        (number, (key, tuple(variable.shape), variable.dtype))
        for number, (key, variable) in enumerate(zip(keys, metrics, strict=True))
    )
    before = _by_metric(
        (number, (key, array.value.shape, array.value.dtype.name))
        for key, (number, array) in zip(keys_before, stored.items(), strict=True)
    )
    found: dict[int, int] = {}
    for name, (numbers, described) in now.items():
        numbers_before, described_before = before.get(name, ([], []))
        if described == described_before:
            pairs = list(zip(numbers, numbers_before, strict=True))
            if not variables.names.difference(
                (stored[number_before].path, paths[number])
                for number, number_before in pairs
            ):
                found |= pairs
    return [found.get(number) for number in range(len(metrics))]


def _by_metric(
    variables: Iterable[tuple[int, _Described]],
) -> dict[str, tuple[list[int], list[_Described]]]:
    """Return numbers and descriptions of variables by the name of their metric."""
    groups: dict[str, tuple[list[int], list[_Described]]] = {}
    for number, (key, shape, dtype) in variables:
        metric, _, name = key.rpartition("/")
        numbers, described = groups.setdefault(metric, ([], []))
        numbers.append(number)
        described.append((name, shape, dtype))
    return groups


_MERSENNE_TWISTER = "MT19937"
# Keras 3.12 has no constant for it.
_KERAS_GENERATOR = "global_seed_generator"


def capture_generators() -> dict[str, np.ndarray]:
    """Return the states of the random generators of Python, Keras and NumPy by name."""
    version, words, gauss = random.getstate()
    arrays = {
        "python": np.array([version, *words], "uint64"),
        "python_gauss": np.array([math.nan if gauss is None else gauss]),
    }
    # Keras makes its generator when it is first used, by a draw from Python's.
    keras_generator = global_state.get_global_attribute(_KERAS_GENERATOR)
    if keras_generator is not None:
        arrays["keras"] = keras_generator.state.numpy()
    numpy_state = np.random.get_state(legacy=False)
    # A program may have set another one by `numpy.random.set_bit_generator`.
    if numpy_state["bit_generator"] == _MERSENNE_TWISTER:
        words, position = numpy_state["state"]["key"], numpy_state["state"]["pos"]
        arrays["numpy"] = words
        arrays["numpy_position"] = np.array([position, numpy_state["has_gauss"]])
        arrays["numpy_gauss"] = np.array([numpy_state["gauss"]])
    return arrays


def restore_generators(arrays: Arrays) -> None:
    """Set the generators to the states that `capture_generators` has returned."""
    if "keras" in arrays:
        seed_generator.global_seed_generator().state.assign(arrays["keras"])
    # After the generator of Keras, which draws from this one when it is made.
    version, *words = arrays["python"].tolist()
    gauss = arrays["python_gauss"].item()
    random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
    if "numpy" in arrays:
        position, has_gauss = arrays["numpy_position"].tolist()
        gauss = arrays["numpy_gauss"].item()
        np.random.set_state(
            (_MERSENNE_TWISTER, arrays["numpy"], position, has_gauss, gauss)
        )
