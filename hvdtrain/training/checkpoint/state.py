"""The state of a training as arrays, and back.

What is equal on all ranks, or divided among them, is stored once, as its dense value:
trainable weights, the optimizer's variables, frozen weights, and all that belongs to a
table which is divided over replicas of a model. All else is stored for each rank, or
for each replica of a model that is divided: seeds of random layers, moving statistics
where they differ, accumulated gradients, local weights, the states of metrics, and
those of the global random generators.
"""

import itertools
import re
from contextlib import nullcontext

import numpy as np

from hvdtrain.collectives.objects import gather_object
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.job.world import SharedJobError
from hvdtrain.keras.metrics import local_states
from hvdtrain.keras.variables import get_hook
from hvdtrain.sharding.full_values import assemble
from hvdtrain.sharding.shards import get_sharding
from hvdtrain.training.checkpoint import state_variables
from hvdtrain.training.checkpoint.state_variables import (
    StateVariables,
    assign,
    shared_weights,
)
from hvdtrain.training.replicas import Replicas


class OtherModelError(ValueError):
    """The arrays are those of a model with other variables."""


def capture(model, world, *, everywhere):
    """Return copies of all arrays by name. A collective.

    Args:
        model: a built and compiled model whose optimizer is built.
        world: the `World`.
        everywhere: whether all ranks keep them; otherwise the chief does, and the
            others return None.
    """
    variables = StateVariables.of(model).find_replicated(model, world)
    per_replica = variables.per_replica
    own = (
        [(each.block, each.local_value()) for each in per_replica.values()],
        local_states(variables.metrics),
        state_variables.capture(),
    )
    if everywhere or world.size == 1:
        everyone = gather(world, own)
    else:
        everyone = gather_object(own, name="capture")
    once = variables.values_stored_once(is_kept=everyone is not None)
    if everyone is None:
        return None
    groups = {
        "shared": dict(enumerate(variables.shared)),
        "tables": variables.tables,
        "replicated": {n: variables.own[n] for n in sorted(variables.replicated)},
    }
    arrays, values = {}, iter(once)
    for name, group in groups.items():
        arrays |= _named(name, group, itertools.islice(values, len(group)))
    replicas = Replicas.of_model(world, model)
    for number in range(replicas.size):
        parts = [everyone[rank][0] for rank in replicas.ranks(number)]
        values = map(assemble, per_replica.values(), zip(*parts, strict=True))
        _, of_metrics, of_random = everyone[replicas.ranks(number)[0]]
        arrays |= _named(f"rank{number}", per_replica, values)
        metrics = dict(enumerate(variables.metrics))
        arrays |= _named(f"metrics{number}", metrics, of_metrics)
        arrays |= {f"random{number}/{name}": each for name, each in of_random.items()}
    return arrays


def check_finite(model, world, step):
    """Raise `SharedJobError` unless all shared weights are finite.

    Otherwise checkpoints of a training that has diverged would replace the good ones
    before them. Weights that are not divided are equal on all ranks, each of which
    raises the error. Of a divided model, this is a collective.
    """
    weights = shared_weights(model)
    is_sharded = any(map(get_sharding, weights)) or get_hook(model.optimizer).mesh
    with fail_together(world) if is_sharded else nullcontext():
        for variable in weights:
            if not np.isfinite(variable.numpy().astype("float32", copy=False)).all():
                raise SharedJobError(
                    f"{variable.path} is no longer finite at step {step}: training has "
                    "diverged. Lower the learning rate, or add a warm-up. Earlier "
                    "checkpoints are kept."
                )


def assign_shared(variables, arrays):
    """Assign what is equal on all ranks, on the chief; a broadcast follows.

    Of divided variables it assigns the part of the chief; see
    `StateVariables.scatter`. Metrics are not compared: see `metric_numbers`.

    Args:
        variables: the `StateVariables`.
        arrays: those of a checkpoint, as `regrouping.regrouped` returns them.

    Raises:
        OtherModelError: a variable is missing, or has another shape or dtype. No
            variable has been assigned then.
    """
    _check_same(variables.shared, by_name(arrays, "shared"))
    _check_same(list(variables.tables.values()), by_name(arrays, "tables"))
    replicated = by_name(arrays, "replicated")
    per_replica = list(variables.per_replica.values())
    _check_same(per_replica, by_name(arrays, "rank0") | replicated)
    variables = variables.with_replicated(map(number_of, replicated))
    assign(variables.stored_once, ordered_once(arrays))


