"""The variables of a training: which are stored once, and which for each replica."""

import dataclasses
import functools
import math
import random
import warnings
import zlib
from collections.abc import Iterable

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

import hvdtrain.keras as hvd
from hvdtrain.job.agreement import gather
from hvdtrain.job.world import JobError, World
from hvdtrain.keras.metrics import metric_variables
from hvdtrain.keras.variables import (
    accumulated_gradients,
    get_hook,
    non_local_variables,
    replicated_by_process_set,
    variable_key,
)
from hvdtrain.sharding.full_values import FullValues, FullVariable
from hvdtrain.sharding.shards import assign_shard, has_summed_gradients
from hvdtrain.training.replicas import Replicas

# In place of the digest of a value.
_ABSENT, _OF_ITS_RANK, _ONE_REPLICA = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class StateVariables:
    """The variables of a model and its optimizer, as those of the dense model.

    Attributes:
        shared: list of `FullVariable` that are equal on all ranks, or divided.
        own: list of those of which each replica of the dense model has its own. It is
            the same list whether a table is divided, and on any number of ranks.
        accumulated: numbers in `own` of the accumulated gradients.
        metrics: list of the states of metrics.
        replicated: numbers in `own` of variables that are equal on all replicas:
            frozen weights, for example.
    """

    shared: list
    own: list
    accumulated: range
    metrics: list
    replicated: frozenset = frozenset()

    @classmethod
    def of(cls, model):
        """Return those of a model. A collective where it is a pipeline.

        Args:
            model: a built and compiled model whose optimizer is built.
        """
        describe = getattr(model, "full_variables", _full_variables)
        shared, trainable = _shared(model), _trainable(model)
        weights = [v for v in shared if id(v) in trainable]
        optimizer_variables = [v for v in shared if id(v) not in trainable]
        metrics = metric_variables(model.metrics)
        accumulated = accumulated_gradients(model.optimizer)
        taken = {*map(id, (*weights, *optimizer_variables, *metrics, *accumulated))}
        own = [
            each
            for variables in (model.variables, model.optimizer.variables)
            for each in describe([v for v in variables if id(v) not in taken])
        ]
        own += _full_variables(untracked(model))
        # Also those of other stages of a pipeline.
        accumulated = describe(accumulated)
        return cls(
            shared=[*describe(weights), *describe(optimizer_variables)],
            own=[*own, *accumulated],
            accumulated=range(len(own), len(own) + len(accumulated)),
            metrics=metrics,
        )

    @property
    def tables(self):
        """Those of `own` that replicas have parts of, by number.

        They are frozen tables that are divided over more than one replica, and
        accumulated gradients of such tables. `regrouping` is for other numbers.
        """
        return {
            number: each
            for number, each in enumerate(self.own)
            if has_summed_gradients([each.variable])
        }

    @property
    def per_replica(self):
        """Those of `own` that are stored for each replica, by number."""
        once = self.tables.keys() | self.replicated
        return {
            number: each for number, each in enumerate(self.own) if number not in once
        }

    @property
    def stored_once(self):
        """List of `shared`, then `tables`, then `replicated`."""
        replicated = [self.own[number] for number in sorted(self.replicated)]
        return [*self.shared, *self.tables.values(), *replicated]

    def with_replicated(self, numbers: Iterable[int]) -> "StateVariables":
        """Return these variables, of which `numbers` in `own` are stored once."""
        return dataclasses.replace(self, replicated=frozenset(numbers))

    def find_replicated(self, model: keras.Model, world: World) -> "StateVariables":
        """Find the variables whose digests are equal on all replicas. A collective.

        Seeds, local weights and accumulated gradients always belong to their rank. Of
        other variables the ranks compare digests: where ranks differ, as in moving
        statistics, each keeps its value.
        """
        digests = self._digests_by_replica(model, world)
        is_equal = (digests == digests[0]).all((0, 1))
        is_comparable = (digests != _OF_ITS_RANK).all((0, 1))
        if world.is_chief:
            differing = np.flatnonzero(is_comparable & ~is_equal)
            _warn_of_frozen(model, [self.own[number].variable for number in differing])
        return self.with_replicated(np.flatnonzero(is_comparable & is_equal).tolist())

    def _digests_by_replica(self, model, world):
        """Return digests of `own` by replica, rank in it, and variable."""
        size = Replicas.of_model(world, model).size
        comparable = _ids(_broadcast_weights(model) + _untracked_and_replicated(model))
        comparable -= _ids(each.variable for each in self.tables.values())
        digest = functools.partial(_digest, comparable, needs_value=size > 1)
        digests = np.array(list(map(digest, self.own)), "int64")
        by_rank = gather(world, digests)
        return np.reshape(by_rank, [size, len(by_rank) // size, len(self.own)])

    def broadcast_untracked(self, model: keras.Model) -> None:
        """Broadcast replicated variables that Keras does not track. A collective.

        The broadcast callback misses them.
        """
        untracked = _ids(_untracked_and_replicated(model))
        variables = [self.own[number].variable for number in sorted(self.replicated)]
        variables = [each for each in variables if id(each) in untracked]
        for process_set, root_rank, copies in replicated_by_process_set(
            model.optimizer, variables
        ):
            hvd.broadcast_variables(copies, root_rank, process_set)

    def scale_accumulated(self, factor):
        """Multiply the accumulated gradients of divided tables, which are sums.

        Args:
            factor: replicas now, by replicas that wrote them: the sum over replicas is
                divided by their number when the window is complete.
        """
        for number, each in self.tables.items():
            if number in self.accumulated and factor != 1:
                each.variable.assign(each.variable * factor)

    def values_stored_once(self, *, is_kept: bool) -> list:
        """Return the dense values. A collective if some are divided.

        Args:
            is_kept: whether this rank keeps them. Divided ones are on the chief only.
        """
        if self._are_whole():
            return [each.local_value() for each in self.stored_once if is_kept]
        values = FullValues(self.stored_once)
        return [values.gather(number) for number in range(len(values.variables))]

    def scatter(self, dense):
        """Assign to all ranks their parts. A collective if some variables are divided.

        Args:
            dense: list of the dense values of `stored_once` on the chief; not used
                elsewhere.
        """
        if self._are_whole():
            return
        values = FullValues(self.stored_once)
        for number in range(len(values.variables)):
            values.scatter(number, dense and dense[number])

    def _are_whole(self):
        return all(each.is_full for each in self.stored_once)


def _full_variables(variables):
    return list(map(FullVariable.of, variables))


def shared_weights(model):
    """Return the trainable weights that are equal on all ranks, or divided."""
    trainable = _trainable(model)
    return [v for v in _shared(model) if id(v) in trainable]


def _trainable(model):
    return {id(variable) for variable in model.trainable_variables}


def _shared(model):
    fixed = {variable_key(weight) for weight in model.non_trainable_weights}
    return [v for v in non_local_variables(model) if variable_key(v) not in fixed]


def _ids(variables):
    return {*map(id, variables)}


def _broadcast_weights(model):
    """The weights that the broadcast before the first step makes equal."""
    weights = _ids(model.weights)
    return [v for v in non_local_variables(model) if id(v) in weights]


def _untracked_and_replicated(model):
    # The stages of a pipeline have different ones.
    return [] if get_hook(model.optimizer).mesh else untracked(model)


def _warn_of_frozen(model, differing):
    """Warn of weights that could be trained and are not, unlike moving statistics."""
    layers = model._flatten_layers()
    trainable = _ids(each for layer in layers for each in layer._trainable_variables)
    if frozen := [each for each in differing if id(each) in trainable]:
        warnings.warn(
            f"{frozen[0].path} is frozen, and differs by rank, as {len(frozen) - 1} "
            "others: checkpoints have the value of each rank. Expected equal values: "
            "load them in model_fn, on all ranks.",
            stacklevel=2,
        )


def _digest(comparable, described, *, needs_value):
    """Return a digest of this rank's part of a variable, as an integer from 2 on."""
    variable = described.variable
    if variable is None:
        return _ABSENT
    if id(variable) not in comparable:
        return _OF_ITS_RANK
    if not needs_value:
        return _ONE_REPLICA
    value = np.ascontiguousarray(variable.numpy()).reshape(-1).view("uint8")
    # Both are far faster than a cryptographic digest. Training waits.
    return 2 + (zlib.crc32(value) << 30 ^ zlib.adler32(value))


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


def assign(variables, values):
    """Assign dense values, or this rank's parts of them, to variables in order.

    Args:
        variables: list of `FullVariable`.
        values: list of arrays.
    """
    for described, value in zip(variables, values, strict=True):
        if described.variable is not None:
            assign_shard(described.variable, value)


_MERSENNE_TWISTER = "MT19937"
# Keras 3.12 has no constant for it.
_KERAS_GENERATOR = "global_seed_generator"


def capture():
    """Return arrays by name."""
    version, words, gauss = random.getstate()
    arrays = {
        "python": np.array([version, *words], "uint64"),
        "python_gauss": np.array([math.nan if gauss is None else gauss]),
    }
    # Keras makes its generator when it is first used, by a draw of Python's.
    of_keras = global_state.get_global_attribute(_KERAS_GENERATOR)
    if of_keras is not None:
        arrays["keras"] = of_keras.state.numpy()
    of_numpy = np.random.get_state(legacy=False)
    # A program may have chosen another one by `numpy.random.set_bit_generator`.
    if of_numpy["bit_generator"] == _MERSENNE_TWISTER:
        words, position = of_numpy["state"]["key"], of_numpy["state"]["pos"]
        arrays["numpy"] = words
        arrays["numpy_position"] = np.array([position, of_numpy["has_gauss"]])
        arrays["numpy_gauss"] = np.array([of_numpy["gauss"]])
    return arrays


def restore(arrays):
    """Set the generators to the states that `capture` has returned."""
    if "keras" in arrays:
        seed_generator.global_seed_generator().state.assign(arrays["keras"])
    # After the generator of Keras, which may have drawn from this one.
    version, *words = arrays["python"].tolist()
    gauss = arrays["python_gauss"].item()
    random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
    if "numpy" in arrays:
        position, has_gauss = arrays["numpy_position"].tolist()
        gauss = arrays["numpy_gauss"].item()
        np.random.set_state(
            (_MERSENNE_TWISTER, arrays["numpy"], position, has_gauss, gauss)
        )
