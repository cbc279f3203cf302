"""Weights of which each rank stores a shard, and layers see the full value.

A `FullyShardedVariable` gathers its value where a layer reads it. A collective for each
read would be slow, and would keep each result for the backward pass. So the call of a
layer gathers the weights of the layer together, and reads them in the block `reading`.

The gradient of a gather is a reduce-scatter: each rank receives the sum over the ranks
of its shard of the gradients (`Sharding.sums_gradients`).

Under `keras.distribution` a weight may also be sharded along one of its axes, over
ranks that have equal samples. The gradient of the gather is then this rank's block of
the gradient. The call of a layer may compute with the block alone.
"""

import contextlib
import contextvars
import itertools
import math
import warnings
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager import record

from hvdtrain.collectives import transport
from hvdtrain.collectives.dtypes import local_shard, mark_internal, set_local_shard
from hvdtrain.collectives.process_sets import ProcessSet, global_process_set
from hvdtrain.collectives.transport import Reduction, Sum
from hvdtrain.keras import sharded_saving
from hvdtrain.sharding.shards import Sharding, set_sharding

# A shard starts at a multiple of this within its weight. Eigen computes full vectors
# and the rest of a tensor by different functions, whose last bits may differ (`pow`):
# so each element is computed as in the full weight.
_ALIGNMENT = 16
# Full values by the identity of the variable, of the blocks `reading` that are open.
_values: contextvars.ContextVar[tuple[dict[int, tf.Tensor], ...]] = (
    contextvars.ContextVar("values", default=())
)


class FullyShardedVariable(keras.Variable):
    """A weight with the full value for layers, of which this rank stores a shard.

    The shard is flat, or a block along an axis, or a flat shard of such a block.

    `shard_variable` makes it of a variable, in place: layers keep their reference.

    Attributes:
        sharding: which elements this rank stores.
        gathered_dtype: the dtype in which the value is sent, that of the computation.
    """

    sharding: Sharding
    gathered_dtype: str

    @property
    def axis_sharding(self) -> Sharding | None:
        """The sharding along an axis; its blocks may be sharded by their elements."""
        return self.sharding if self.sharding.shape is None else self.sharding.within

    @property
    def value(self) -> tf.Tensor:
        """The full value. A collective outside of the call of its layer."""
        return self._maybe_autocast(self._read())

    def _read(self) -> tf.Tensor:
        scope = global_state.get_global_attribute("stateless_scope")
        # In a pass of `remat`, a layer may have assigned it.
        found = None if scope is None else scope.get_current_value(self)
        if found is None:
            found = ChainMap(*_values.get()).get(id(self))
        return self._gather() if found is None else found

    def _gather(self) -> tf.Tensor:
        if global_state.get_global_attribute("symbolic_scope") is not None:
            # Keras infers shapes.
            return tf.zeros(self._shape, self._dtype)
        if sharded_saving.is_in_saving_thread():
            return tf.convert_to_tensor(sharded_saving.full_value(self))
        shard = shard_value(self)
        # Keras reads weights with a regularizer there. One rank warns for all.
        is_expected = not self.trainable or self.regularizer is not None
        is_first = global_process_set.rank() == 0
        if is_first and not is_expected and record.should_record_backprop([shard]):
            warnings.warn(
                f"{self.path} is read outside of the call of its layer: it is gathered "
                "there, and kept until the backward pass.",
                stacklevel=3,
            )
        return gather([self], [shard], dtype=self._dtype)[0]

    @property
    def handle(self) -> tf.Tensor:
        """The handle of the shard, for which tapes compute the gradient."""
        return self._value.handle

    def _direct_assign(self, value: tf.Tensor) -> None:
        # A layer that assigns a weight in its call reads the new value after that.
        for given in _values.get():
            given.pop(id(self), None)
        shard = local_shard(self)
        # A slice would share the memory of the full value, and keep it.
        new = tf.raw_ops.DeepCopy(x=self.sharding.shard(value))
        shard.assign(tf.cast(new, shard.dtype))

    def numpy(self) -> np.ndarray:
        """Return the full value. A collective."""
        return np.array(self.value)


