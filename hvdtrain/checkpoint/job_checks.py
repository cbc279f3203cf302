"""Whether a job may continue from a checkpoint of a model that is the same.

Each function raises a `JobError` of one line if not.
"""

import keras

from hvdtrain.checkpoint.header import Header, Position
from hvdtrain.job import JobError
from hvdtrain.keras.variables import accumulated_gradients, is_multi_optimizer


def check_unchanged(before: Header, new: Header) -> None:
    """Check what must be equal in all runs of a job."""
    for name, value in new.unchanged.items():
        if name in before.unchanged and before.unchanged[name] != value:
            raise JobError(
                f"Received {name}={value}; expected {before.unchanged[name]}, with "
                f"which the checkpoint of step {before.step} was written: choose "
                "another model_dir for another job."
            )


def check_batch(before: Header, new: Header, *, scale: float) -> None:
    """Check the global batch, on which the order of the samples depends."""
    batch_before, batch = before.global_batch_size, new.global_batch_size
    if batch != round(batch_before * scale, 3):
        raise JobError(
            f"Received a global batch of {batch} samples ({_ranks(new.size)}); "
            f"expected {batch_before * scale:.9g}: the checkpoint of step "
            f"{before.step} was written with {batch_before} ({_ranks(before.size)}), "
            "and the order of the samples depends on it."
        )


def _ranks(size: int) -> str:
    return f"{size} {'rank' if size == 1 else 'ranks'}"


def check_position(header: Header, scale_from: Position | None) -> None:
    """Check that a job that scales its batch continues from its newest checkpoint."""
    step, sample = header.step, header.sample
    if scale_from and scale_from.step != step:
        raise JobError(
            f"Received scale_from of step {scale_from.step}; expected {step}, the step "
            "of the newest checkpoint of this model: delete the checkpoints after it."
        )
    # Not by the batch: after scaling, a job may have the batch of its first start.
    if not scale_from and sample != step * header.global_batch_size:
        raise JobError(
            f"Received a checkpoint of step {step} after {sample} samples; expected "
            f"{step * header.global_batch_size}: the job scales its batch. Set "
            "scale_from, or --scale_batch."
        )


def check_scales(optimizer: keras.optimizers.Optimizer) -> None:
    """Check an optimizer whose learning rate is scaled with the batch."""
    if is_multi_optimizer(optimizer):
        raise JobError(
            "Received a MultiOptimizer in a job that scales its batch; expected an "
            "optimizer with one learning rate, which is scaled with the batch."
        )
    if accumulated_gradients(optimizer):
        raise JobError(
            "Received an optimizer that accumulates gradients in a job that scales its "
            "batch; expected none: a change of the batch could cut a window."
        )
