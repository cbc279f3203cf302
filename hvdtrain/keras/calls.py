"""The objects of Keras whose methods are on the stack of a call.

An optimizer has no reference to its model, nor to a `LossScaleOptimizer` around it.
"""

import inspect
from collections.abc import Iterator
from types import FrameType

import keras

from hvdtrain.keras.variables import (
    Optimizer,
    find_optimizers,
    get_inner_optimizer,
)


def calling_loss_scale_optimizer() -> Optimizer | None:
    """Return the `LossScaleOptimizer` whose `apply` is on the stack, or None.

    Nor does the graph identify it: it calls the inner `apply` in a branch for steps
    without overflow, and the `tf.cond` of a user, whose predicate is equal on all
    ranks, is a branch as well.
    """
    source = inspect.getsourcefile(keras.optimizers.LossScaleOptimizer)
    for frame in _frames():
        if frame.f_code.co_filename == source and "self" in frame.f_locals:
            return frame.f_locals["self"]
    return None


def calling_model(optimizer: Optimizer) -> keras.Model | None:
    """Return the model of `optimizer` whose training step is on the stack, or None."""
    for frame in _frames():
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.Model) and any(
            getattr(get_inner_optimizer(found), "reduction_hook", None)
            is optimizer.reduction_hook
            for found in find_optimizers(caller)
        ):
            return caller
    return None


def _frames() -> Iterator[FrameType]:
    """Yield the frames on the stack, the innermost first."""
    frame = inspect.currentframe()
    while frame and (frame := frame.f_back):
        yield frame