def _named(prefix, variables, values):
    # Numbered: paths of different variables may be equal, and their order counts.
    return {
        f"{prefix}/{number:04}/{variable.path}": value
        for (number, variable), value in zip(variables.items(), values, strict=True)
    }


def by_prefix(arrays: dict) -> dict:
    """Return the arrays by prefix, then by the rest of their names, in their order."""
    groups = {}
    for name, value in arrays.items():
        prefix, _, rest = name.partition("/")
        groups.setdefault(prefix, {})[rest] = value
    return groups


def by_name(arrays, prefix):
    """Return the arrays under a prefix by the rest of their names."""
    prefix += "/"
    return {
        name.removeprefix(prefix): value
        for name, value in arrays.items()
        if name.startswith(prefix)
    }


def ordered(arrays, prefix):
    """Return the arrays under a prefix in the order of their numbers."""
    found = by_name(arrays, prefix)
    return [found[name] for name in sorted(found, key=number_of)]


def ordered_once(arrays):
    """Return the arrays of `StateVariables.stored_once` in its order."""
    prefixes = ("shared", "tables", "replicated")
    return [value for prefix in prefixes for value in ordered(arrays, prefix)]


def number_of(name):
    """Return the number in the rest of an array's name."""
    return int(name.partition("/")[0])


def _check_same(variables, stored):
    if len(variables) != len(stored):
        raise OtherModelError(
            f"it has {len(stored)} variables, and the model has {len(variables)}"
        )
    for variable, name in zip(variables, sorted(stored, key=number_of), strict=True):
        before, path = name.partition("/")[2], variable.path
        if _kind(before) != _kind(path):
            raise OtherModelError(f"it has {before} where the model has {path}")
        shape, dtype, value = variable.shape, variable.dtype, stored[name]
        if (shape, dtype) != (value.shape, value.dtype.name):
            raise OtherModelError(
                f"{path} has the shape {shape} and dtype {dtype} in "
                f"the model, {value.shape} and {value.dtype} there"
            )


def metric_numbers(metrics: list, stored: dict) -> list:
    """Return the number in a checkpoint of each variable of metrics, None if new.

    A metric is found by its name. Several of one name, as of several outputs, are new
    unless the checkpoint has as many.

    Args:
        metrics: the variables.
        stored: arrays of a checkpoint by number and path.
    """
    before = _by_metric(
        (number_of(name), name.partition("/")[2], value.shape, value.dtype.name)
        for name, value in sorted(stored.items(), key=lambda item: number_of(item[0]))
    )
    now = _by_metric(
        (number, variable.path, tuple(variable.shape), variable.dtype)
        for number, variable in enumerate(metrics)
    )
    numbers = {}
    for name, (now_numbers, described) in now.items():
        numbers_before, described_before = before.get(name, ((), ()))
        if described != described_before:
            numbers_before = [None] * len(now_numbers)
        numbers |= zip(now_numbers, numbers_before, strict=True)
    return [numbers[number] for number in range(len(metrics))]


def new_metrics(metrics: list, arrays: dict) -> list[str]:
    """Return the names of metrics that a checkpoint has no states of."""
    numbers = metric_numbers(metrics, by_name(arrays, "metrics0"))
    variables = zip(metrics, numbers, strict=True)
    names = [v.path.rpartition("/")[0] for v, number in variables if number is None]
    return list(dict.fromkeys(names))


def _by_metric(variables):
    """Return numbers and descriptions of variables by the name of their metric."""
    groups = {}
    for number, path, shape, dtype in variables:
        metric, _, name = _kind(path).rpartition("/")
        numbers, described = groups.setdefault(metric, ([], []))
        numbers.append(number)
        described.append((name, shape, dtype))
    return groups


def _kind(path):
    # Keras numbers the layers of a process: dense, dense_1, dense_2. Before 3.13 it
    # wrote SGD for sgd.
    return re.sub(r"_\d+(?=_|/|$)", "", path).lower()
