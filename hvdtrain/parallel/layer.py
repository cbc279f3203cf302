"""What sharded layers, losses and metrics have in common.

A new sharded layer derives from the Keras layer whose outputs it computes:

    class ColumnParallelDense(ShardedWeights, keras.layers.Dense):
        sharded_axes = {"kernel": 1, "bias": 0}
        own_arguments = ("gather_output",)

        def __init__(self, units, *args, gather_output=True, mesh=None, **kwargs):
            super().__init__(units, *args, **kwargs)
            self._set_mesh(mesh)
            check_arguments(self, refused={...}, additive={...})

        def call(self, inputs):
            outputs = self.make_sharding(len(inputs.shape) - 1, self.units)
            x = ops.matmul(mappings.copy(inputs, outputs), self.kernel)
            return mappings.gather(x + self.bias, outputs)

1. `sharded_axes` names the axis along which each weight is sharded. `build` of the
   Keras layer then creates this rank's shards, with the initial values that the shards
   of the full weights would have.
2. `_set_mesh` stores the model group, the ranks that hold the shards.
3. `check_arguments` refuses arguments that would compute other results from shards.
4. `call` passes tensors between replicated and sharded regions through `mappings`.
5. `takes_shards` and `gives_shards` say whether inputs and outputs are shards, for the
   checks of `sharding.layer_checks`.

Keras saves the layer as the Keras layer, with full weights: a saved model loads without
hvdtrain. A loss, metric or layer without weights derives from `InModelGroup` instead.
"""

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import api_export
from keras.src.random import seed_generator

from hvdtrain.collectives import transport
from hvdtrain.keras import sharded_models
from hvdtrain.keras.sharded_saving import load_shards, save_full
from hvdtrain.parallel import mappings
from hvdtrain.parallel.mesh import Axes, Axis, Mesh, active_mesh
from hvdtrain.sharding.shards import Sharding, set_sharding

# The class of Keras that follows a mixin in the order of method resolution; super()
# calls its methods.
_KerasObject: Any = object


class InModelGroup(_KerasObject):
    """Mixin of a Keras layer, loss or metric that computes with shards of tensors."""

    # Whether the inputs, and the outputs, are this rank's shards.
    takes_shards = gives_shards = False
    # Arguments that the Keras layer, and so the config, does not have.
    own_arguments: Sequence[str] = ()
    _model_axis: Axis
    _full_size: int | None = None

    @property  # type: ignore[misc]  # mypy expects a setter, as object has.
    def __class__(self) -> type:
        """The nearest public class of Keras, under which Keras saves the object."""
        return next(cls for cls in type(self).__mro__ if _is_public(cls))

    def _set_mesh(self, mesh: Mesh | Axes | None) -> None:
        sharded_models.install()
        self._model_axis = (mesh or active_mesh()).model

    def is_on_mesh(self, mesh: Mesh) -> bool:
        """Return whether it is sharded along the axis model of this `Mesh`."""
        axis = getattr(self, "_model_axis", None)
        return axis is not None and [*axis.process_set.ranks] == [
            *mesh.model.process_set.ranks
        ]

    def clone_for_mesh(self, mesh: Mesh | Axes) -> "InModelGroup":
        """Return a new layer of this class with the same arguments, for a mesh.

        The config alone would make the Keras layer.
        """
        own = {name: getattr(self, name) for name in self.own_arguments}
        return type(self).from_config({**self.get_config(), **own, "mesh": mesh})

    def clone_sharded(self) -> "InModelGroup":
        """Return a new layer that is sharded alike, with new weights."""
        return self.clone_for_mesh(Axes(model=self._model_axis))

    def make_sharding(self, axis: int, size: int) -> Sharding:
        """Return the `Sharding` of an axis of `size` elements over the model group."""
        model = self._model_axis
        return Sharding(
            axis=axis,
            size=size,
            num_shards=model.size,
            rank=model.index,
            process_set=model.process_set,
        )

    def check_one_for_each_rank(self, size: int, name: str) -> None:
        """Raise a ValueError unless each rank gets one of `size` units or inputs."""
        ranks = self._model_axis.size
        if size < ranks:
            raise ValueError(
                f"{type(self).__name__} needs one of its {name} on each of the {ranks} "
                f"ranks of the model group. Received: {size}. Use the Keras layer here."
            )

    def sum_over_ranks(self, number: int) -> int:
        """Return the sum of a number of each rank. A collective of the model group."""
        # A model may be built while its first step is traced; the sum is needed now.
        with tf.init_scope():
            total = transport.combine(
                tf.constant(number), self._model_axis.process_set, name="DividedSize"
            )
            # Not int(): AutoGraph replaces it, and the result would be a tensor.
            return total.numpy().item()

    def get_input_sharding(self, shard: tf.Tensor) -> Sharding:
        """Return the `Sharding` of a tensor whose last axis is sharded.

        A collective of the model group at the first call, when the ranks add up their
        sizes. The full size then stays the same for this object: a later collective
        that only some of the ranks trace again would deadlock.

        Raises:
            ValueError: the axis has another size than `ColumnParallelDense` gives it.
        """
        size = shard.shape[-1]
        if self._full_size is None:
            self._full_size = self.sum_over_ranks(size)
        sharding = self.make_sharding(len(shard.shape) - 1, self._full_size)
        expected = sharding.sizes[sharding.rank]
        if size != expected:
            raise ValueError(
                f"{type(self).__name__} takes the output of a ColumnParallelDense with "
                f"gather_output=False. Expected: {expected} of {sharding.size} on "
                f"rank {sharding.rank} of the model group. Received a tensor of shape "
                f"{tuple(shard.shape)}."
            )
        return sharding


