"""Checks of the input of a job: it is a function of its steps, and equal on all ranks.

A job that continues takes the batches of the uninterrupted one only if `input_fn`
returns the same batch for a step each time, from whichever step it starts.
"""

import contextlib
import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.header import FirstBatch, Header
from hvdtrain.data import DataError
from hvdtrain.data.sources.source import Source, as_source
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import fail_together, gather, on_all
from hvdtrain.job.world import SharedJobError
from hvdtrain.training.specs import TrainSpec


def first_step(train_spec: TrainSpec) -> int:
    """Return the first step for which `input_fn` is defined."""
    return train_spec.scale_from.step if train_spec.scale_from else 0


def first_batch(
    train_spec: TrainSpec, world: World, *, is_checked: bool
) -> tuple[Any, str | None]:
    """Return this rank's batch of the `first_step`, and its digest. A collective.

    Args:
        is_checked: whether the input has to be a function of its steps. If not, one
            batch is read, and the digest is None.

    Raises:
        SharedJobError: on all ranks, if the input is not a function of its steps, or
            has no batch.
    """
    step = first_step(train_spec)
    # A finished job that is started again takes no step. It reads a batch, to build the
    # model.
    end = max(step + 1, min(step + 2, train_spec.max_steps))
    second = None
    # Datasets are made in this thread: `input_fn` may call collectives, and Keras has a
    # global state for each thread, the dtype policy for example.
    with fail_together(world):
        batches = train_spec.batches(step, end).take(2 if is_checked else 1)
        if is_checked and end == step + 2:
            second = train_spec.batches(step + 1, end).take(1)

    def read() -> tuple[Any, str | None]:
        first_two = list(batches)
        if not first_two:
            raise JobError(
                "Received no batch from input_fn; expected one for each step."
            )
        digests = list(map(digest, first_two)) if is_checked else []
        if second is not None and len(first_two) == 2:
            _check_second(step, digests, list(map(digest, second)))
        return first_two[0], digests[0] if digests else None

    # A rank that reads its input from the start, and skips, may take long.
    return on_all(world, read, name="the first batch of input_fn")


def warn_if_changed(
    first: FirstBatch | None, before: Header, *, local_batch_sizes: tuple[int, ...]
) -> None:
    """Warn if the first batch differs from the one of an earlier run of the job.

    `first` is None if the input is not checked.
    """
    if not first or not before.first_batch or before.first_batch.step != first.step:
        return
    # Other batch sizes deal other samples to each replica.
    if before.local_batch_sizes != local_batch_sizes:
        return
    if before.first_batch.digests != first.digests:
        warnings.warn(
            f"The batch of step {first.step} differs from that of the run that "
            "wrote the checkpoint: the data or their order have changed, and the job "
            "does not compute what an uninterrupted one computes.",
            stacklevel=5,
        )


def _check_second(step: int, digests: list[str], again: list[str]) -> None:
    """Check the batch of `step + 1` read from there by the digests from `step` on."""
    if again == digests[1:]:
        return
    if again == digests[:1]:
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


def digest(batch: Any) -> str:
    """Return a digest of the bytes of all tensors."""
    hashed = hashlib.sha256()
    for tensor in tf.nest.flatten(batch, expand_composites=True):
        hashed.update(f"{tensor.dtype.name}{tensor.shape}".encode())
        # The bytes of a NumPy array of strings are pointers.
        hashed.update(tf.io.serialize_tensor(tensor).numpy())
    return hashed.hexdigest()


def as_samples(data: Any) -> Source:
    """Return a source of samples for `fit`; see `as_source`.

    Raises:
        DataError: it is a list of the arrays of a data set, which Keras takes.
    """
    arrays = data if isinstance(data, list) and 1 < len(data) <= 3 else []
    lengths = {len(a) if isinstance(a, np.ndarray) and a.ndim else 0 for a in arrays}
    if len(lengths) == 1 and (length := lengths.pop()) > len(arrays):
        raise DataError(
            f"Received a list of {len(arrays)} arrays of {length} samples; expected a "
            "tuple: the elements of a list are samples."
        )
    return as_source(data)


@contextlib.contextmanager
def naming_validation() -> Iterator[None]:
    """Put the name of this argument of `fit` before errors of its samples."""
    try:
        yield
    except DataError as error:
        raise DataError(f"validation: {error}") from None


def check_source(source: Source, world: World) -> str:
    """Return the digest of a sample, which is the same on all ranks. A collective.

    A source that the ranks have sharded already, as scripts of Horovod do, differs in
    it: each rank would read a part of its shard.
    """
    with fail_together(world):
        sample = source.read(np.array([len(source) // 2]))
        found = digest(tf.nest.map_structure(tf.convert_to_tensor, sample))
    for rank, other in enumerate(digests := gather(world, found)):
        if other != digests[0]:
            raise SharedJobError(
                f"Received a source on rank {rank} with other samples than on rank 0; "
                "expected the same source, of all samples, on all ranks, which is "
                "sharded later. With check_input=False samples of fit may be random."
            )
    return found
