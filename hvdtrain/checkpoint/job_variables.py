"""The variables of a job that continues, against those in a checkpoint."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self

import keras
import tensorflow as tf

from hvdtrain.checkpoint.header import (
    RANK,
    REPLICATED,
    TABLES,
    ArrayGroups,
    Checkpoint,
    Header,
    array_name,
)
from hvdtrain.checkpoint.names import without_numbers
from hvdtrain.checkpoint.state_variables import StateVariables
from hvdtrain.checkpoint.step_variables import StepVariables
from hvdtrain.job.agreement import gather
from hvdtrain.job.world import World
from hvdtrain.parallel.replicas import Replicas


class _UnlistedVariable(NamedTuple):
    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.path} of shape {self.shape} and dtype {self.dtype}"


@dataclasses.dataclass(frozen=True)
class JobVariables:
    """The variables of a job, to which a checkpoint is assigned.

    Attributes:
        listed: the variables that Keras lists.
        unlisted: others that the training step uses; see `StepVariables`.
        used: for each rank, the number of its replica and its `unlisted`.
    """

    listed: StateVariables
    unlisted: Sequence[tf.Variable] = ()
    used: Sequence[tuple[int, list[_UnlistedVariable]]] = ()

    @classmethod
    def of(cls, model: keras.Model) -> Self:
        """Return the variables that Keras lists. See `StateVariables.of`."""
        return cls(StateVariables.of(model))

    def with_unlisted(
        self, model: keras.Model, step_variables: StepVariables, world: World
    ) -> Self:
        """Add the other variables of the step, which is traced. A collective."""
        step_variables.trace(model)
        unlisted = step_variables.unlisted(model)
        own = self.listed.with_unlisted(unlisted).own[len(self.listed.own) :]
        described = [
            _UnlistedVariable(without_numbers(v.path), v.shape, v.dtype) for v in own
        ]
        replicas = Replicas.of_model(world, model)
        by_rank = gather(world, described)
        used = [
            (n, by_rank[rank])
            for n in range(replicas.size)
            for rank in replicas.ranks(n)
        ]
        return dataclasses.replace(self, unlisted=unlisted, used=used)

    def in_checkpoint(self, header: Header) -> StateVariables:
        """Return the variables that a checkpoint with this header has values of."""
        return self.listed.with_unlisted(self.unlisted if header.unlisted else ())

    def difference(self, checkpoint: Checkpoint) -> str:
        """Return which variable of a step, that Keras does not list, does not match.

        The variables match if all ranks use those of the checkpoint, in its order.
        """
        header = checkpoint.header
        if not header.unlisted:
            return ""
        for replica, used in self.used:
            # As `states_by_replica` does.
            stored = _stored(checkpoint, replica if replica < header.size else 0)
            for before, now in itertools.zip_longest(stored, used, fillvalue="none"):
                if before != now:
                    return f"{before} where the training step uses {now}"
        return ""


def _stored(checkpoint: Checkpoint, replica: int) -> list[_UnlistedVariable]:
    """Return the variables of a replica that Keras does not list."""
    groups, first = ArrayGroups(checkpoint.arrays), _first_unlisted(checkpoint)
    arrays = groups.by_number(RANK.format(replica)) | groups.by_number(REPLICATED)
    return [
        _UnlistedVariable(without_numbers(path), value.shape, value.dtype.name)
        for number, (path, value) in sorted(arrays.items())
        if number >= first
    ]


def without_unlisted(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without the variables that Keras does not list."""
    groups, first = ArrayGroups(checkpoint.arrays), _first_unlisted(checkpoint)
    prefixes = map(RANK.format, range(checkpoint.header.size))
    unlisted = {
        array_name(prefix, number, array.path)
        for prefix in (REPLICATED, *prefixes)
        for number, array in groups.by_number(prefix).items()
        if number >= first
    }
    arrays = checkpoint.arrays.items()
    return Checkpoint(
        header=dataclasses.replace(checkpoint.header, unlisted=0),
        arrays={name: value for name, value in arrays if name not in unlisted},
    )


def _first_unlisted(checkpoint: Checkpoint) -> int:
    """Return a number in `StateVariables.own`: the unlisted ones are the last."""
    groups = ArrayGroups(checkpoint.arrays)
    prefixes = REPLICATED, TABLES, RANK.format(0)
    count = sum(len(groups.by_number(prefix)) for prefix in prefixes)
    return count - checkpoint.header.unlisted