def _is_public(cls: type) -> bool:
    return api_export.get_name_from_symbol(cls) is not None


# The penalty of a full weight is the sum of the penalties of its shards.
_ADDITIVE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class ShardedWeights(InModelGroup):
    """Mixin of a Keras layer of whose weights this rank creates shards.

    Subclasses set `sharded_axes`: the sharded axis of a weight, by the weight's name.
    Other weights are replicated.
    """

    sharded_axes: Mapping[str, int] = types.MappingProxyType({})

    # Each rank of a model group computes the same loss: see `mappings`.
    sum_penalties = staticmethod(mappings.reduce)

    def add_weight(
        self,
        shape: Sequence[int] | None = None,
        initializer: object = None,
        *,
        name: str | None = None,
        **kwargs: Any,
    ) -> keras.Variable:
        """Create this rank's shard of a weight of the full `shape`."""
        axis = None if name is None else self.sharded_axes.get(name)
        if axis is None or shape is None:
            return super().add_weight(
                shape=shape, initializer=initializer, name=name, **kwargs
            )
        sharding = self.make_sharding(axis, shape[axis])
        if regularizer := kwargs.pop("regularizer", None):
            kwargs["regularizer"] = SumRegularizer(
                regularizer, sharding, self.sum_penalties
            )
        full_initializer, full_shape = keras.initializers.get(initializer), tuple(shape)

        def initialize(_: object, dtype: str | None = None) -> tf.Tensor:
            return initial_shard(full_initializer, full_shape, sharding, dtype)

        weight = super().add_weight(
            shape=sharding.shard_shape(shape),
            initializer=initialize,
            name=name,
            **kwargs,
        )
        set_sharding(weight, sharding)
        return weight

    def save_own_variables(self, store: Any) -> None:
        """Save the full weights. A collective of all ranks; rank 0 has the file."""
        save_full(self._own_variables(), store)

    def load_own_variables(self, store: Any) -> None:
        """Load this rank's shards from full weights."""
        self._check_load_own_variables(store)
        load_shards(self._own_variables(), store)

    def enable_lora(self, *args: object, **kwargs: object) -> None:
        """Raise a ValueError: the factors would have to be sharded as the weight is."""
        self._refuse("LoRA")

    def quantize(self, *args: object, **kwargs: object) -> None:
        """Raise a ValueError: a scale is computed from a column of the full weight."""
        self._refuse("quantization")

    def _refuse(self, name: str) -> None:
        # Not a NotImplementedError, for which keras.Model.quantize skips the layer.
        raise ValueError(
            f"The {type(self).__name__} {self.name!r} does not support {name}: each "
            "rank has a shard of its weights. Use the Keras layer here, or apply "
            f"{name} to the saved full model in one process."
        )

    def _own_variables(self) -> list[keras.Variable]:
        return self._trainable_variables + self._non_trainable_variables


class SumRegularizer(keras.regularizers.Regularizer):
    """The penalty of a full weight or tensor, from the penalties of its shards.

    Keras saves it with the class and the config of the regularizer of the Keras layer.
    `total` adds up a penalty over the ranks of the sharding.
    """

    def __init__(
        self,
        regularizer: keras.regularizers.Regularizer,
        sharding: Sharding,
        total: Callable[[tf.Tensor, Sharding], tf.Tensor] = mappings.reduce,
    ) -> None:
        self._regularizer = regularizer
        self._sharding = sharding
        self._total = total

    @property  # type: ignore[misc]  # mypy expects a setter, as object has.
    def __class__(self) -> type:
        return type(self._regularizer)

    def get_config(self) -> dict[str, Any]:
        return self._regularizer.get_config()

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return self._total(self._regularizer(x), self._sharding)


