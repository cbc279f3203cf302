"""Changes of the learning rate that keep the momentum right."""

import keras


def set_learning_rate(optimizer, learning_rate, *, momentum_correction=True):
    """Sets an optimizer's learning rate, and corrects its momentum for the change.

    Args:
        optimizer: a Keras optimizer whose learning rate is a number, or a
            `LossScaleOptimizer` around one.
        learning_rate: the new rate.
        momentum_correction: scale the velocities of SGD and RMSprop by
            new rate / old rate. Other optimizers keep no velocity that contains
            the learning rate, and need no correction.
    """
    before = float(optimizer.learning_rate.numpy())
    optimizer.learning_rate = learning_rate
    # As stored, in float32: the velocities will be built from that number.
    after = float(optimizer.learning_rate.numpy())
    if not momentum_correction or before in (0.0, after):
        return
    # Keras' velocity holds the rate: v = m * v - lr * g, w += v. So v = -lr * u,
    # with u = m * u + g free of it. A step at a new rate must continue u, that is
    # m * u + g with the old u: v has to become -lr_new * u = v * lr_new / lr_old
    # (Goyal et al., equation 10), once for each change. Horovod raises m for one
    # step instead, to the same effect; Keras 3 bakes m into the compiled step.
    for velocity in _velocities(optimizer):
        velocity.assign(velocity.value * (after / before))


def without_loss_scale(optimizer):
    """The optimizer inside a `LossScaleOptimizer`, or `optimizer` itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def _velocities(optimizer):
    optimizer = without_loss_scale(optimizer)
    if not optimizer.built:
        return []
    if isinstance(optimizer, keras.optimizers.SGD):
        return optimizer.momentums
    if isinstance(optimizer, keras.optimizers.RMSprop):
        return optimizer._momentums
    return []
