"""The state of a training as arrays, and back.

What is equal on all ranks is stored once: trainable weights, and the optimizer's
variables. All else is stored for each rank: seeds of random layers, other weights that
are not trained (moving statistics, for example), accumulated gradients, local weights,
the states of metrics, and those of the global random generators.
"""

import re

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives.objects import (
    broadcast_object,
    gather_object,
    scatter_object,
)
from hvdtrain.job.agreement import gather
from hvdtrain.job.world import JobError, SharedJobError
from hvdtrain.keras.callbacks.broadcast import separate_seeds
from hvdtrain.keras.groups import variable_key
from hvdtrain.keras.metrics import local_states, metric_variables
from hvdtrain.keras.optimizer_state import accumulated_gradients
from hvdtrain.keras.variables import replicated_variables
from hvdtrain.training import random_states


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
    own = local_states(_own(model)), local_states(_of_metrics(model))
    own = (*own, random_states.capture())
    if everywhere or world.size == 1:
        everyone = gather(world, own)
    else:
        everyone = gather_object(own, name="capture")
    if everyone is None:
        return None
    shared = _shared(model)
    arrays = _named("shared", shared, local_states(shared))
    for rank, (own, of_metrics, of_random) in enumerate(everyone):
        arrays |= _named(f"rank{rank}", _own(model), own)
        arrays |= _named(f"metrics{rank}", _of_metrics(model), of_metrics)
        arrays |= {f"random{rank}/{name}": each for name, each in of_random.items()}
    return arrays


def check_finite(model, step):
    """Raise `SharedJobError` unless all shared weights are finite.

    They are equal on all ranks, each of which raises the error. Otherwise checkpoints
    of a training that has diverged would replace the good ones before them.
    """
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

    Raises:
        OtherModelError: a variable is missing, or has another shape or dtype. No
            variable has been assigned then.
    """
    shared = _shared(model)
    _check_same(shared, _by_name(arrays, "shared"))
    _check_same(_own(model), _by_name(arrays, "rank0"))
    _check_same(_of_metrics(model), _by_name(arrays, "metrics0"))
    _assign(shared, _group(arrays, "shared"))


class OwnState:
    """The arrays of a checkpoint that differ by rank, for this rank. A collective.

    Where the number of ranks has changed: accumulated gradients become their mean, so
    that their window gives the same update; ranks take the moving statistics of the
    rank with their number, or of rank 0, as the seeds, which are then separated; the
    states of metrics are divided so that their reduction has the same result; and the
    global random generators are left as they are.

    Args:
        world: the `World`.
        arrays: those of a checkpoint on the chief; None elsewhere.
        local_batch_sizes: samples in a batch of each rank that wrote them.
    """

    def __init__(self, world, arrays, local_batch_sizes):
        self._local_batch_sizes, self._rank = local_batch_sizes, world.rank
        self._is_same_size = len(local_batch_sizes) == world.size
        everyone = None
        if world.is_chief:
            size_before = len(local_batch_sizes)
            everyone = [_of_rank(arrays, rank) for rank in range(size_before)]
        if self._is_same_size:
            self._states = [scatter_object(everyone, name="OwnState")]
        else:
            self._states = broadcast_object(everyone, name="OwnState")

    def assign(self, model):
        """Assign all but the states of metrics. A collective, after the broadcast."""
        if self._is_same_size:
            (mine,) = self._states
            _assign(_own(model), mine["rank"])
            random_states.restore(mine["random"])
            return
        before = self._states[self._rank if self._rank < len(self._states) else 0]
        _assign(_own(model), before["rank"])
        self._average_accumulated(model)
        separate_seeds(model)

    def assign_metrics(self, model):
        """Assign the states of metrics."""
        variables = _of_metrics(model)
        states = [each["metrics"] for each in self._states]
        if self._is_same_size:
            (values,) = states
        else:
            by_variable = zip(variables, *states, strict=True)
            values = [self._combined(variable, each) for variable, *each in by_variable]
        _assign(variables, values)

    def release(self):
        """Give back the memory: nothing is assigned any more."""
        self._states = None

    def _combined(self, variable, states):
        # So that their reduction over the new ranks has the result of the old ones.
        if variable.aggregation == "mean":
            return _mean(states)
        if variable.aggregation == "only_first_replica":
            return states[0]
        total = np.sum(states, axis=0, dtype=states[0].dtype)
        return total if self._rank == 0 else np.zeros_like(total)

    def _average_accumulated(self, model):
        accumulated = {id(v) for v in accumulated_gradients(model.optimizer)}
        for i, variable in enumerate(_own(model)):
            if id(variable) in accumulated:
                sums = [each["rank"][i] for each in self._states]
                variable.assign(_mean(sums, weights=self._local_batch_sizes))


def _of_rank(arrays, rank):
    return {
        "rank": _group(arrays, f"rank{rank}"),
        "metrics": _group(arrays, f"metrics{rank}"),
        "random": _by_name(arrays, f"random{rank}"),
    }


def _mean(values, weights=None):
    # NumPy computes no mean of bfloat16.
    mean = np.average([each.astype("float64") for each in values], 0, weights)
    return np.asarray(mean).astype(values[0].dtype)


def _shared(model):
    fixed = {variable_key(weight) for weight in model.non_trainable_weights}
    return [v for v in replicated_variables(model) if variable_key(v) not in fixed]


def _own(model):
    taken = {id(v) for v in (*_shared(model), *_of_metrics(model))}
    candidates = [*model.variables, *model.optimizer.variables, *untracked(model)]
    return [v for v in candidates if id(v) not in taken]


def _of_metrics(model):
    return metric_variables(model.metrics)


def _named(prefix, variables, values):
    # Numbered: paths of different variables may be equal, and their order counts.
    return {
        f"{prefix}/{number:04}/{_path(variable)}": value
        for number, (variable, value) in enumerate(zip(variables, values, strict=True))
    }


def _by_name(arrays, prefix):
    prefix += "/"
    return {
        name.removeprefix(prefix): value
        for name, value in arrays.items()
        if name.startswith(prefix)
    }


def _group(arrays, prefix):
    """Return the arrays under a prefix in the order of their numbers."""
    found = _by_name(arrays, prefix)
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
        dtype = keras.backend.standardize_dtype(variable.dtype)
        value = stored[name]
        if (tuple(variable.shape), dtype) != (value.shape, value.dtype.name):
            raise OtherModelError(
                f"{path} has the shape {tuple(variable.shape)} and dtype {dtype} in "
                f"the model, {value.shape} and {value.dtype} there"
            )


def _path(variable):
    return getattr(variable, "path", variable.name)


def _kind(path):
    # Keras numbers the layers of a process: dense, dense_1, dense_2.
    return re.sub(r"_\d+(?=_|/|$)", "", path)


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
