"""Shards: the elements of a variable that each rank of a process set holds.

A `Sharding` cuts one axis of a full variable into one shard for each rank. For a full
shape of (6, 4) on two ranks, where a digit is the rank that holds an element:

    axis=0        axis=1
    0 0 0 0       0 0 1 1      rows = Sharding(axis=0, size=6, num_shards=2, rank=1,
    0 0 0 0       0 0 1 1                      process_set=ranks)
    0 0 0 0       0 0 1 1      rows.sizes                  # [3, 3]
    1 1 1 1       0 0 1 1      rows.local_slice            # slice(3, 6)
    1 1 1 1       0 0 1 1      rows.shard_shape((6, 4))    # (3, 4)
    1 1 1 1       0 0 1 1      rows.shard(full)            # full[3:6]

A shard can be sharded again. `within` is the outer sharding: with `shard_state`, data
replicas shard the optimizer slot of the (6, 2) columns above by its 12 elements, as
`Sharding(axis=0, size=12, shape=(6, 2), within=columns, ...)`.

A new layer creates a weight of the shape `sharding.shard_shape(full_shape)` and calls
`set_sharding(weight, sharding)`; `parallel.layer.ShardedWeights` does both. Optimizers,
clipping, saving and checkpoints then call `get_sharding`, which returns None for a
variable that is not sharded, and `assign_shard` to assign from a full value.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow import ProcessSet

from hvdtrain.collectives.dtypes import as_tensorflow, local_shard

_ATTRIBUTE = "_hvdtrain_sharding"
_STAGES = "_hvdtrain_stages"

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a full variable is sharded, and which of the shards this rank holds.

    Where the size is not divisible, the first ranks hold one element more, as in
    `numpy.array_split` and in Horovod's reducescatter.

    Attributes:
        axis: the axis that is sharded.
        size: elements of the full variable on this axis.
        num_shards: number of ranks in the process set.
        rank: this rank's position in the process set.
        process_set: the ranks that hold the shards.
        uneven: elements on this axis by rank, where they are not about equal; 0 for a
            rank without a shard.
        shape: full shape of a variable that is flattened before it is sharded; `axis`
            is then 0, and `size` the number of elements.
        within: the outer `Sharding`, if the variable that is sharded here is a shard.
        sums_gradients: whether the gradient of a shard already is the sum over the
            losses of these ranks: all of them look up rows in the shard.
    """

    axis: int
    size: int
    num_shards: int
    rank: int
    process_set: ProcessSet
    uneven: Shape | None = None
    shape: Shape | None = None
    within: "Sharding | None" = None
    sums_gradients: bool = False

    @classmethod
    def of_elements(
        cls,
        shape: Sequence[int],
        sizes: Shape,
        process_set: ProcessSet,
        *,
        within: "Sharding | None" = None,
        sums_gradients: bool = False,
    ) -> "Sharding":
        """Return the sharding of a flattened variable, of the elements by rank."""
        return cls(
            axis=0,
            size=sum(sizes),
            num_shards=len(sizes),
            rank=process_set.rank(),
            process_set=process_set,
            uneven=sizes,
            shape=tuple(shape),
            within=within,
            sums_gradients=sums_gradients,
        )

    @property
    def sizes(self) -> list[int]:
        """Elements on the axis, by rank."""
        if self.uneven is not None:
            return list(self.uneven)
        return even_sizes(self.size, self.num_shards)

    @property
    def local_slice(self) -> slice:
        """This rank's elements on the axis."""
        start = sum(self.sizes[: self.rank])
        return slice(start, start + self.sizes[self.rank])

    def shard(self, full: np.ndarray | tf.Tensor) -> np.ndarray | tf.Tensor:
        """Return this rank's shard of a full array or tensor."""
        if self.within:
            full = self.within.shard(full)
        if self.shape is not None:
            return keras.ops.reshape(full, [-1])[self.local_slice]
        index = [slice(None)] * len(full.shape)
        index[self.axis] = self.local_slice
        return full[tuple(index)]

    def shard_shape(self, full_shape: Sequence[int]) -> Shape:
        """Return the shape of this rank's shard."""
        if self.within:
            full_shape = self.within.shard_shape(full_shape)
        if self.shape is not None:
            return (self.sizes[self.rank],)
        shape = list(full_shape)
        shape[self.axis] = self.sizes[self.rank]
        return tuple(shape)

    def full_shape(self, shard_shape: Sequence[int]) -> Shape:
        """Return the shape of the full variable, from the shape of a shard."""
        shape: Sequence[int] | None = self.shape
        if shape is None:
            shape = [*shard_shape]
            shape[self.axis] = self.size
        return self.within.full_shape(shape) if self.within else tuple(shape)


