"""Optimizers by name, and their default learning rates.

Importing this module loads no TensorFlow.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

# For one rank with batches of 64.
LEARNING_RATES = {
    "sgd": 0.1,
    "momentum": 0.01,
    "nesterov": 0.01,
    "adam": 0.001,
    "adamw": 0.001,
    "rmsprop": 0.001,
}


def make(
    name: str, *, learning_rate: float, accumulation_steps: int = 1
) -> "keras.optimizers.Optimizer":
    """Return a new Keras optimizer.

    Args:
        name: a key of `LEARNING_RATES`.
        learning_rate: the constant rate, or the rate that a callback changes.
        accumulation_steps: average the gradients of so many steps before each update.
    """
    # Not at the top: programs list the names above in --help, without TensorFlow.
    from keras import optimizers

    optimizer, arguments = {
        "sgd": (optimizers.SGD, {}),
        "momentum": (optimizers.SGD, {"momentum": 0.9}),
        "nesterov": (optimizers.SGD, {"momentum": 0.9, "nesterov": True}),
        "adam": (optimizers.Adam, {}),
        "adamw": (optimizers.AdamW, {}),
        "rmsprop": (optimizers.RMSprop, {}),
    }[name]
    if accumulation_steps > 1:
        arguments["gradient_accumulation_steps"] = accumulation_steps
    return optimizer(learning_rate, **arguments)
