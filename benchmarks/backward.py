r"""A model whose backward pass takes a given time and leaves the CPU free.

mpirun -np 2 python -m hvdtrain.benchmark --workload=benchmarks.backward:model \
  --batch_size=1 --seconds=3
mpirun -np 2 python -m hvdtrain.benchmark --workload=benchmarks.backward:at_once \
  --batch_size=1 --seconds=3

On a GPU, gradients become ready one layer after the other, the last layer first, while
the CPU only reduces them. This model does the same without a GPU: it measures how much
of the reduction is hidden behind the backward pass.
"""

import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

LAYERS = 20
# 20 x 1118 x 1118: 25 million float32 parameters, 100 MB.
UNITS = 1118


def model() -> keras.Model:
    """Return the model with a backward pass of 326 ms."""
    return build(backward_seconds=0.326)


def at_once() -> keras.Model:
    """Return the model with gradients that are all ready at once."""
    return build(backward_seconds=0)


def build(
    *, backward_seconds: float, layers: int = LAYERS, units: int = UNITS
) -> keras.Model:
    """Return the compiled model.

    Args:
        backward_seconds: of the backward pass, the same for each layer; 0 for gradients
            that are all ready at once.
        units: each layer has `units * units` parameters.
    """
    device = SimulatedDevice(backward_seconds)
    # Gradients of the last layer are ready first.
    shares = [1 - i / layers for i in range(layers)]
    model = keras.Sequential(
        [keras.Input((1,)), *(SleepingLayer(units, device, share) for share in shares)],
        name="backward",
    )
    model.compile(FirstElementSGD(0.01), loss="mse", jit_compile=False)
    return model


class SimulatedDevice:
    """Times a backward pass of so many seconds, without using the CPU."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start: float | None = None

    def wait_for(self, share: float) -> None:
        """Sleep until a share of the backward pass is over.

        The first wait of a pass has the smallest share, and starts it. Each wait is
        computed from the start: the errors of sleeping do not add up.
        """
        now = time.perf_counter()
        if self._start is None:
            self._start = now
        time.sleep(max(0.0, self._start + share * self.seconds - now))
        if share == 1:
            self._start = None


class SleepingLayer(keras.layers.Layer):
    """Returns its input; its gradient becomes ready after a share of the backward pass.

    The gradient is a matrix in memory that does not change: to compute one on the CPU
    would compete with the reduction that is measured.
    """

    def __init__(self, units: int, device: SimulatedDevice, share: float) -> None:
        super().__init__()
        self._units = units
        self._device = device
        self._share = share

    def build(self, input_shape: Sequence[int | None]) -> None:
        shape = (self._units, self._units)
        self.kernel = self.add_weight(shape=shape, initializer="zeros")
        # Not a weight: it would be broadcast at the start.
        self._gradient = tf.Variable(tf.ones(shape), trainable=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def pass_on(x: tf.Tensor, kernel: tf.Tensor) -> tuple:
            def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                upstream = self._sleep(upstream)
                with tf.control_dependencies([upstream]):
                    return upstream, self._gradient.read_value()

            return tf.identity(x), gradient

        return pass_on(inputs, self.kernel.value)

    def _sleep(self, upstream: tf.Tensor) -> tf.Tensor:
        if not self._device.seconds:
            return tf.identity(upstream)

        def sleep(values: np.ndarray) -> np.ndarray:
            self._device.wait_for(self._share)
            return values

        slept = tf.numpy_function(sleep, (upstream,), upstream.dtype)
        return tf.ensure_shape(slept, upstream.shape)


class FirstElementSGD(keras.optimizers.Optimizer):
    """Takes the step of SGD for the first element of each variable only.

    An update of all elements takes time on the CPU, which on a GPU the CPU does not
    spend. The first element of each gradient is used: an unused reduction would be
    pruned.
    """

    def build(self, variables: list[keras.Variable]) -> None:
        if self.built:
            return
        super().build(variables)
        # What was subtracted from the first element of each variable.
        self._moved = [
            self.add_variable((), dtype="float32", name=f"moved_{i}")
            for i, _ in enumerate(variables)
        ]

    def update_step(
        self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
    ) -> None:
        moved = self._moved[self._get_variable_index(variable)]
        first = keras.ops.reshape(gradient[0, 0], ())
        self.assign_sub(moved, learning_rate * first)
