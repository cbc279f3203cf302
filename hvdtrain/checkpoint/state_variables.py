"""The variables of a training: which are stored once, and which for each replica."""

import dataclasses
import pathlib
import typing
import warnings
import zlib
from collections.abc import Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.checkpoint.names import KerasNames, without_numbers
from hvdtrain.collectives.objects import RanksOfValue, group_by_value, name_values
from hvdtrain.job.agreement import gather
from hvdtrain.job.world import World
from hvdtrain.keras.metrics import metric_variables
from hvdtrain.keras.replication import non_local_variables, replicated_by_process_set
from hvdtrain.keras.variables import accumulated_gradients, variable_key
from hvdtrain.parallel.replicas import Replicas, get_mesh
from hvdtrain.sharding.full_values import FullValues, FullVariable
from hvdtrain.sharding.shards import assign_shard, has_summed_gradients

# In place of the digest of a value: this rank has no such variable; the variable
# belongs to its rank; there is one replica, with nothing to compare.
_ABSENT, _PER_RANK, _ONE_REPLICA = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class StateVariables:
    """The variables of a model and its optimizer, numbered as in the full model.

    Attributes:
        shared: trainable weights and optimizer variables; replicated, or sharded.
        own: other variables, of which each replica may have its own value. The list is
            the same whether a table is sharded, and on any number of ranks.
        accumulated: numbers in `own` of the accumulated gradients.
        metrics: the states of metrics.
        unlisted: numbers in `own` of the variables of `StepVariables.unlisted`, which
            are the last ones.
        replicated: numbers in `own` of variables that are equal on all replicas:
            frozen weights, for example.
        names: compares paths with those in a checkpoint.
    """

    shared: list[FullVariable]
    own: list[FullVariable]
    accumulated: range
    metrics: list[keras.Variable]
    unlisted: range
    replicated: frozenset[int] = frozenset()
    names: KerasNames = dataclasses.field(default_factory=KerasNames)

    @classmethod
    def of(cls, model: keras.Model) -> "StateVariables":
        """Return the variables of a model with a built optimizer.

        A collective for a pipeline, which also describes variables of other stages.
        """
        describe = getattr(model, "full_variables", _full_variables)
        shared, trainable = _shared(model), _ids(model.trainable_variables)
        weights = [v for v in shared if id(v) in trainable]
        optimizer_variables = [v for v in shared if id(v) not in trainable]
        metrics = metric_variables(model.metrics)
        accumulated = accumulated_gradients(model.optimizer)
        taken = _ids([*shared, *metrics, *accumulated])
        own = [
            variable
            for variables in (model.variables, model.optimizer.variables)
            for variable in describe([v for v in variables if id(v) not in taken])
        ]
        accumulated = describe(accumulated)
        end = len(own) + len(accumulated)
        return cls(
            shared=[*describe(weights), *describe(optimizer_variables)],
            own=[*own, *accumulated],
            accumulated=range(len(own), end),
            metrics=metrics,
            unlisted=range(end, end),
            names=KerasNames(model),
        )

    @property
    def tables(self) -> dict[int, FullVariable]:
        """Variables of `own` that are sharded over replicas, by number.

        They are frozen tables and accumulated gradients of tables. `regroup` converts
        checkpoints of models that have sharded other tables.
        """
        return {
            number: variable
            for number, variable in enumerate(self.own)
            if has_summed_gradients([variable.variable])
        }

    @property
    def per_replica(self) -> dict[int, FullVariable]:
        """Variables of `own` that are stored for each replica, by number."""
        once = self.tables.keys() | self.replicated
        own = enumerate(self.own)
        return {number: variable for number, variable in own if number not in once}

    @property
    def stored_once(self) -> list[FullVariable]:
        """All of `shared`, then `tables`, then `replicated`."""
        replicated = [self.own[number] for number in sorted(self.replicated)]
        return [*self.shared, *self.tables.values(), *replicated]

    def with_unlisted(self, variables: Sequence[tf.Variable]) -> "StateVariables":
        """Add variables of the training step that Keras does not list."""
        listed = self.own[: self.unlisted.start]
        own = [*listed, *_full_variables(variables)]
        return dataclasses.replace(self, own=own, unlisted=range(len(listed), len(own)))

    def with_replicated(self, numbers: Iterable[int]) -> "StateVariables":
        return dataclasses.replace(self, replicated=frozenset(numbers))

    def find_replicated(self, model: keras.Model, world: World) -> "StateVariables":
        """Find the variables whose digests are equal on all replicas. A collective.

        Seeds, local weights and accumulated gradients always belong to their rank. The
        ranks compare digests of other variables, such as moving statistics, which
        differ within an epoch. If the steps of the ranks use other variables that Keras
        does not list, these are left out, with a warning.
        """
        size = Replicas.of_model(world, model).size
        own = self._digests(model, size), self.unlisted_paths
        digests_by_rank, paths_by_rank = zip(*gather(world, own), strict=True)
        variables = self
        used = group_by_value(paths_by_rank)
        if len(used) > 1:
            variables = self.with_unlisted([])
            if world.is_chief:
                _warn_of_unlisted(used)
        count = len(variables.own)
        digests = np.array([digests[:count] for digests in digests_by_rank])
        digests = np.reshape(digests, [size, len(digests) // size, count])
        is_equal = (digests == digests[0]).all((0, 1))
        is_comparable = (digests != _PER_RANK).all((0, 1))
        if world.is_chief:
            differing = np.flatnonzero(is_comparable & ~is_equal)
            _warn_of_frozen(model, [self.own[number].variable for number in differing])
        replicated = np.flatnonzero(is_comparable & is_equal).tolist()
        return variables.with_replicated(replicated)

    def _digests(self, model: keras.Model, size: int) -> np.ndarray:
        """Return a digest of each variable of `own`, for a number of replicas."""
        # The broadcast before the first step makes these weights equal.
        comparable = _ids(model.weights) & _ids(non_local_variables(model))
        comparable |= _ids(self._comparable_unlisted(model))
        # Each replica has another shard of a table.
        comparable -= _ids(table.variable for table in self.tables.values())
        digests = [_digest(comparable, v, needs_value=size > 1) for v in self.own]
        return np.array(digests, "int64")

    @property
    def unlisted_paths(self) -> list[str]:
        """Paths of `unlisted`, which are equal in all processes of a job."""
        return [without_numbers(self.own[n].path) for n in self.unlisted]

    def broadcast_unlisted(self, model: keras.Model) -> None:
        """Broadcast replicated variables that Keras does not list. A collective.

        `BroadcastGlobalVariablesCallback` finds the variables that Keras lists.
        """
        unlisted = _ids(self._comparable_unlisted(model))
        variables = [self.own[number].variable for number in sorted(self.replicated)]
        variables = [v for v in variables if id(v) in unlisted]
        for process_set, root_rank, copies in replicated_by_process_set(
            model.optimizer, variables
        ):
            hvd.broadcast_variables(copies, root_rank, process_set)

    def _comparable_unlisted(self, model: keras.Model) -> list[tf.Variable]:
        # Ranks of a mesh may have different ones: a broadcast would mix them up.
        if get_mesh(model):
            return []
        return [self.own[number].variable for number in self.unlisted]

    def scale_accumulated(self, factor: float) -> None:
        """Multiply the accumulated gradients of sharded tables.

        They are sums over replicas, which are divided by the number of replicas when
        the window is complete: the factor is replicas now / replicas before.
        """
        for number, table in self.tables.items():
            if number in self.accumulated and factor != 1:
                accumulator = typing.cast(keras.Variable, table.variable)
                accumulator.assign(accumulator * factor)

    def values_stored_once(
        self, *, is_kept: bool, directory: pathlib.Path | None = None
    ) -> list[np.ndarray | None]:
        """Return the full values, or no values unless this rank keeps them.

        If some variables are sharded, this is a collective, in which only the chief
        receives values, in files of `directory`; the other ranks return None for each.
        """
        if self._are_full():
            return [v.local_value() for v in self.stored_once if is_kept]
        values = FullValues(self.stored_once, directory=directory)
        return [values.gather(number) for number in range(len(values.variables))]

    def scatter(self, full_values: Sequence[np.ndarray]) -> None:
        """Assign to all ranks their shards. A collective if some are sharded.

        The values of `stored_once` are read on the chief; other ranks ignore them.
        """
        if self._are_full():
            return
        values = FullValues(self.stored_once)
        for number in range(len(values.variables)):
            values.scatter(number, full_values[number] if full_values else None)

    def _are_full(self) -> bool:
        return all(variable.is_full for variable in self.stored_once)


def _full_variables(variables: Iterable[keras.Variable]) -> list[FullVariable]:
    return list(map(FullVariable.of, variables))


def shared_weights(model: keras.Model) -> list[keras.Variable]:
    """Return the trainable weights that are replicated or sharded, and not local."""
    trainable = _ids(model.trainable_variables)
    return [v for v in _shared(model) if id(v) in trainable]


def _shared(model: keras.Model) -> list[keras.Variable]:
    fixed = {variable_key(weight) for weight in model.non_trainable_weights}
    return [v for v in non_local_variables(model) if variable_key(v) not in fixed]


def _ids(variables: Iterable[keras.Variable | None]) -> set[int]:
    return {*map(id, variables)}


def _warn_of_frozen(
    model: keras.Model, differing: Iterable[keras.Variable | tf.Variable]
) -> None:
    """Warn of frozen weights that differ; moving statistics are expected to."""
    layers = model._flatten_layers()
    trainable = _ids(v for layer in layers for v in layer._trainable_variables)
    if frozen := [v for v in differing if id(v) in trainable]:
        warnings.warn(
            f"{frozen[0].path} is frozen, and differs by rank, as {len(frozen) - 1} "
            "others: checkpoints have the value of each rank. Expected equal values: "
            "load them in model_fn, on all ranks.",
            stacklevel=2,
        )


def _warn_of_unlisted(used: Sequence[RanksOfValue[list[str]]]) -> None:
    warnings.warn(
        "The training steps of the ranks use different variables that Keras does not "
        f"list: {name_values(used, lambda paths: ', '.join(paths) or 'none')}. "
        "Checkpoints contain none of them, and a job that continues lets them start "
        "anew.",
        stacklevel=3,
    )


def _digest(
    comparable: set[int], full_variable: FullVariable, *, needs_value: bool
) -> int:
    """Return a digest of this rank's value of a variable, as an integer from 2 on."""
    variable = full_variable.variable
    if variable is None:
        return _ABSENT
    if id(variable) not in comparable:
        return _PER_RANK
    if not needs_value:
        return _ONE_REPLICA
    return 2 + compute_digest(variable.numpy())


def compute_digest(array: np.ndarray) -> int:
    """Return a digest of the bytes of an array, which is not negative."""
    value = np.ascontiguousarray(array).reshape(-1).view("uint8").data
    # Training waits for it: both are far faster than a cryptographic digest.
    return zlib.crc32(value) << 30 ^ zlib.adler32(value)


def assign(variables: Iterable[FullVariable], values: Iterable[np.ndarray]) -> None:
    """Assign to variables, in order, this rank's shards of full values."""
    for full_variable, value in zip(variables, values, strict=True):
        # A stage of a pipeline has none of the variables of the others.
        if full_variable.variable is not None:
            assign_shard(full_variable.variable, value)
