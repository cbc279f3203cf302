"""Which part of each weight a rank updates, and the exchange of these parts."""

import dataclasses
import itertools
import math

import keras
import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.keras.gradients import split_into_groups
from hvdtrain.sharding.shards import Sharding, get_sharding

# A part starts at a multiple of this within its variable. Eigen computes full vectors
# and the rest of a tensor by different functions, whose last bits may differ (`pow`):
# so each element is computed as in the whole variable.
_ALIGNMENT = 16


def sizes_by_variable(counts, ranks):
    """Returns the elements of each variable that each rank updates: all or none.

    The largest variables are dealt out first, each to the rank that has the fewest
    elements so far.

    Args:
        counts: list of the elements of each variable.
        ranks: number of ranks.
    """
    loads, sizes = [0] * ranks, [None] * len(counts)
    for i in sorted(range(len(counts)), key=lambda i: -counts[i]):
        owner = loads.index(min(loads))
        loads[owner] += counts[i]
        sizes[i] = tuple(counts[i] * (rank == owner) for rank in range(ranks))
    return sizes


def sizes_by_shards(counts, ranks):
    """Returns the same for equal slices of the concatenation of all variables."""
    total, sizes = sum(counts), []
    starts = itertools.accumulate(counts, initial=0)
    for start, count in zip(starts, counts, strict=False):
        cuts = [_cut(total * rank // ranks - start, count) for rank in range(ranks + 1)]
        sizes.append(tuple(b - a for a, b in itertools.pairwise(cuts)))
    return sizes


def _cut(place, count):
    return count if place >= count else max(0, place) // _ALIGNMENT * _ALIGNMENT


class WeightShard:
    """This rank's part of one weight: flattened elements, all of them, or none.

    Args:
        weight: a Keras variable.
        sizes: elements of each rank of `process_set`; None for a weight that the other
            ranks have no copy of, which is updated here as a whole.
        process_set: the ranks.

    Attributes:
        weight: see above.
        sharding: the `Sharding` of its slots; None with `sizes=None`.
        variable: what Keras updates: the weight itself or a one-dimensional variable.
    """

    def __init__(self, weight, sizes, process_set):
        self.weight = weight
        self.sharding = None
        if sizes is not None:
            self.sharding = Sharding(
                axis=0,
                size=sum(sizes),
                num_shards=len(sizes),
                rank=process_set.rank(),
                process_set=process_set,
                uneven=sizes,
                shape=tuple(weight.shape),
                within=get_sharding(weight),
            )
        is_full = sizes is None or max(sizes) == sum(sizes) == self.size
        self.variable = weight if is_full else self._make_variable()

    @property
    def size(self):
        """Elements of the weight that this rank updates."""
        if self.sharding is None:
            return math.prod(self.weight.shape)
        return self.sharding.sizes[self.sharding.rank]

    @property
    def is_full(self):
        """Whether this rank updates all of the weight, in place."""
        return self.variable is self.weight

    def factor_sharding(self, shape):
        """Returns the `Sharding` of a slot that has another shape than the weight."""
        sizes = [bool(size) * math.prod(shape) for size in self.sharding.sizes]
        return dataclasses.replace(
            self.sharding, size=math.prod(shape), uneven=tuple(sizes), shape=shape
        )

    def of(self, dense):
        """Returns this rank's part of a dense tensor, such as the weight's gradient."""
        if self.is_full:
            return dense
        return self._part(dense)

    def current(self):
        """Returns this rank's part of the weight."""
        return self.of(self.weight) if self.size else self.variable

    def refresh(self):
        """Takes over the weight's values, which a broadcast may have changed."""
        if not self.is_full and self.size:
            self.variable.assign(self._part(self.weight))

    def _part(self, dense):
        # Sparse gradients become dense ones.
        flat = tf.reshape(tf.convert_to_tensor(dense), [-1])
        return flat[self.sharding.local_slice]

    def _make_variable(self):
        # Also in a function that is being traced. A variable of no elements has as many
        # axes as the weight: Muon and Adafactor select the kind of its slots by them.
        with tf.init_scope():
            if self.size:
                value = self._part(self.weight)
            else:
                value = tf.zeros([0] * max(1, len(self.weight.shape)))
            variable = keras.Variable(
                value, dtype=self.weight.dtype, trainable=False, name=self.weight.name
            )
        # Slots are named after it.
        variable._path = self.weight.path
        return variable


def divide(weights, reducer, *, is_by_variable):
    """Returns the `WeightShard`s of weights, which are the same on all ranks.

    Args:
        weights: list of Keras variables.
        reducer: the `GradientReducer`. Weights that are local stay whole.
        is_by_variable: a rank has all or none of a weight.
    """
    process_set = reducer.process_set
    if not needs_communication(process_set):
        return [WeightShard(weight, None, process_set) for weight in weights]
    counts = [math.prod(weight.shape) for weight in weights]
    shared = [i for i, weight in enumerate(weights) if not reducer.is_local(weight)]
    # Slices of a divided layer differ in size along the axis model. The division of
    # other weights, of which these ranks have copies, must not depend on them.
    kinds = [
        [i for i in shared if bool(get_sharding(weights[i])) == is_sharded]
        for is_sharded in (False, True)
    ]
    # By slices, each rank has a part of each group: they are reduced one by one.
    groups = kinds
    if not is_by_variable:
        groups = [
            group
            for kind in kinds
            for group in split_into_groups(kind, weights, reducer.options.groups)
        ]
    sizes_of = sizes_by_variable if is_by_variable else sizes_by_shards
    sizes = [None] * len(weights)
    for group in groups:
        found = sizes_of([counts[i] for i in group], process_set.size())
        for i, each in zip(group, found, strict=True):
            sizes[i] = each
    pairs = zip(weights, sizes, strict=True)
    return [WeightShard(weight, each, process_set) for weight, each in pairs]


def gather(shards, values, targets):
    """Assigns variables from all ranks' parts of them. A collective.

    Args:
        shards: list of `WeightShard`, of the same weights on all ranks.
        values: list of this rank's part of each, a variable or tensor.
        targets: list of variables. One that is its own value is up to date.
    """
    triples = list(zip(shards, values, targets, strict=True))
    for shard, value, target in triples:
        if shard.sharding is None and target is not value:
            target.assign(value)
    divided = [each for each in triples if each[0].sharding]
    if not divided:
        return
    dense = transport.gather_shards(
        [value for _, value, _ in divided],
        [shard.sharding.sizes for shard, _, _ in divided],
        [None if target is value else target.shape for _, value, target in divided],
        name="ShardGather",
        process_set=divided[0][0].sharding.process_set,
    )
    for value, (_, _, target) in zip(dense, divided, strict=True):
        if value is not None:
            target.assign(value)


def scatter(shards, gradients, reduction, *, name):
    """Reduces gradients over the ranks to this rank's part of each. A collective.

    Args:
        shards: list of `WeightShard` with a sharding.
        gradients: list of gradients.
        reduction: the `Reduction`.
        name: of the operation.
    """
    parts = transport.reduce_to_shards(
        # Sparse gradients become dense ones.
        list(map(tf.convert_to_tensor, gradients)),
        [shard.sharding.sizes for shard in shards],
        reduction,
        name=name,
    )
    return [
        tf.reshape(part, shard.variable.shape)
        for part, shard in zip(parts, shards, strict=True)
    ]
