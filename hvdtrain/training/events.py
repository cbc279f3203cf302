"""What the observers of a training receive, on the chief."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStart:
    """The start of a run of a job.

    Attributes:
        step: the step that it continues from, 0 for a new job.
        max_steps: steps of the whole job.
        ranks: number of ranks.
        global_batch_size: samples of a step of the whole job.
    """

    step: int
    max_steps: int
    ranks: int
    global_batch_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of the training of the whole job.

    Attributes:
        step: steps taken.
        max_steps: steps to take.
        metrics: results by name, over all ranks and the steps since the last report of
            the epoch. Those of a user's metric with states of its own are over the
            steps since the epoch began.
        learning_rate: at this step; that of a schedule of Keras is for the next step.
        communication: share of the time since the last report in which ranks reduced
            gradients, or waited for another rank to do so: the mean over the ranks.
            Their computation may go on meanwhile. NaN where it is not measured: on one
            rank, and where Horovod reduces.
        input_wait: share of the same time in which ranks waited for a batch: the mean
            over the ranks. NaN without the native library.
        samples_per_second: of all ranks since the last report.
        seconds_left: estimate for the rest of the training.
        skipped_updates: those of the job that were left out, as their gradients were
            not finite.
    """

    step: int
    max_steps: int
    metrics: dict
    learning_rate: float
    communication: float
    input_wait: float
    samples_per_second: float
    seconds_left: float
    skipped_updates: int = 0


def notify(observers: Sequence, method: str, *arguments: object) -> None:
    """Call a method of all observers that have it; see `train_and_evaluate`."""
    for observer in observers:
        if call := getattr(observer, method, None):
            call(*arguments)


def scalars(metrics):
    """Return the metrics that are numbers, as floats, without those that are arrays."""
    return {name: float(v) for name, v in metrics.items() if np.ndim(v) == 0}