def even_sizes(size: int, count: int) -> list[int]:
    """Return the sizes of `count` shards; the first ones may be larger by 1."""
    least, more = divmod(size, count)
    return [least + (number < more) for number in range(count)]


def set_sharding(variable: keras.Variable, sharding: Sharding) -> None:
    """Record that a variable is this rank's shard; nothing for a single shard."""
    if sharding.num_shards == 1:
        return
    # On the TensorFlow variable as well: users pass either of them.
    for owner in (variable, as_tensorflow(variable)):
        setattr(owner, _ATTRIBUTE, sharding)


def get_sharding(variable: keras.Variable | tf.Variable) -> Sharding | None:
    """Return the `Sharding` of a variable; None if it is not sharded."""
    return getattr(variable, _ATTRIBUTE, None)


def set_stages(variable: keras.Variable, process_set: ProcessSet) -> None:
    """Record that `process_set` trains the stages of the model of a variable."""
    setattr(variable, _STAGES, process_set)


def get_stages(variables: Iterable[keras.Variable]) -> ProcessSet | None:
    """Return the ranks that train the stages of a model; None without stages."""
    return next((getattr(v, _STAGES) for v in variables if hasattr(v, _STAGES)), None)


def assign_shard(variable: keras.Variable, full: np.ndarray | tf.Tensor) -> None:
    """Assign to a variable its shard of a full value, or all of it if not sharded.

    Raises:
        ValueError: the full variable has another shape.
    """
    variable = local_shard(variable)
    if sharding := get_sharding(variable):
        expected = sharding.full_shape(variable.shape)
        if tuple(full.shape) != expected:
            raise ValueError(
                f"{variable.path} is a shard of a variable of the shape {expected}. "
                f"Received: values of the shape {tuple(full.shape)}"
            )
        # A slot has the shape of its variable where one rank holds all of a flattened
        # variable; the shard has one axis. A slice would share the memory of the full
        # value, and keep it.
        full = np.array(keras.ops.reshape(sharding.shard(full), variable.shape))
    variable.assign(full)


def is_sharded(variables: Iterable[keras.Variable]) -> bool:
    """Return whether one of the variables is sharded."""
    return any(map(get_sharding, variables))


def has_summed_gradients(variables: Iterable[keras.Variable]) -> bool:
    """Return whether the gradient of one of the variables is a sum over ranks."""
    shardings = filter(None, map(get_sharding, variables))
    return any(sharding.sums_gradients for sharding in shardings)


def is_replicated(variable: keras.Variable, process_set: ProcessSet) -> bool:
    """Return whether all ranks of a process set hold the same shard of a variable.

    False also if some of them train other stages of the model: they hold other
    variables.
    """
    stages, sharding = get_stages([variable]), get_sharding(variable)
    process_sets = [stages] if stages else []
    while sharding:
        process_sets.append(sharding.process_set)
        sharding = sharding.within
    ranks = {*process_set.ranks}
    # Two ranks of one of these process sets hold different shards.
    return all(len(ranks & {*split.ranks}) <= 1 for split in process_sets)


def is_split_over_ranks(variables: Sequence[keras.Variable]) -> bool:
    """Return whether other ranks train other shards or stages of the same model."""
    return is_sharded(variables) or get_stages(variables) is not None
