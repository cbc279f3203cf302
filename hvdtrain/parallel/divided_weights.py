"""Weights of which each rank of a model group holds a slice."""

import types

import keras
import tensorflow as tf
from keras.src import api_export

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Reduction, Sum
from hvdtrain.keras import collective_calls
from hvdtrain.keras.dense_saving import load_slices, save_dense
from hvdtrain.keras.partition import Partition, set_partition
from hvdtrain.parallel import mappings
from hvdtrain.parallel.mesh import active_mesh


class DividedWeights:
    """Mixin of a Keras layer whose weights are slices of those of its dense twin.

    The dense layer's own `build` makes them, and its initializers draw all of a weight
    before the slice is taken: the initial values are those of the dense twin.

    Subclasses set `divided_axes`, the divided axis of each weight by its name.
    """

    divided_axes = types.MappingProxyType({})

    @property
    def __class__(self):
        """The class of the dense twin: that of which Keras saves the layer."""
        return next(cls for cls in type(self).__mro__ if _is_public(cls))

    def _set_mesh(self, mesh):
        collective_calls.install()
        self._model_axis = (mesh or active_mesh()).model

    def partition(self, axis, size):
        """Return the `Partition` of an axis of `size` elements over the model group."""
        model = self._model_axis
        return Partition(
            axis=axis,
            size=size,
            ranks=model.size,
            rank=model.index,
            process_set=model.process_set,
        )

    def sum_over_ranks(self, number):
        """Return the sum of a number of each rank of the model group."""
        process_set = self._model_axis.process_set
        if not needs_communication(process_set):
            return number
        # Also where the model is built while its first step is traced.
        with tf.init_scope():
            (total,) = transport.allreduce(
                [tf.constant(number)],
                Reduction(op=Sum, process_set=process_set),
                name="DividedSize",
            )
            return int(total)

    def add_weight(self, shape=None, initializer=None, *, name=None, **kwargs):
        """As that of Keras, but the weight is this rank's slice."""
        axis = self.divided_axes.get(name)
        if axis is None:
            return super().add_weight(
                shape=shape, initializer=initializer, name=name, **kwargs
            )
        partition = self.partition(axis, shape[axis])
        if regularizer := kwargs.pop("regularizer", None):
            kwargs["regularizer"] = _SumRegularizer(regularizer, partition)
        weight = super().add_weight(
            shape=partition.local_shape(shape),
            initializer=_SliceInitializer(initializer, shape, partition),
            name=name,
            **kwargs,
        )
        set_partition(weight, partition)
        return weight

    def save_own_variables(self, store):
        """As that of Keras, but of the dense weights. A collective of all ranks."""
        save_dense(self._own_variables(), store)

    def load_own_variables(self, store):
        """As that of Keras, but takes this rank's slices."""
        load_slices(self._own_variables(), store)

    def _own_variables(self):
        return self._trainable_variables + self._non_trainable_variables


def _is_public(cls):
    return api_export.get_name_from_symbol(cls) is not None


class _SliceInitializer:
    def __init__(self, initializer, shape, partition):
        self._initializer = keras.initializers.get(initializer)
        self._shape = tuple(shape)
        self._partition = partition

    def __call__(self, shape, dtype=None):
        return self._partition.of(self._initializer(self._shape, dtype=dtype))


class _SumRegularizer(keras.regularizers.Regularizer):
    """The penalty of a dense weight: the sum of those of its slices."""

    def __init__(self, regularizer, partition):
        self._regularizer = regularizer
        self._partition = partition

    def __call__(self, x):
        return mappings.reduce(self._regularizer(x), self._partition)
