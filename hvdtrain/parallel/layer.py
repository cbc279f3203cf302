"""What layers, losses and metrics of a divided model need of their model group."""

import math
import types

import keras
import numpy as np
import tensorflow as tf
from keras.src import api_export
from keras.src.random import seed_generator

from hvdtrain.collectives import transport
from hvdtrain.keras import collective_calls
from hvdtrain.keras.full_saving import load_shards, save_full
from hvdtrain.parallel import mappings
from hvdtrain.parallel.mesh import Axes, active_mesh
from hvdtrain.sharding.shards import Sharding, set_sharding


class InModelGroup:
    """Mixin of a Keras object that computes with parts of tensors."""

    # Whether inputs, and outputs, are this rank's parts; see `keras.parts`.
    takes_shards = gives_shards = False
    # Arguments that the dense twin, and so the config, does not have.
    own_arguments = ()
    _full_size = None

    @property
    def __class__(self):
        """The class of the dense twin: that of which Keras saves the object."""
        return next(cls for cls in type(self).__mro__ if _is_public(cls))

    def _set_mesh(self, mesh):
        collective_calls.install()
        self._model_axis = (mesh or active_mesh()).model

    def is_on_mesh(self, mesh):
        """Return whether it is divided over the axis model of this `Mesh`."""
        axis = getattr(self, "_model_axis", None)
        return axis is not None and [*axis.process_set.ranks] == [
            *mesh.model.process_set.ranks
        ]

    def clone_for_mesh(self, mesh):
        """Return a layer of the same class with the same arguments, for a `Mesh`.

        The config alone is that of the dense twin.
        """
        own = {name: getattr(self, name) for name in self.own_arguments}
        return type(self).from_config({**self.get_config(), **own, "mesh": mesh})

    def clone_sharded(self) -> keras.layers.Layer:
        """Return a new layer that is divided alike, with new weights."""
        return self.clone_for_mesh(Axes(model=self._model_axis))

    def make_sharding(self, axis, size):
        """Return the `Sharding` of an axis of `size` elements over the model group."""
        model = self._model_axis
        return Sharding(
            axis=axis,
            size=size,
            num_shards=model.size,
            rank=model.index,
            process_set=model.process_set,
        )

    def check_one_for_each_rank(self, size, name):
        """Raise a ValueError unless each rank gets one of so many units or inputs."""
        ranks = self._model_axis.size
        if size < ranks:
            raise ValueError(
                f"{type(self).__name__} needs one of its {name} on each of the {ranks} "
                f"ranks of the model group. Received: {size}. Use the dense layer here."
            )

    def sum_over_ranks(self, number):
        """Return the sum of a number of each rank of the model group."""
        # Also where the model is built while its first step is traced.
        with tf.init_scope():
            total = transport.combine(
                tf.constant(number), self._model_axis.process_set, name="DividedSize"
            )
            # AutoGraph turns int() of a tensor into another tensor.
            return total.numpy().item()

    def sharding_of_input(self, part):
        """Return the `Sharding` whose part on this rank is the last axis of a tensor.

        At the first call, the ranks add up their sizes. It stays the sharding of this
        object: a later exchange on some of the ranks only would be a deadlock.

        Raises:
            ValueError: the axis has another size than `ColumnParallelDense` leaves.
        """
        size = part.shape[-1]
        if self._full_size is None:
            self._full_size = self.sum_over_ranks(size)
        sharding = self.make_sharding(len(part.shape) - 1, self._full_size)
        expected = sharding.sizes[sharding.rank]
        if size != expected:
            raise ValueError(
                f"{type(self).__name__} takes the output of a ColumnParallelDense with "
                f"gather_output=False. Expected: {expected} of {sharding.size} on "
                f"rank {sharding.rank} of the model group. Received a tensor of shape "
                f"{tuple(part.shape)}."
            )
        return sharding


def _is_public(cls):
    return api_export.get_name_from_symbol(cls) is not None


# Their sum over the slices is that of the dense weight.
_ADDITIVE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class ShardedWeights(InModelGroup):
    """Mixin of a Keras layer whose weights are slices of those of its dense twin.

    The dense layer's own `build` makes them. The initial values are those of the dense
    twin: see `initial_shard`.

    Subclasses set `sharded_axes`, the divided axis of each weight by its name.
    """

    sharded_axes = types.MappingProxyType({})

    # Each rank of a model group computes the same loss: see `mappings`.
    sum_of_penalties = staticmethod(mappings.reduce)

    def add_weight(self, shape=None, initializer=None, *, name=None, **kwargs):
        """As that of Keras, but the weight is this rank's slice."""
        axis = self.sharded_axes.get(name)
        if axis is None:
            return super().add_weight(
                shape=shape, initializer=initializer, name=name, **kwargs
            )
        sharding = self.make_sharding(axis, shape[axis])
        if regularizer := kwargs.pop("regularizer", None):
            kwargs["regularizer"] = SumRegularizer(
                regularizer, sharding, self.sum_of_penalties
            )
        weight = super().add_weight(
            shape=sharding.shard_shape(shape),
            initializer=_ShardInitializer(initializer, shape, sharding),
            name=name,
            **kwargs,
        )
        set_sharding(weight, sharding)
        return weight

    def save_own_variables(self, store):
        """As that of Keras, but of the dense weights. A collective of all ranks."""
        save_full(self._own_variables(), store)

    def load_own_variables(self, store):
        """As that of Keras, but takes this rank's slices."""
        self._check_load_own_variables(store)
        load_shards(self._own_variables(), store)

    def enable_lora(self, *args: object, **kwargs: object) -> None:
        """Raise a ValueError: the factors would have to be divided as the weight is."""
        self._refuse("LoRA")

    def quantize(self, *args: object, **kwargs: object) -> None:
        """Raise a ValueError: scales are those of the columns of the dense weight."""
        self._refuse("quantization")

    def _refuse(self, name):
        # Not a NotImplementedError, for which keras.Model.quantize skips the layer.
        raise ValueError(
            f"The {type(self).__name__} {self.name!r} does not support {name}: each "
            "rank has a slice of its weights. Use the dense layer here, or apply "
            f"{name} to the saved dense model in one process."
        )

    def _own_variables(self):
        return self._trainable_variables + self._non_trainable_variables


