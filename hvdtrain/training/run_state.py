"""One run of a job: what its callbacks share, and what its checkpoints say of it."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.job import World
from hvdtrain.training.building import Batches
from hvdtrain.training.checkpoint.header import Evaluation, Header
from hvdtrain.training.checkpoint.restoring import Start
from hvdtrain.training.checkpoint.storage import CheckpointFiles
from hvdtrain.training.elastic import Commits
from hvdtrain.training.exporting import Exports
from hvdtrain.training.inputs import warn_if_changed
from hvdtrain.training.plan import Plan
from hvdtrain.training.skipping import Skipping
from hvdtrain.training.specs import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """What the callbacks of one run have in common.

    Attributes:
        plan: with the epochs of the run that wrote the checkpoint.
        files: None without a `model_dir`.
        commits: None unless the job is elastic.
        exports: None without exporters, and on other ranks than the chief.
        observers: see `train_and_evaluate`; none on other ranks than the chief.
    """

    world: World
    config: RunConfig
    batches: Batches
    plan: Plan
    start: Start
    files: CheckpointFiles | None
    commits: Commits | None
    exports: Exports | None
    skipping: Skipping
    observers: Sequence[object]

    @property
    def global_batch_size(self) -> int:
        """Samples of a step of the whole job."""
        return sum(self.batches.local_sizes)

    @property
    def is_finished(self) -> bool:
        """Whether the job has no step left to take."""
        return self.start.is_finished(
            self.plan.max_steps, global_batch_size=self.global_batch_size
        )

    def warn_of_changes(self) -> None:
        """Warn of arguments that do not fit the checkpoint, and are no error."""
        warn_if_changed(
            self.batches.first,
            self.start.header,
            local_batch_sizes=self.batches.local_sizes,
        )
        if self.start.step > self.plan.max_steps:
            warnings.warn(
                f"The checkpoint of step {self.start.step} is beyond max_steps="
                f"{self.plan.max_steps}: nothing is trained.",
                stacklevel=4,
            )

    def header(
        self,
        step: int,
        *,
        is_finished: bool,
        history: Mapping[str, list],
        evaluations: list[Evaluation],
        train_seconds: float,
        evaluation_is_due: bool,
    ) -> Header:
        """Return the header of a checkpoint."""
        before = self.start.header
        return Header(
            step=step,
            local_batch_sizes=self.batches.local_sizes,
            global_batch_size=self.global_batch_size,
            learning_rate=self.start.learning_rate,
            # Of all runs: a run that leaves a key out does not change its value.
            unchanged=before.unchanged | self.config.unchanged,
            first_batch=self.batches.first,
            sample=before.sample + (step - before.step) * self.global_batch_size,
            original_size=before.original_size,
            fit_epoch_steps=self.plan.fit_epoch_steps,
            steps_per_execution=self.plan.steps_per_execution,
            finished=self.plan.max_steps if is_finished else None,
            train_seconds=train_seconds,
            skipped_updates=self.skipping.count,
            history=_without_arrays(history),
            evaluations=_without_arrays(evaluations),
            evaluation_is_due=evaluation_is_due,
        )


def _without_arrays(values: Any) -> Any:
    """Return nested lists and dicts of numbers, for JSON."""
    return keras.tree.map_structure(lambda value: np.asarray(value).tolist(), values)
