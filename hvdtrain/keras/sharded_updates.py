"""Which weights each rank updates, and the exchange of these weights."""

import dataclasses
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.dtypes import as_tensorflow, mark_internal
from hvdtrain.collectives.process_sets import ProcessSet, needs_communication
from hvdtrain.keras.gradients import GradientReducer
from hvdtrain.sharding.shards import Sharding, get_sharding, set_sharding

# By list of slots: the shape of a factor from the shape of its weight. Adafactor keeps
# means over the last axis and over the one before it.
_FACTORS = {"_r": lambda shape: shape[:-1], "_c": lambda shape: shape[:-2] + shape[-1:]}


def sizes_by_variable(counts: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Return the elements of each variable that each rank updates: all or none.

    The largest variables are dealt out first, each to the rank that has the fewest
    elements so far. `counts` are the elements of each variable.
    """
    loads: list[int] = [0] * ranks
    sizes: list[tuple[int, ...]] = [()] * len(counts)
    for i in sorted(range(len(counts)), key=lambda i: -counts[i]):
        owner = loads.index(min(loads))
        loads[owner] += counts[i]
        sizes[i] = tuple(counts[i] * (rank == owner) for rank in range(ranks))
    return sizes


class WeightShard:
    """The shard of one weight that this rank updates: all or no elements.

    Args:
        weight: may itself be a shard, of a sharded layer.
        sizes: elements of each rank of `process_set`; None for a weight that the other
            ranks have no replica of, all of which is updated here.

    Attributes:
        sharding: of its slots, which are flattened; None with `sizes=None`.
        variable: what Keras updates: the weight itself or a variable of no elements.
    """

    def __init__(
        self,
        weight: keras.Variable,
        sizes: tuple[int, ...] | None,
        process_set: ProcessSet,
    ) -> None:
        self.weight = weight
        self.sharding: Sharding | None = None
        if sizes is not None:
            self.sharding = Sharding.of_elements(
                weight.shape, sizes, process_set, within=get_sharding(weight)
            )
        is_full = self.size == math.prod(weight.shape)
        self.variable = weight if is_full else self._make_variable()

    @property
    def size(self) -> int:
        """Elements of the weight that this rank updates."""
        if self.sharding is None:
            return math.prod(self.weight.shape)
        return self.sharding.sizes[self.sharding.rank]

    def set_slot_sharding(self, slot: keras.Variable, kind: str) -> None:
        """Mark a slot of the weight as a shard, unless it is a scalar.

        Args:
            kind: name of the optimizer's list of such slots.

        Raises:
            ValueError: for a slot whose shape is neither of the weight nor a factor.
        """
        if self.sharding is None:
            return
        shape = self.sharding.shape or ()
        if kind in _FACTORS:
            if len(shape) > 1:
                factor = _factor_sharding(self.sharding, _FACTORS[kind](shape))
                set_sharding(slot, factor)
        elif slot.shape == self.variable.shape:
            set_sharding(slot, self.sharding)
        elif len(slot.shape):
            raise ValueError(
                f"shard_state cannot shard {slot.path}: a slot has the shape of its "
                f"variable, or is a scalar. Received: {tuple(slot.shape)} for {shape}."
            )

    def _make_variable(self) -> keras.Variable:
        # The optimizer may be built in a function that is being traced: its variables
        # outlive the trace. The variable has as many axes as the weight: Muon and
        # Adafactor select the kind of its slots by them. The scope of the layer is in
        # the name by which Keras excludes a weight from weight decay.
        scope = as_tensorflow(self.weight).name.rpartition("/")[0]
        with tf.init_scope(), tf.name_scope(scope and f"{scope}/"):
            variable = keras.Variable(
                tf.zeros([0] * max(1, len(self.weight.shape))),
                dtype=self.weight.dtype,
                trainable=False,
                name=self.weight.name,
            )
        mark_internal(variable.value)
        # Keras names slots after the path of their variable.
        variable._path = self.weight.path
        return variable


def _factor_sharding(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    """Return the sharding of a slot that has another shape than its weight."""
    sizes = tuple(bool(size) * math.prod(shape) for size in sharding.sizes)
    return dataclasses.replace(
        sharding, size=math.prod(shape), uneven=sizes, shape=shape
    )


def shard_weights(
    weights: list[keras.Variable], reducer: GradientReducer
) -> list[WeightShard]:
    """Return this rank's shard of each weight. Shards of local weights are full.

    Args:
        weights: the same on all ranks, but for local ones.
    """
    process_set = reducer.process_set
    if not needs_communication(process_set):
        return [WeightShard(weight, None, process_set) for weight in weights]
    counts = [math.prod(weight.shape) for weight in weights]
    indices = [i for i, weight in enumerate(weights) if not reducer.is_local(weight)]
    # Shards of a sharded layer differ in size along the axis model, along which other
    # weights are replicated: the sizes of their shards must not depend on the former.
    groups = [
        [i for i in indices if bool(get_sharding(weights[i])) == is_sharded]
        for is_sharded in (False, True)
    ]
    sizes: list[tuple[int, ...] | None] = [None] * len(weights)
    for group in groups:
        group_sizes = sizes_by_variable([counts[i] for i in group], process_set.size())
        for i, sizes_by_rank in zip(group, group_sizes, strict=True):
            sizes[i] = sizes_by_rank
    pairs = zip(weights, sizes, strict=True)
    return [WeightShard(*pair, process_set) for pair in pairs]


def gather(
    shards: list[WeightShard],
    values: Sequence[tf.Tensor | keras.Variable],
    targets: Sequence[keras.Variable],
) -> None:
    """Assign full values to `targets` from the shards of all ranks. A collective.

    Args:
        values: this rank's shard of each. A target that is its own value is up to date.
    """
    triples = list(zip(shards, values, targets, strict=True))
    for shard, value, target in triples:
        if shard.sharding is None and target is not value:
            target.assign(value)
    sharded = [(s.sharding, v, t) for s, v, t in triples if s.sharding]
    if not sharded:
        return
    full = transport.gather_shards(
        [value for _, value, _ in sharded],
        [sharding.sizes for sharding, _, _ in sharded],
        [None if target is value else target.shape for _, value, target in sharded],
        name="ShardGather",
        process_set=sharded[0][0].process_set,
    )
    for value, (_, _, target) in zip(full, sharded, strict=True):
        if value is not None:
            target.assign(value)
