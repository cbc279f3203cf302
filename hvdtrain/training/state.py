"""The state of a training as arrays, and back.

What is equal on all ranks, or divided among them, is stored once, as its dense value:
trainable weights, and the optimizer's variables. All else is stored for each rank, or
for each replica of a model that is divided: seeds of random layers, other weights that
are not trained (moving statistics, for example), accumulated gradients, local weights,
the states of metrics, and those of the global random generators.
"""

import re
from contextlib import nullcontext

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.objects import gather_object
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.job.world import JobError, SharedJobError
from hvdtrain.keras.dense_values import DenseValues, DenseVariable, assemble
from hvdtrain.keras.groups import variable_key
from hvdtrain.keras.metrics import local_states, metric_variables
from hvdtrain.keras.partition import is_divided, partition_of
from hvdtrain.keras.variables import replicated_variables
from hvdtrain.training import random_states
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
    described = [DenseVariable.of(v) for v in per_rank_variables(model)]
    own = (
        [
            (each.block, value)
            for each, value in zip(
                described, local_states(per_rank_variables(model)), strict=True
            )
        ],
        local_states(metric_variables_of(model)),
        random_states.capture(),
    )
    if everywhere or world.size == 1:
        everyone = gather(world, own)
    else:
        everyone = gather_object(own, name="capture")
    shared = _dense_values(_shared(model))
    if everyone is None:
        return None
    arrays = _named("shared", _shared(model), shared)
    replicas = Replicas.of_model(world, model)
    for number in range(replicas.size):
        parts = [everyone[rank][0] for rank in replicas.ranks(number)]
        values = map(assemble, described, zip(*parts, strict=True))
        _, of_metrics, of_random = everyone[replicas.ranks(number)[0]]
        arrays |= _named(f"rank{number}", per_rank_variables(model), values)
        arrays |= _named(f"metrics{number}", metric_variables_of(model), of_metrics)
        arrays |= {f"random{number}/{name}": each for name, each in of_random.items()}
    return arrays


def _dense_values(variables):
    """Return the dense values on the chief. A collective if some are divided."""
    if not is_divided(variables):
        return local_states(variables)
    values = DenseValues(map(DenseVariable.of, variables))
    return [values.gather(number) for number in range(len(variables))]


def check_finite(model, world, step):
    """Raise `SharedJobError` unless all shared weights are finite.

    Otherwise checkpoints of a training that has diverged would replace the good ones
    before them. Weights that are not divided are equal on all ranks, each of which
    raises the error. Of a divided model, this is a collective.
    """
    with fail_together(world) if is_divided(_shared(model)) else nullcontext():
        _check_finite(model, step)


def _check_finite(model, step):
    trainable = {id(v) for v in model.trainable_variables}
    for variable in _shared(model):
        if id(variable) not in trainable:
            continue
        if not np.isfinite(variable.numpy().astype("float32", copy=False)).all():
            raise SharedJobError(
                f"{variable.path} is no longer finite at step {step}: training has "
                "diverged. Lower the learning rate, or add a warm-up. Earlier "
                "checkpoints are kept."
            )


def untracked(model):
    """Return the variables of a model that are in none of Keras' lists.

    They are those of optimizers that are attributes of it, beside that of `compile`,
    and TensorFlow's own variables in layers.

    Raises:
        JobError: such an optimizer is not built.
    """
    variables = []
    for name, each in vars(model).items():
        is_own = isinstance(each, keras.optimizers.Optimizer)
        if is_own and each is not model.optimizer:
            if not each.built:
                raise JobError(
                    f"Received a model with a second optimizer, {name}, that has no "
                    "variables yet, so that checkpoints could not contain them: call "
                    "its build(variables) in model_fn."
                )
            variables += each.variables
    for layer in model._flatten_layers():
        variables += [v for v in vars(layer).values() if isinstance(v, tf.Variable)]
    return variables


def assign_shared(model, arrays):
    """Assign what is equal on all ranks, on the chief; a broadcast follows.

    Of divided variables it assigns the part of the chief; see `scatter_shared`.

    Raises:
        OtherModelError: a variable is missing, or has another shape or dtype. No
            variable has been assigned then.
    """
    shared = _shared(model)
    _check_same(shared, by_name(arrays, "shared"))
    _check_same(per_rank_variables(model), by_name(arrays, "rank0"))
    _check_same(metric_variables_of(model), by_name(arrays, "metrics0"))
    assign(shared, ordered(arrays, "shared"))


def scatter_shared(model, arrays):
    """Assign to the other ranks their parts of divided variables. A collective.

    Args:
        model: the model of `assign_shared`.
        arrays: those of the checkpoint on the chief; not used elsewhere.
    """
    variables = _shared(model)
    if not is_divided(variables):
        return
    values = DenseValues(map(DenseVariable.of, variables))
    dense = ordered(arrays, "shared") if arrays else [None] * len(variables)
    for number, array in enumerate(dense):
        if not values.is_replicated(number):
            values.scatter(number, array)


def _shared(model):
    fixed = {variable_key(weight) for weight in model.non_trainable_weights}
    return [v for v in replicated_variables(model) if variable_key(v) not in fixed]


def per_rank_variables(model):
    """Return the variables that are stored for each rank, without those of metrics."""
    taken = {id(v) for v in (*_shared(model), *metric_variables_of(model))}
    candidates = [*model.variables, *model.optimizer.variables, *untracked(model)]
    return [v for v in candidates if id(v) not in taken]


def metric_variables_of(model):
    """Return the states of all metrics."""
    return metric_variables(model.metrics)


def _named(prefix, variables, values):
    # Numbered: paths of different variables may be equal, and their order counts.
    return {
        f"{prefix}/{number:04}/{_path(variable)}": value
        for number, (variable, value) in enumerate(zip(variables, values, strict=True))
    }


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
    return [found[name] for name in sorted(found, key=_number)]


def _number(name):
    return int(name.partition("/")[0])


def _check_same(variables, stored):
    if len(variables) != len(stored):
        raise OtherModelError(
            f"it has {len(stored)} variables, and the model has {len(variables)}"
        )
    for variable, name in zip(variables, sorted(stored, key=_number), strict=True):
        before, path = name.partition("/")[2], _path(variable)
        if _kind(before) != _kind(path):
            raise OtherModelError(f"it has {before} where the model has {path}")
        described = DenseVariable.of(variable)
        shape, dtype, value = described.shape, described.dtype, stored[name]
        if (shape, dtype) != (value.shape, value.dtype.name):
            raise OtherModelError(
                f"{path} has the shape {shape} and dtype {dtype} in "
                f"the model, {value.shape} and {value.dtype} there"
            )


def _path(variable):
    return getattr(variable, "path", variable.name)


def _kind(path):
    # Keras numbers the layers of a process: dense, dense_1, dense_2. Before 3.13 it
    # wrote SGD for sgd.
    return re.sub(r"_\d+(?=_|/|$)", "", path).lower()


def assign(variables, values):
    """Assign dense values, or this rank's parts of them, to variables in order."""
    for variable, value in zip(variables, values, strict=True):
        partition = partition_of(variable)
        variable.assign(partition.of(value) if partition else value)
