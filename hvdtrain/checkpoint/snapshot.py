"""Copies of the state of a training as arrays; and arrays back into the variables."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple, cast

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.header import (
    CALLBACKS,
    CALLBACKS_JSON,
    METRICS,
    RANDOM,
    RANK,
    REPLICATED,
    SHARED,
    TABLES,
    ArrayGroups,
    Arrays,
    OtherModelError,
    StoredArray,
    array_name,
)
from hvdtrain.checkpoint.per_rank import capture_generators
from hvdtrain.checkpoint.state_variables import (
    StateVariables,
    assign,
    compute_digest,
    shared_weights,
)
from hvdtrain.collectives.dtypes import local_shard
from hvdtrain.collectives.objects import broadcast_object, gather_object
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.job.world import SharedJobError, World
from hvdtrain.keras.metrics import local_states
from hvdtrain.parallel.replicas import Replicas, get_mesh
from hvdtrain.sharding.full_values import Block, FullVariable, assemble
from hvdtrain.sharding.shards import get_sharding


class Captured(NamedTuple):
    """Copies of the state of a training.

    Attributes:
        arrays: by name.
        unlisted: see `Header`.
    """

    arrays: dict[str, np.ndarray]
    unlisted: int


class _RankState(NamedTuple):
    """The state of one rank that is not stored once."""

    shards: list[tuple[Block | None, np.ndarray | None]]
    metrics: list[np.ndarray]
    random: dict[str, np.ndarray]
    callbacks: dict[str, np.ndarray]


def capture(
    model: keras.Model,
    world: World,
    *,
    everywhere: bool,
    unlisted: Sequence[tf.Variable] = (),
    callbacks: dict[str, np.ndarray] | None = None,
    directory: pathlib.Path | None = None,
) -> Captured | None:
    """Return copies of all arrays. A collective.

    All ranks return them with `everywhere`; otherwise the chief does, and the others
    return None. The optimizer of the model is built.

    Args:
        unlisted: see `StepVariables`.
        callbacks: states of the callbacks of this rank; None on all ranks if no rank
            has callbacks.
        directory: where the chief keeps the full values of sharded variables; by
            default in memory, where the full model may not fit.
    """
    variables = StateVariables.of(model).with_unlisted(unlisted)
    variables = variables.find_replicated(model, world)
    per_replica = variables.per_replica
    own = _RankState(
        shards=[(v.block, v.local_value()) for v in per_replica.values()],
        metrics=local_states(variables.metrics),
        random=capture_generators(),
        callbacks=_drop_equal_to_rank_0(callbacks, world) if callbacks else {},
    )
    states_by_rank: list[_RankState] | None
    if everywhere or world.size == 1:
        states_by_rank = gather(world, own)
    else:
        states_by_rank = gather_object(own, name="capture")
    values = variables.values_stored_once(
        is_kept=states_by_rank is not None, directory=directory
    )
    if states_by_rank is None:
        return None
    # None occurs with `everywhere` alone, for sharded variables on other ranks than the
    # chief, which have no use for them: the chief restores.
    arrays = _arrays_stored_once(variables, cast(list[np.ndarray], values))
    replicas = Replicas.of_model(world, model)
    for number in range(replicas.size):
        states = [states_by_rank[rank] for rank in replicas.ranks(number)]
        arrays |= _arrays_of_replica(number, per_replica, variables.metrics, states)
    for rank, state in enumerate(states_by_rank):
        for name, value in state.callbacks.items():
            arrays[f"{CALLBACKS.format(rank)}/{name}"] = value
    return Captured(arrays, len(variables.unlisted))


def _drop_equal_to_rank_0(
    arrays: dict[str, np.ndarray], world: World
) -> dict[str, np.ndarray]:
    """Return the arrays that differ from rank 0's; on rank 0 all. A collective.

    Weights that EarlyStopping keeps are equal on all ranks: once is enough.
    """
    if world.size == 1:
        return arrays
    own = {
        name: (array.dtype.name, array.shape, compute_digest(array))
        for name, array in arrays.items()
    }
    first = broadcast_object(own, name="CallbackStates")
    if world.is_chief:
        return arrays
    # The JSON always: it shows how many ranks there were.
    return {
        name: array
        for name, array in arrays.items()
        if name == CALLBACKS_JSON or own[name] != first.get(name)
    }


def _arrays_stored_once(
    variables: StateVariables, values: Iterable[np.ndarray]
) -> dict[str, np.ndarray]:
    groups = {
        SHARED: dict(enumerate(variables.shared)),
        TABLES: variables.tables,
        REPLICATED: {n: variables.own[n] for n in sorted(variables.replicated)},
    }
    names = (
        array_name(prefix, number, variable.path)
        for prefix, group in groups.items()
        for number, variable in group.items()
    )
    return dict(zip(names, values, strict=True))


def _arrays_of_replica(
    number: int,
    variables: Mapping[int, FullVariable],
    metrics: Sequence[keras.Variable],
    states: Sequence[_RankState],
) -> dict[str, np.ndarray]:
    arrays = {}
    shards_by_variable = zip(*(state.shards for state in states), strict=True)
    for (index, variable), shards in zip(
        variables.items(), shards_by_variable, strict=True
    ):
        name = array_name(RANK.format(number), index, variable.path)
        arrays[name] = assemble(variable, shards)
    # The ranks of a replica see the same samples, and draw the same numbers.
    values = zip(metrics, states[0].metrics, strict=True)
    for index, (variable, value) in enumerate(values):
        arrays[array_name(METRICS.format(number), index, variable.path)] = value
    for name, value in states[0].random.items():
        arrays[f"{RANDOM.format(number)}/{name}"] = value
    return arrays


def check_finite(model: keras.Model, world: World, step: int) -> None:
    """Raise `SharedJobError` unless all trainable weights are finite.

    Otherwise the checkpoints of a training that has diverged would replace the good
    ones before them. Replicated weights are equal on all ranks, each of which raises
    the error. For a sharded model, this is a collective.
    """
    weights = shared_weights(model)
    is_sharded = any(map(get_sharding, weights)) or get_mesh(model)
    with fail_together(world) if is_sharded else nullcontext():
        for variable in weights:
            value = local_shard(variable).numpy()
            if not np.isfinite(value.astype("float32", copy=False)).all():
                raise SharedJobError(
                    f"{variable.path} is no longer finite at step {step}: training has "
                    "diverged. Lower the learning rate, or add a warm-up. Earlier "
                    "checkpoints are kept."
                )


def assign_stored_once(variables: StateVariables, arrays: Arrays) -> None:
    """Assign the arrays of `regroup` stored once, on the chief; a broadcast follows.

    Of a sharded variable it assigns the chief's shard; `StateVariables.scatter` assigns
    the others. Metrics are not compared: new ones may be added between runs.

    Raises:
        OtherModelError: a variable is missing, or has another shape or dtype. No
            variable has been assigned then.
    """
    groups = ArrayGroups(arrays)
    replicated = groups.by_number(REPLICATED)
    own = groups.by_number(RANK.format(0)) | replicated
    # The last of them are not listed by Keras: `JobVariables` has compared them.
    listed = list(variables.per_replica.values())
    pairs = [
        *_pairs(variables.shared, groups.by_number(SHARED)),
        *_pairs(list(variables.tables.values()), groups.by_number(TABLES)),
        *_pairs(listed, own)[: len(listed) - len(variables.unlisted)],
    ]
    if difference := variables.names.difference(
        (stored.path, variable.path) for variable, stored in pairs
    ):
        raise OtherModelError(
            f"it has {difference}: make its layers with the same names, in the same "
            "order"
        )
    for variable, stored in pairs:
        _check_same(variable, stored.value)
    variables = variables.with_replicated(replicated)
    assign(variables.stored_once, groups.values_stored_once())


def _pairs(
    variables: Sequence[FullVariable], stored: Mapping[int, StoredArray]
) -> list[tuple[FullVariable, StoredArray]]:
    if len(variables) != len(stored):
        raise OtherModelError(
            f"it has {len(stored)} variables, and the model has {len(variables)}"
        )
    return list(zip(variables, map(stored.__getitem__, sorted(stored)), strict=True))


def _check_same(variable: FullVariable, value: np.ndarray) -> None:
    shape, dtype = variable.shape, variable.dtype
    if (shape, dtype) != (value.shape, value.dtype.name):
        raise OtherModelError(
            f"{variable.path} has the shape {shape} and dtype {dtype} in "
            f"the model, {value.shape} and {value.dtype} there"
        )
