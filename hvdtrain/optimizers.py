"""Optimizers by name, their learning rates to start from, and how these change."""

import math

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
        learning_rate: the rate that it uses.
        accumulation_steps: average the gradients of so many steps before each update.
    """
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


def schedule(learning_rate, *, warmup_epochs, epochs, decay="none"):
    """Return the callbacks that change the learning rate while `fit` runs.

    Args:
        learning_rate: the rate after the warm-up.
        warmup_epochs: epochs of rise from one rank's rate, 0 for none.
        epochs: epochs in all.
        decay: "none", or "cosine" for a fall to 0 (Loshchilov and Hutter 2017,
            arXiv:1608.03983, without restarts).
    """
    from hvdtrain.keras import callbacks

    found = []
    if warmup_epochs:
        found.append(callbacks.LearningRateWarmupCallback(learning_rate, warmup_epochs))
    if decay == "cosine":

        def cosine(epoch):
            done = (epoch - warmup_epochs) / max(epochs - warmup_epochs, 1e-9)
            return (1 + math.cos(math.pi * min(1, done))) / 2

        found.append(
            callbacks.LearningRateScheduleCallback(
                learning_rate, cosine, start_epoch=warmup_epochs, staircase=False
            )
        )
    return found
