"""The `LossScaleOptimizer` around an optimizer."""

import inspect

import keras

from hvdtrain.keras.hook import is_true_on_all


def check_loss_scale(shared):
    """Raises a ValueError unless the `LossScaleOptimizer` that calls is `shared`.

    Args:
        shared: the one whose check for overflow is one of all ranks; may be None.
    """
    caller = _calling_optimizer()
    if caller is None or caller is shared:
        return
    raise ValueError(
        "The distributed optimizer is inside a LossScaleOptimizer that checks for "
        "overflow on each rank alone: ranks without overflow would wait for one "
        "that skips the step. Add "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks, make "
        "an hvd.elastic.KerasState of the model after compile(), or use "
        "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
    )


def share_overflow(loss_scale_optimizer, ranks):
    """Makes all `ranks` skip a step when one of them overflows."""
    check_locally = loss_scale_optimizer.check_finite

    def check_finite(grads):
        return is_true_on_all(ranks, check_locally(grads), "LossScaleOverflow")

    loss_scale_optimizer.check_finite = check_finite


def _calling_optimizer():
    """Returns the `LossScaleOptimizer` whose `apply` is on the stack, or None.

    The inner optimizer has no reference to it. In a graph it calls the inner `apply`
    in a branch for steps without overflow, as a user's own `tf.cond` may do rightly.
    """
    source = inspect.getsourcefile(keras.optimizers.LossScaleOptimizer)
    frame = inspect.currentframe()
    while frame := frame.f_back:
        if frame.f_code.co_filename == source and "self" in frame.f_locals:
            return frame.f_locals["self"]
    return None