class _ShardInitializer:
    def __init__(self, initializer, shape, sharding):
        self._initializer = keras.initializers.get(initializer)
        self._shape = tuple(shape)
        self._sharding = sharding

    def __call__(self, shape, dtype=None):
        return initial_shard(self._initializer, self._shape, self._sharding, dtype)


class SumRegularizer(keras.regularizers.Regularizer):
    """The penalty of a dense weight or tensor: the sum of those of its slices.

    Keras saves it as the regularizer of the dense twin, whose class and config it has.
    """

    def __init__(self, regularizer, sharding, total=mappings.reduce):
        self._regularizer = regularizer
        self._sharding = sharding
        self._total = total

    @property
    def __class__(self):
        """The class of the dense twin's regularizer."""
        return type(self._regularizer)

    def get_config(self):
        """Return that of the dense twin's regularizer."""
        return self._regularizer.get_config()

    def __call__(self, x):
        """Return the penalty, the same on all ranks."""
        return self._total(self._regularizer(x), self._sharding)


def check_arguments(layer, *, refused, additive):
    """Raise a ValueError for arguments of a layer that slices do not allow.

    Quantization, by its dtype policy, is one of them.

    Args:
        layer: the layer, for its name.
        refused: arguments by name, which must be None.
        additive: regularizers by name, which must be sums over elements.
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


def initial_shard(initializer, shape, sharding, dtype):
    """Return this rank's part of the initial value of a dense variable.

    Constants are made in the shape of the slice. Keras' `RandomUniform` and
    `RandomNormal` use a generator by counter (Philox; Salmon et al. 2011): their draw
    is continued at the first element of each chunk of rows, so that the dense value is
    never whole on a rank. Other initializers draw all of it, then the slice is taken:
    those that reject draws, and a user's own.

    Args:
        initializer: a Keras initializer, or a function of shape and dtype.
        shape: of the dense variable.
        sharding: its `Sharding`.
        dtype: of the variable; by default Keras' floatx.
    """
    if _fills(initializer):
        return initializer(sharding.shard_shape(shape), dtype=dtype)
    is_plain = sharding.shape is None and sharding.within is None
    if type(initializer) in _DRAWS and is_plain:
        return _in_chunks(_Draw(initializer, dtype), shape, sharding)
    return sharding.shard(initializer(shape, dtype=dtype))


def _fills(initializer):
    kind = type(initializer)
    if kind is keras.initializers.Constant:
        return np.ndim(initializer.value) == 0
    return kind in (keras.initializers.Zeros, keras.initializers.Ones)


def _in_chunks(draw, shape, sharding):
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
    empty = tf.zeros([0, *sharding.shard_shape(shape)[1:]], draw.dtype)
    return tf.concat([empty, *chunks], axis=0)


class _Draw:
    """The elements of one draw of an initializer, from any one to any other.

    Args:
        initializer: a `RandomUniform` or `RandomNormal`.
        dtype: of the elements.
    """

    def __init__(self, initializer, dtype):
        self.dtype = tf.as_dtype(dtype or keras.config.floatx())
        self._operation, scale_of = _DRAWS[type(initializer)]
        self._factor, self._summand = scale_of(initializer, self.dtype)
        # As Keras' own random functions for TensorFlow, and TensorFlow's.
        seed = seed_generator.draw_seed(initializer.seed)
        seed = tf.cast(tf.math.floormod(seed, tf.int32.max - 1), tf.int32)
        state = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
        self._key, self._counter = state.key, state.counter

    def __call__(self, first, last):
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


def _uniform_scale(initializer, dtype):
    least = tf.cast(initializer.minval, dtype)
    return tf.cast(initializer.maxval, dtype) - least, least


def _normal_scale(initializer, dtype):
    return tf.constant(initializer.stddev, dtype), tf.constant(initializer.mean, dtype)


_DRAWS = {
    keras.initializers.RandomUniform: (
        tf.raw_ops.StatelessRandomUniformV2,
        _uniform_scale,
    ),
    keras.initializers.RandomNormal: (
        tf.raw_ops.StatelessRandomNormalV2,
        _normal_scale,
    ),
}