def flat_sharding(
    shape: Sequence[int], process_set: ProcessSet, within: Sharding | None = None
) -> Sharding:
    """Return the sharding of the elements of a weight, or of a block of one.

    Args:
        shape: of the weight or block.
        process_set: ranks with different samples, which share its elements.
        within: the sharding of the weight of which it is a block.
    """
    sizes = flat_sizes(math.prod(shape), process_set.size())
    return Sharding.of_elements(
        shape, sizes, process_set, within=within, sums_gradients=True
    )


def flat_sizes(count: int, ranks: int) -> tuple[int, ...]:
    """Return the elements of a weight of `count` elements that each rank has."""
    cuts = [count * rank // ranks // _ALIGNMENT * _ALIGNMENT for rank in range(ranks)]
    return tuple(end - start for start, end in itertools.pairwise([*cuts, count]))


def shard_variable(
    variable: keras.Variable,
    sharding: Sharding,
    gathered_dtype: str,
    *,
    process_set: ProcessSet,
) -> None:
    """Make a variable a `FullyShardedVariable`, with the values of the first rank.

    A collective of `process_set`, which has more than one rank.

    Args:
        sharding: a `flat_sharding`, or the sharding along one axis over ranks with
            equal samples.
    """
    shard = _make_shard(variable, sharding, process_set)
    # Keras keeps it as the key of weights that are excluded from weight decay.
    shard._value._unique_id = variable._value._unique_id
    variable.__class__ = FullyShardedVariable
    variable.sharding, variable.gathered_dtype = sharding, gathered_dtype
    variable._value = shard._value
    set_local_shard(variable, shard)
    for owner in (variable, shard):
        set_sharding(owner, sharding)


def _make_shard(
    variable: keras.Variable, sharding: Sharding, ranks: ProcessSet
) -> keras.Variable:
    # The name of the TensorFlow variable has the scope of the layer; by it, and by the
    # path, Keras excludes weights from weight decay and names slots.
    scope = variable._value.name.rpartition("/")[0]
    with tf.init_scope(), tf.name_scope(scope and f"{scope}/"):
        full = transport.broadcast(
            variable._value, ranks.ranks[0], name="FullyShard", process_set=ranks
        )
        # A slice would share the memory of the full value, and keep it.
        shard = keras.Variable(
            np.array(sharding.shard(full)),
            # A layer may create it in its call, in the scope of the autocast.
            dtype=variable._dtype,
            trainable=variable.trainable,
            name=variable.name,
        )
    mark_internal(shard._value)
    shard._path = variable.path
    return shard


def find_sharded(variables: Sequence[keras.Variable]) -> list[FullyShardedVariable]:
    """Return those of the variables that are fully sharded."""
    return [v for v in variables if isinstance(v, FullyShardedVariable)]


def find_unread(
    variables: Sequence[FullyShardedVariable],
) -> list[FullyShardedVariable]:
    """Return those of the variables that no block `reading` around gives."""
    given = ChainMap(*_values.get())
    return [variable for variable in variables if id(variable) not in given]


def shard_value(variable: FullyShardedVariable) -> tf.Tensor:
    """Return the tensor of this rank's shard, to which a tape attributes gradients."""
    return tf.convert_to_tensor(variable._value)


@contextlib.contextmanager
def reading(
    variables: Sequence[FullyShardedVariable], values: Sequence[tf.Tensor]
) -> Iterator[None]:
    """Give layers these full values of variables in the block."""
    new = dict(zip(map(id, variables), values, strict=True))
    token = _values.set((new, *_values.get()))
    try:
        yield
    finally:
        _values.reset(token)


def gather(
    variables: Sequence[FullyShardedVariable],
    shards: Sequence[tf.Tensor],
    dtype: str | None = None,
    blocks: Collection[FullyShardedVariable] = (),
) -> list[tf.Tensor]:
    """Return the full values of the shards of all ranks. A collective.

    So is its gradient, for the variables that are trainable.

    Args:
        shards: this rank's shard of each, in the dtype of the variable.
        dtype: of the results; by default the `gathered_dtype` of each.
        blocks: variables that are sharded along an axis, of which the results are this
            rank's blocks.
    """
    if not variables:
        return []
    # By identity: variables compare by value.
    kept = set(map(id, blocks))
    axes = [None if id(each) in kept else each.axis_sharding for each in variables]

    @tf.custom_gradient
    def gather_all(*shards: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
        cast = [
            tf.cast(shard, dtype or variable.gathered_dtype)
            for shard, variable in zip(shards, variables, strict=True)
        ]
        full = _gather_axes(_gather_elements(variables, cast), axes)
        return full, lambda *upstream: _scatter(variables, upstream, axes)

    full = gather_all(*shards)
    return list(full) if isinstance(full, list | tuple) else [full]


def _gather_elements(
    variables: Sequence[FullyShardedVariable], shards: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the values of shards that are flat, and the other shards as they are."""
    values = list(shards)
    flat = [i for i, variable in enumerate(variables) if variable.sharding.shape]
    if flat:
        shardings = [variables[i].sharding for i in flat]
        gathered = transport.gather_shards(
            [values[i] for i in flat],
            [sharding.sizes for sharding in shardings],
            [sharding.shape for sharding in shardings],
            name="FullyShardedGather",
            process_set=shardings[0].process_set,
        )
        for i, value in zip(flat, gathered, strict=True):
            values[i] = value
    return values


def _gather_axes(
    blocks: Sequence[tf.Tensor], axes: Sequence[Sharding | None]
) -> list[tf.Tensor]:
    """Return the full values of blocks, and those without a sharding as they are."""
    values = list(blocks)
    split = [(i, axis) for i, axis in enumerate(axes) if axis]
    if not split:
        return values
    # Flat shards are slices of a tensor: the axis comes first.
    rows = [
        tf.experimental.numpy.moveaxis(values[i], axis.axis, 0) for i, axis in split
    ]
    widths = [math.prod(each.shape[1:]) for each in rows]
    gathered = transport.gather_shards(
        [tf.reshape(each, [-1]) for each in rows],
        [
            [size * width for size in axis.sizes]
            for (_, axis), width in zip(split, widths, strict=True)
        ],
        [
            (axis.size, *each.shape[1:])
            for (_, axis), each in zip(split, rows, strict=True)
        ],
        name="AxisGather",
        process_set=split[0][1].process_set,
    )
    for (i, axis), value in zip(split, gathered, strict=True):
        values[i] = tf.experimental.numpy.moveaxis(value, 0, axis.axis)
    return values


def _scatter(
    variables: Sequence[FullyShardedVariable],
    gradients: Sequence[tf.Tensor | tf.IndexedSlices],
    axes: Sequence[Sharding | None],
) -> list[tf.Tensor | None]:
    """Return the gradients of the shards, from those of what `gather` returned."""
    results: list[tf.Tensor | None] = [None] * len(variables)
    for i, variable in enumerate(variables):
        if variable.trainable:
            # In the dtype of the variable: sums of bfloat16 would be rounded.
            gradient = tf.cast(tf.convert_to_tensor(gradients[i]), variable._dtype)
            # Ranks that share the axis have equal samples, and so equal gradients.
            axis = axes[i]
            results[i] = axis.shard(gradient) if axis else gradient
    flat = [
        i
        for i, variable in enumerate(variables)
        if variable.trainable and variable.sharding.shape
    ]
    if flat:
        shardings = [variables[i].sharding for i in flat]
        sums = transport.reduce_to_shards(
            [results[i] for i in flat],
            [sharding.sizes for sharding in shardings],
            Reduction(op=Sum, process_set=shardings[0].process_set),
            name="FullyShardedScatter",
        )
        for i, shard in zip(flat, sums, strict=True):
            results[i] = shard
    return results