def check_arguments(
    layer: keras.layers.Layer,
    *,
    refused: Mapping[str, object],
    additive: Mapping[str, object],
) -> None:
    """Raise a ValueError for arguments whose result differs on shards.

    `refused` arguments must be None. The penalties of `additive` regularizers must be
    sums over elements. A dtype policy with quantization is refused as well.
    """
    if mode := getattr(layer, "quantization_mode", None):
        raise ValueError(
            f"{type(layer).__name__} does not support quantization. Received: a dtype "
            f"policy with quantization_mode={mode!r}"
        )
    for name, value in refused.items():
        if value is not None:
            raise ValueError(
                f"{type(layer).__name__} does not support {name}. Received: "
                f"{name}={value!r}"
            )
    for name, value in additive.items():
        if value is not None and not isinstance(value, _ADDITIVE):
            raise ValueError(
                f"{type(layer).__name__} supports L1, L2 and L1L2 as {name}. "
                f"Received: {value!r}"
            )


_PHILOX = 1
# Elements that are drawn at once.
_CHUNK = 1 << 20
_DRAWS = {
    keras.initializers.RandomUniform: tf.raw_ops.StatelessRandomUniformV2,
    keras.initializers.RandomNormal: tf.raw_ops.StatelessRandomNormalV2,
}


def initial_shard(
    initializer: keras.initializers.Initializer | Callable[..., tf.Tensor],
    shape: Sequence[int],
    sharding: Sharding,
    dtype: str | None,
) -> tf.Tensor:
    """Return this rank's shard of the initial value of a full variable.

    Constants are made in the shape of the shard. Keras' `RandomUniform` and
    `RandomNormal` use a counter-based generator (Philox; Salmon et al. 2011): the draw
    of each chunk of rows starts at the counter of its first element, so that no rank
    ever holds the full value. All others, rejection samplers such as truncated normal
    and functions of users among them, draw the full value, of which this rank keeps its
    shard.
    """
    if _fills(initializer):
        return initializer(sharding.shard_shape(shape), dtype=dtype)
    is_plain = sharding.shape is None and sharding.within is None
    if type(initializer) in _DRAWS and is_plain:
        return _draw_in_chunks(_Draw(initializer, dtype), shape, sharding)
    return sharding.shard(initializer(shape, dtype=dtype))


def _fills(initializer: keras.initializers.Initializer) -> bool:
    cls = type(initializer)
    if cls is keras.initializers.Constant:
        return np.ndim(initializer.value) == 0
    return cls in (keras.initializers.Zeros, keras.initializers.Ones)


def _draw_in_chunks(
    draw: "_Draw", shape: Sequence[int], sharding: Sharding
) -> tf.Tensor:
    row_size = math.prod(shape[1:])
    rows = sharding.local_slice if sharding.axis == 0 else slice(0, shape[0])
    other = [slice(None)] * len(shape)
    if sharding.axis:
        other[sharding.axis] = sharding.local_slice
    step = max(1, _CHUNK // max(1, row_size))
    chunks = []
    for first in range(rows.start, rows.stop, step):
        last = min(first + step, rows.stop)
        values = draw(first * row_size, last * row_size)
        chunks.append(tf.reshape(values, [last - first, *shape[1:]])[tuple(other)])
    # A rank may have no rows.
    empty = tf.zeros([0, *sharding.shard_shape(shape)[1:]], draw.dtype)
    return tf.concat([empty, *chunks], axis=0)


class _Draw:
    """A draw of a `RandomUniform` or `RandomNormal`, to compute any elements of it."""

    def __init__(
        self, initializer: keras.initializers.Initializer, dtype: str | None
    ) -> None:
        self.dtype = tf.as_dtype(dtype or keras.config.floatx())
        self._operation = _DRAWS[type(initializer)]
        self._factor, self._summand = _get_scale(initializer, self.dtype)
        # The seed and the key, as computed by Keras' random functions and TensorFlow's.
        seed = seed_generator.draw_seed(initializer.seed)
        seed = tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)
        state = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        self._key, self._counter = state.key, state.counter

    def __call__(self, first: int, last: int) -> tf.Tensor:
        """Return the elements from number `first` to before number `last`."""
        # Each value of the counter gives 128 random bits: two float64, or four others.
        per_count = 2 if self.dtype == tf.float64 else 4
        counts, unused = divmod(first, per_count)
        drawn = self._operation(
            shape=[last - first + unused],
            key=self._key,
            counter=self._counter + tf.constant([counts, 0], tf.uint64),
            alg=_PHILOX,
            dtype=self.dtype,
        )
        return drawn[unused:] * self._factor + self._summand


def _get_scale(
    initializer: keras.initializers.Initializer, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the factor and the summand of the numbers that TensorFlow draws."""
    if isinstance(initializer, keras.initializers.RandomUniform):
        least = tf.cast(initializer.minval, dtype)
        return tf.cast(initializer.maxval, dtype) - least, least
    return tf.constant(initializer.stddev, dtype), tf.constant(initializer.mean, dtype)
