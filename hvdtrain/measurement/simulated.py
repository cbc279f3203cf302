"""A model whose backward pass takes a given time and leaves the CPU free.

As with a GPU: gradients become ready one layer after the other, the last layer first,
while the CPU has nothing to do but to reduce them. How much of the reduction is hidden
behind the backward pass can then be measured without a GPU.
"""

import time

import keras
import tensorflow as tf

LAYERS = 20
# 20 x 1118 x 1118: 25 million float32 parameters, 100 MB.
UNITS = 1118


def build(*, backward_seconds, layers=LAYERS, units=UNITS):
    """Return the compiled model.

    Args:
        backward_seconds: duration of the backward pass, in equal parts by layer; 0
            for gradients that are all ready at once.
        layers: number of layers.
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
    """Computes the gradients of a backward pass in the given time, without the CPU.

    Args:
        seconds: of the backward pass.
    """

    def __init__(self, seconds):
        self.seconds = seconds
        self._start = None

    def wait_for(self, share):
        """Sleep until a share of the backward pass is over.

        The first wait of a pass has the smallest share, and starts it. The times are
        those since the start: sleeping too long does not add up.
        """
        now = time.perf_counter()
        if self._start is None:
            self._start = now
        time.sleep(max(0.0, self._start + share * self.seconds - now))
        if share == 1:
            self._start = None


class SleepingLayer(keras.layers.Layer):
    """Returns its input, and its gradient after a time asleep.

    The gradient is a matrix in memory that does not change: computing one on the CPU
    would take the time of the reduction that is to be measured.

    Args:
        units: number of rows and columns of its weight.
        device: the `SimulatedDevice`.
        share: of the backward pass, after which its gradient is ready.
    """

    def __init__(self, units, device, share):
        super().__init__()
        self._units = units
        self._device = device
        self._share = share

    def build(self, input_shape):
        """Creates the weight and its gradient."""
        shape = (self._units, self._units)
        self.kernel = self.add_weight(shape=shape, initializer="zeros")
        # Not a weight: it would be broadcast at the start.
        self._gradient = tf.Variable(tf.ones(shape), trainable=False)

    def call(self, inputs):
        """Returns the inputs."""

        @tf.custom_gradient
        def pass_on(x, kernel):
            def gradient(upstream):
                upstream = self._sleep(upstream)
                with tf.control_dependencies([upstream]):
                    return upstream, self._gradient.read_value()

            return tf.identity(x), gradient

        return pass_on(inputs, self.kernel.value)

    def _sleep(self, upstream):
        if not self._device.seconds:
            return tf.identity(upstream)

        def sleep(values):
            self._device.wait_for(self._share)
            return values

        slept = tf.numpy_function(sleep, (upstream,), upstream.dtype)
        return tf.ensure_shape(slept, upstream.shape)


class FirstElementSGD(keras.optimizers.Optimizer):
    """Takes the step of SGD for the first element of each variable alone.

    An update of all elements on the CPU would take a time that it takes on a GPU only.
    Each gradient is used nevertheless: its reduction cannot be pruned.
    """

    def build(self, variables):
        """Creates a number for each variable: what has been subtracted from it."""
        if self.built:
            return
        super().build(variables)
        self._moved = [
            self.add_variable((), dtype="float32", name=f"moved_{i}")
            for i, _ in enumerate(variables)
        ]

    def update_step(self, gradient, variable, learning_rate):
        """Adds to the number of `variable`."""
        moved = self._moved[self._get_variable_index(variable)]
        first = keras.ops.reshape(gradient[0, 0], ())
        self.assign_sub(moved, learning_rate * first)
