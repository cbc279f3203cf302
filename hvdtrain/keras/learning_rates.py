"""Changes of the learning rate that keep the momentum right."""

import weakref
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hvdtrain.keras.variables import Optimizer, get_inner_optimizer

# By optimizer. A function keeps the optimizer's variables alive, not the optimizer.
_changes: weakref.WeakKeyDictionary[Optimizer, Callable[[tf.Tensor], None]] = (
    weakref.WeakKeyDictionary()
)


def warmup_factor(progress: float, *, size: int) -> float:
    """Return the factor of a learning rate in a linear warm-up from `1 / size` to 1.

    Args:
        progress: share of the warm-up that is done; above 1 it counts as 1.
        size: number of ranks, or of replicas, that the learning rate is scaled to.
    """
    return (1 + (size - 1) * min(1.0, progress)) / size


def rate_variable(optimizer: Optimizer) -> keras.Variable | None:
    """Return the variable of a learning rate; None for a schedule, which is called."""
    rate = get_inner_optimizer(optimizer)._learning_rate
    return rate if isinstance(rate, keras.Variable) else None


def rate_reader(optimizer: Optimizer) -> Callable[[], float]:
    """Return a function that returns the learning rate, and changes no variable.

    A schedule may count its calls, or draw numbers, which belong to the steps.
    """

    @tf.function(autograph=False)
    def rate() -> tf.Tensor:
        return tf.cast(optimizer.learning_rate, tf.float64)

    def read() -> float:
        before = [(variable, variable.numpy()) for variable in variables]
        value = float(graph())
        for variable, number in before:
            variable.assign(number)
        return value

    if rate_variable(optimizer) is not None:
        return lambda: float(optimizer.learning_rate)
    try:
        graph = rate.get_concrete_function()
    except Exception:
        # A schedule of a model with `run_eagerly` that cannot be traced.
        return lambda: float(optimizer.learning_rate)
    variables = graph.graph.variables
    return read


def set_learning_rate(
    optimizer: Optimizer, learning_rate: float, *, momentum_correction: bool = True
) -> None:
    """Set an optimizer's learning rate, and correct its momentum for the change.

    Args:
        optimizer: one whose learning rate is a number, not a schedule, or a
            `LossScaleOptimizer` around one.
        learning_rate: the new rate.
        momentum_correction: scale the velocities of SGD and RMSprop by
            new rate / old rate. Other optimizers keep no velocity that contains
            the learning rate, and need no correction.
    """
    before = optimizer.learning_rate.numpy()
    # Compare with the rate as it will be stored, usually in float32.
    if before == before.dtype.type(learning_rate):
        return
    velocities = _velocities(optimizer) if momentum_correction and before else []
    if not velocities:
        optimizer.learning_rate = learning_rate
        return
    if optimizer not in _changes:
        _changes[optimizer] = _compile(optimizer.learning_rate, velocities)
    _changes[optimizer](tf.constant(learning_rate, tf.float64))


def _compile(
    rate: keras.Variable, velocities: Sequence[keras.Variable]
) -> Callable[[tf.Tensor], None]:
    """Return a function that sets `rate` and corrects `velocities` for the change."""
    rate, velocities = rate.value, [velocity.value for velocity in velocities]

    # Two eager operations for each of 100 velocities take 6 ms, this function 0.8 ms.
    @tf.function(input_signature=[tf.TensorSpec([], tf.float64)], autograph=False)
    def change(learning_rate: tf.Tensor) -> None:
        before = tf.cast(rate, tf.float64)
        rate.assign(tf.cast(learning_rate, rate.dtype))
        factor = tf.cast(rate, tf.float64) / before
        # Keras' velocity holds the rate: v = m * v - lr * g, w += v. So v = -lr * u,
        # with u = m * u + g free of it. A step at a new rate must continue u, that is
        # m * u + g with the old u: v has to become -lr_new * u = v * lr_new / lr_old
        # (Goyal et al., equation 10), once for each change. Horovod raises m for one
        # step instead, to the same effect; Keras 3 bakes m into the compiled step.
        for velocity in velocities:
            velocity.assign(velocity * tf.cast(factor, velocity.dtype))

    # The call of a tf.function takes 0.09 ms more.
    return change.get_concrete_function()


def _velocities(optimizer: Optimizer) -> list[keras.Variable]:
    optimizer = get_inner_optimizer(optimizer)
    if not optimizer.built:
        return []
    if isinstance(optimizer, keras.optimizers.SGD):
        return optimizer.momentums
    if isinstance(optimizer, keras.optimizers.RMSprop):
        return optimizer._momentums
    return []
