"""What a job must have in common with the checkpoint that it continues from."""

import warnings

import keras

from hvdtrain.job import JobError
from hvdtrain.keras.learning_rates import set_learning_rate
from hvdtrain.keras.variables import accumulated_gradients, without_loss_scale

# Learning rates are stored in float32.
_SAME = 1e-5


def check_unchanged(checkpoint, unchanged):
    """Raise `JobError` if one of `RunConfig.unchanged` was another one before."""
    before = checkpoint.metadata.get("unchanged", {})
    for name, value in unchanged.items():
        if name in before and before[name] != value:
            raise JobError(
                f"Received {name}={value}; expected {before[name]}, with which the "
                f"checkpoint of step {checkpoint.step} was written: choose another "
                "model_dir for another job."
            )


def check_batch(checkpoint, global_batch_size, size, *, scale):
    """Raise `JobError` unless the global batch is that before, times `scale`."""
    before = checkpoint.metadata["global_batch_size"]
    if global_batch_size != round(before * scale, 3):
        ranks_before = len(checkpoint.metadata["local_batch_sizes"])
        raise JobError(
            f"Received a global batch of {global_batch_size} samples ({_ranks(size)}); "
            f"expected {before * scale:.9g}: the checkpoint of step {checkpoint.step} "
            f"was written with {before} ({_ranks(ranks_before)}), and the order of the "
            "samples depends on it."
        )


def check_position(checkpoint, scale_from, global_batch_size):
    """Raise `JobError` unless `input_fn` continues where the checkpoint stands."""
    step = checkpoint.step if checkpoint else 0
    sample = checkpoint.metadata["sample"] if checkpoint else 0
    if scale_from and scale_from.step != step:
        raise JobError(
            f"Received scale_from of step {scale_from.step}; expected {step}, that of "
            "the newest checkpoint of this model: delete later ones."
        )
    # The batch of a job that has scaled it may be that of the first start again.
    if not scale_from and sample != step * global_batch_size:
        raise JobError(
            f"Received a checkpoint of step {step} after {sample} samples; expected "
            f"{step * global_batch_size}: the job scales its batch. Set scale_from, or "
            "--scale_batch."
        )


def check_windows(optimizer):
    """Raise `JobError` if the batch may change within an accumulation window."""
    if accumulated_gradients(optimizer):
        raise JobError(
            "Received an optimizer that accumulates gradients in a job that scales its "
            "batch; expected none: a change of the batch could cut a window."
        )


def learning_rate(optimizer):
    """Return the learning rate, or None for that of a schedule.

    A schedule of Keras computes it from the step, and is not in a checkpoint.
    """
    rate = without_loss_scale(optimizer).learning_rate
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def adjust_learning_rate(optimizer, checkpoint, rate, *, size, scale):
    """Change the restored learning rate as that of `model_fn` has changed.

    Args:
        optimizer: after the checkpoint was assigned.
        checkpoint: the `Checkpoint`.
        rate: `learning_rate` of the new model.
        size: number of ranks.
        scale: factor of the global batch.
    """
    restored = learning_rate(optimizer)
    if restored is None:
        return
    before = checkpoint.metadata.get("learning_rate")
    factor = scale
    if before and rate:
        size_before = len(checkpoint.metadata["local_batch_sizes"])
        factor = rate / before
        if scale == 1 and abs(factor - size / size_before) < _SAME * factor:
            # model_fn multiplies it by the number of ranks; the batch has not changed.
            factor = 1
        if abs(factor - scale) > _SAME * scale:
            warnings.warn(
                f"The learning rate of model_fn is {rate:g}; it was {before:g} before "
                f"step {checkpoint.step}. Training continues with "
                f"{restored * factor:g}.",
                stacklevel=2,
            )
    if factor != 1:
        set_learning_rate(optimizer, restored * factor)


def _ranks(size):
    return f"{size} {'rank' if size == 1 else 'ranks'}"
