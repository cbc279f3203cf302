"""Dense layers whose kernel is sharded over the ranks of a model group."""

import dataclasses
import types
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from hvdtrain.parallel import mappings
from hvdtrain.parallel.layer import ShardedWeights, SumRegularizer, check_arguments
from hvdtrain.parallel.mesh import Axes, Mesh
from hvdtrain.sharding.layer_checks import NOT_ELEMENTWISE_ACTIVATIONS
from hvdtrain.sharding.shards import Shape


class _ParallelDense(ShardedWeights, keras.layers.Dense):
    """The arguments that column and row parallel layers refuse."""

    def __init__(
        self, *args: Any, mesh: Mesh | Axes | None = None, **kwargs: Any
    ) -> None:
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
    """`keras.layers.Dense` with the columns of its kernel sharded over a model group.

    Rank r has the columns A_r of the kernel, and computes their outputs:

        Y_r = activation(X A_r + b_r),  A = [A_0 | A_1 | ...]

    Args:
        units: outputs of all ranks together; need not be a multiple of the ranks.
        gather_output: whether to return the full output on all ranks. If not, the
            layer returns this rank's shard of it, for a `RowParallelDense` with
            `input_is_parallel`; the activation must then be elementwise.
        mesh: the `Mesh`; by default the active one.
        others: as for `keras.layers.Dense`.
    """

    sharded_axes = types.MappingProxyType({"kernel": 1, "bias": 0})
    own_arguments = ("gather_output",)
    activity_regularizer: keras.regularizers.Regularizer | None

    def __init__(
        self, units: int, *args: Any, gather_output: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(units, *args, **kwargs)
        self.gather_output = gather_output
        self.gives_shards = not gather_output
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

    def build(self, input_shape: Shape) -> None:
        self.check_one_for_each_rank(self.units, "units")
        super().build(input_shape)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        sharding = self.make_sharding(-1, self.units)
        size = self.units if self.gather_output else sharding.sizes[sharding.rank]
        return (*input_shape[:-1], size)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        outputs = self.make_sharding(-1 % len(inputs.shape), self.units)
        x = ops.matmul(mappings.copy(inputs, outputs), self.kernel)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        if self.gather_output:
            x = mappings.gather(x, outputs)
        return x if self.activation is None else self.activation(x)


class RowParallelDense(_ParallelDense):
    """`keras.layers.Dense` with the rows of its kernel sharded over a model group.

    Rank r has the rows A_r of the kernel, and computes one term of the sum:

        Y = activation(X_0 A_0 + X_1 A_1 + ... + b)

    The bias is replicated, and added after the sum.

    Args:
        units: outputs.
        input_is_parallel: whether the input is this rank's shard, such as the output of
            a `ColumnParallelDense` without `gather_output`.
        mesh: the `Mesh`; by default the active one.
        others: as for `keras.layers.Dense`.
    """

    sharded_axes = types.MappingProxyType({"kernel": 0})
    own_arguments = ("input_is_parallel",)

    def __init__(
        self, units: int, *args: Any, input_is_parallel: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(units, *args, **kwargs)
        self.input_is_parallel = self.takes_shards = input_is_parallel

    def build(self, input_shape: Shape) -> None:
        width = input_shape[-1]
        if self.input_is_parallel:
            width = self.sum_over_ranks(width)
        self.check_one_for_each_rank(width, "inputs")
        self._inputs = self.make_sharding(0, width)
        super().build((*input_shape[:-1], width))
        # Keras has set the width of the full input here, and would refuse a shard.
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: input_shape[-1]})

    def get_build_config(self) -> dict[str, Any] | None:
        """Return the config from which the Keras layer builds, with the full width."""
        config = super().get_build_config()
        if config:
            shape = config["input_shape"]
            config = config | {"input_shape": (*shape[:-1], self._inputs.size)}
        return config

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        sharding = dataclasses.replace(self._inputs, axis=len(inputs.shape) - 1)
        x = inputs if self.input_is_parallel else mappings.scatter(inputs, sharding)
        x = mappings.reduce(ops.matmul(x, self.kernel), sharding)
        if self.bias is not None:
            x = ops.add(x, self.bias)
        return x if self.activation is None else self.activation(x)
