"""A model whose backward pass takes a given time and leaves the CPU free.

As with a GPU: gradients become ready one layer after the other, the last layer first,
while the CPU has nothing to do but to reduce them. How much of the reduction is hidden
behind the backward pass can then be measured without a GPU.
"""

import time

import keras
import numpy as np
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
    model = keras.Sequential(
        [
            keras.Input((1,)),
            *(SleepingLayer(units, backward_seconds / layers) for _ in range(layers)),
        ],
        name="backward",
    )
    model.compile(FirstElementSGD(0.01), loss="mse", jit_compile=False)
    return model


class SleepingLayer(keras.layers.Layer):
    """Returns its input, and its gradient after a time asleep.

    The gradient is a matrix in memory that does not change: computing one on the CPU
    would take the time of the reduction that is to be measured.

    Args:
        units: number of rows and columns of its weight.
        seconds: time asleep in the backward pass.
    """

    def __init__(self, units, seconds):
        super().__init__()
        self._units = units
        self._seconds = seconds

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
        if not self._seconds:
            return tf.identity(upstream)

        def sleep(values):
            time.sleep(self._seconds)
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


def first_elements(model):
    """Return what has been subtracted from the first element of each variable."""
    return np.array([float(moved) for moved in model.optimizer._moved])
