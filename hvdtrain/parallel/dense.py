"""Dense layers whose kernel is divided among the ranks of a model group."""

import dataclasses
import types

import keras
from keras import ops

from hvdtrain.parallel import mappings
from hvdtrain.parallel.layer import (
    ShardedWeights,
    SumRegularizer,
    check_arguments,
)
from hvdtrain.sharding.layer_checks import NOT_ELEMENTWISE_ACTIVATIONS


class _ParallelDense(ShardedWeights, keras.layers.Dense):
    """What both have in common: arguments that a slice of a weight does not allow."""

    def __init__(self, *args, mesh=None, **kwargs):
        super().__init__(*args, **kwargs)
        self._set_mesh(mesh)
        check_arguments(
            self,
            refused={
                "lora_rank": self.lora_rank,
                # Keras 3.13 and later.
                "quantization_config": getattr(self, "quantization_config", None),
                "kernel_constraint": self.kernel_constraint,
                "bias_constraint": self.bias_constraint,
            },
            additive={
                "kernel_regularizer": self.kernel_regularizer,
                "bias_regularizer": self.bias_regularizer,
            },
        )


class ColumnParallelDense(_ParallelDense):
    """`keras.layers.Dense` whose outputs are divided among the ranks of a model group.

    Each rank has some columns of the kernel, and computes these outputs:

        Y_r = activation(X A_r + b_r),  A = [A_0 | A_1 | ...]

    Args:
        units: outputs of the dense twin; need not be a multiple of the ranks.
        gather_output: whether the output is that of the dense twin, on all ranks. If
            not, it is this rank's part, for a `RowParallelDense` with
            `input_is_parallel`; the activation must then be elementwise.
        mesh: the `Mesh`; by default the active one.
        *args: as for `keras.layers.Dense`.
        **kwargs: as for `keras.layers.Dense`.
    """

    sharded_axes = types.MappingProxyType({"kernel": 1, "bias": 0})
    own_arguments = ("gather_output",)

    @property
    def gives_shards(self):
        """Whether the output is this rank's part."""
        return not self.gather_output

    def __init__(self, units, *args, gather_output=True, **kwargs):
        super().__init__(units, *args, **kwargs)
        self.gather_output = gather_output
        if not gather_output and self.activation in NOT_ELEMENTWISE_ACTIVATIONS:
            raise ValueError(
                "The activation of a ColumnParallelDense with gather_output=False must "
                f"be elementwise. Received: {self.activation.__name__}"
            )
        if not gather_output and (regularizer := self.activity_regularizer):
            name = "activity_regularizer"
            check_arguments(self, refused={}, additive={name: regularizer})
            outputs = self.make_sharding(-1, units)
            self.activity_regularizer = SumRegularizer(regularizer, outputs)

    def build(self, input_shape):
        """Make the weights; their initial values are those of the dense twin."""
        self.check_one_for_each_rank(self.units, "units")
        super().build(input_shape)

    def compute_output_shape(self, input_shape):
        """Return the shape of the outputs, or of this rank's part."""
        sharding = self.make_sharding(-1, self.units)
        size = self.units if self.gather_output else sharding.sizes[sharding.rank]
        return (*input_shape[:-1], size)

    def call(self, inputs, training=None):
        """Return the outputs, or this rank's part of them."""
        outputs = self.make_sharding(-1 % len(inputs.shape), self.units)
        x = ops.matmul(mappings.copy(inputs, outputs), self.kernel)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        if self.gather_output:
            x = mappings.gather(x, outputs)
        return x if self.activation is None else self.activation(x)


class RowParallelDense(_ParallelDense):
    """`keras.layers.Dense` whose inputs are divided among the ranks of a model group.

    Each rank has some rows of the kernel, and computes a part of the sum:

        Y = activation(X_0 A_0 + X_1 A_1 + ... + b)

    The bias is replicated, and added once.

    Args:
        units: outputs.
        input_is_parallel: whether the input is this rank's part, as that of a
            `ColumnParallelDense` without `gather_output`.
        mesh: the `Mesh`; by default the active one.
        *args: as for `keras.layers.Dense`.
        **kwargs: as for `keras.layers.Dense`.
    """

    sharded_axes = types.MappingProxyType({"kernel": 0})
    own_arguments = ("input_is_parallel",)

    @property
    def takes_shards(self):
        """Whether the input is this rank's part."""
        return self.input_is_parallel

    def __init__(self, units, *args, input_is_parallel=False, **kwargs):
        super().__init__(units, *args, **kwargs)
        self.input_is_parallel = input_is_parallel

    def build(self, input_shape):
        """Make the weights; their initial values are those of the dense twin."""
        width = input_shape[-1]
        if self.input_is_parallel:
            width = self.sum_over_ranks(width)
        self.check_one_for_each_rank(width, "inputs")
        self._inputs = self.make_sharding(0, width)
        super().build((*input_shape[:-1], width))
        # Keras checks the width of the dense twin's input otherwise.
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: input_shape[-1]})

    def get_build_config(self):
        """Return that of the dense twin."""
        config = super().get_build_config()
        if config:
            shape = config["input_shape"]
            config = config | {"input_shape": (*shape[:-1], self._inputs.size)}
        return config

    def call(self, inputs, training=None):
        """Return the outputs, on all ranks."""
        along = dataclasses.replace(self._inputs, axis=len(inputs.shape) - 1)
        x = inputs if self.input_is_parallel else mappings.scatter(inputs, along)
        x = mappings.reduce(ops.matmul(x, self.kernel), along)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)
