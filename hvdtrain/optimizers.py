"""Optimizers by name, and their default learning rates."""

# For one rank with batches of 64.
LEARNING_RATES = {
    "sgd": 0.1,
    "momentum": 0.01,
    "nesterov": 0.01,
    "adam": 0.001,
    "adamw": 0.001,
    "rmsprop": 0.001,
}


def make(name, *, learning_rate, accumulation_steps=1):
    """Return the Keras optimizer of this name.

    Args:
        name: a key of `LEARNING_RATES`.
        learning_rate: its rate.
        accumulation_steps: average the gradients of so many steps before each update.
    """
    # Not at the top: flags list the names above, and --help loads no TensorFlow.
    from keras import optimizers

    maker, options = {
        "sgd": (optimizers.SGD, {}),
        "momentum": (optimizers.SGD, {"momentum": 0.9}),
        "nesterov": (optimizers.SGD, {"momentum": 0.9, "nesterov": True}),
        "adam": (optimizers.Adam, {}),
        "adamw": (optimizers.AdamW, {}),
        "rmsprop": (optimizers.RMSprop, {}),
    }[name]
    if accumulation_steps > 1:
        options["gradient_accumulation_steps"] = accumulation_steps
    return maker(learning_rate, **options)
