"""Learning rates of a run."""

import math


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
