"""The check that the input of a job is a function of its steps.

A job that continues takes the batches of the uninterrupted one only if `input_fn`
returns the same batch for a step each time, from whichever step it starts.
"""

import dataclasses
import hashlib
import warnings
from typing import Any

import tensorflow as tf

from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import gather, on_all
from hvdtrain.training.specs import TrainSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstBatch:
    """The batch of the first step for which `input_fn` is defined.

    Attributes:
        batch: a nest of tensors.
        step: its step: 0, or that of `TrainSpec.scale_from`.
        digests: of this batch on each rank, by rank.
    """

    batch: Any
    step: int
    digests: list[str]

    @property
    def metadata(self) -> dict:
        """What a checkpoint has of it."""
        return {"step": self.step, "digests": self.digests}

    def warn_if_changed(self, metadata: dict) -> None:
        """Warn if it differs from that of the run which wrote a checkpoint."""
        before = metadata.get("first_batch")
        # Another number of ranks deals other samples to each.
        if not before or len(before["digests"]) != len(self.digests):
            return
        if before["step"] == self.step and before["digests"] != self.digests:
            warnings.warn(
                f"The batch of step {self.step} differs from that of the run which "
                "wrote the checkpoint: the data or their order have changed, and the "
                "job does not compute what an uninterrupted one computes.",
                stacklevel=4,
            )


def first_batch(train_spec: TrainSpec, world: World, *, is_checked: bool) -> FirstBatch:
    """Return the `FirstBatch`. A collective.

    Args:
        train_spec: the `TrainSpec`.
        world: the `World`.
        is_checked: whether the input has to be a function of its steps.

    Raises:
        SharedJobError: on all ranks, if it is not, or has no batch.
    """
    step = train_spec.scale_from.step if train_spec.scale_from else 0

    def read():
        end = min(step + 2, train_spec.max_steps)
        batches = list(train_spec.batches(step, end).take(2))
        if not batches:
            raise JobError(
                "Received no batch from input_fn; expected one for each step."
            )
        digests = list(map(_digest, batches))
        if is_checked and len(batches) == 2:
            _check_second(train_spec, step, digests)
        return batches[0], digests[0]

    # Where it is read from its start, some ranks may take long.
    batch, digest = on_all(world, read)
    return FirstBatch(batch=batch, step=step, digests=gather(world, digest))


def _check_second(spec: TrainSpec, step: int, digests: list[str]) -> None:
    """Compare the batch of `step + 1` with what `input_fn` returns from there on."""
    second = list(spec.batches(step + 1, step + 2).take(1))
    digest = _digest(second[0]) if second else None
    if digest == digests[1]:
        return
    if digest == digests[0]:
        raise JobError(
            f"Received the batch of step {step} from input_fn also where it was asked "
            f"for the steps from {step + 1} on; expected the batches of these steps, "
            "with which a job continues: leave out those before, for example by "
            "dataset.skip(start_step)."
        )
    raise JobError(
        f"Received two different batches of step {step + 1} from two calls of "
        "input_fn; expected a function of the steps, with which a job continues: make "
        "the dataset within input_fn, give shuffle a seed, and draw other random "
        "numbers as a function of the step. With TrainSpec.check_input=False a job "
        "that continues takes other batches than the uninterrupted one."
    )


def _digest(batch: Any) -> str:
    """Return a digest of the bytes of all tensors."""
    found = hashlib.sha256()
    for tensor in tf.nest.flatten(batch, expand_composites=True):
        found.update(f"{tensor.dtype.name}{tensor.shape}".encode())
        # An array of texts has pointers to them.
        found.update(tf.io.serialize_tensor(tensor).numpy())
    return found.hexdigest()
