"""Weights of which each rank of a model group holds a slice."""

import types

import keras

from hvdtrain.keras.dense_saving import load_slices, save_dense
from hvdtrain.keras.partition import set_partition
from hvdtrain.parallel import mappings
from hvdtrain.parallel.initial_values import initial_slice
from hvdtrain.parallel.model_group import InModelGroup

# Their sum over the slices is that of the dense weight.
_ADDITIVE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class DividedWeights(InModelGroup):
    """Mixin of a Keras layer whose weights are slices of those of its dense twin.

    The dense layer's own `build` makes them. The initial values are those of the dense
    twin: see `initial_slice`.

    Subclasses set `divided_axes`, the divided axis of each weight by its name.
    """

    divided_axes = types.MappingProxyType({})

    # Each rank of a model group computes the same loss: see `mappings`.
    sum_of_penalties = staticmethod(mappings.reduce)

    def add_weight(self, shape=None, initializer=None, *, name=None, **kwargs):
        """As that of Keras, but the weight is this rank's slice."""
        axis = self.divided_axes.get(name)
        if axis is None:
            return super().add_weight(
                shape=shape, initializer=initializer, name=name, **kwargs
            )
        partition = self.partition(axis, shape[axis])
        if regularizer := kwargs.pop("regularizer", None):
            kwargs["regularizer"] = SumRegularizer(
                regularizer, partition, self.sum_of_penalties
            )
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
        self._check_load_own_variables(store)
        load_slices(self._own_variables(), store)

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


class _SliceInitializer:
    def __init__(self, initializer, shape, partition):
        self._initializer = keras.initializers.get(initializer)
        self._shape = tuple(shape)
        self._partition = partition

    def __call__(self, shape, dtype=None):
        return initial_slice(self._initializer, self._shape, self._partition, dtype)


class SumRegularizer(keras.regularizers.Regularizer):
    """The penalty of a dense weight or tensor: the sum of those of its slices.

    Keras saves it as the regularizer of the dense twin, whose class and config it has.
    """

    def __init__(self, regularizer, partition, total=mappings.reduce):
        self._regularizer = regularizer
        self._partition = partition
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
        return self._total(self._regularizer(x), self._partition)


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
