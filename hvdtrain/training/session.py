"""What one run of a job has: its state, clocks, requests, results and writer."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.checkpoint.header import Header
from hvdtrain.checkpoint.restoring import Start
from hvdtrain.checkpoint.step_variables import StepVariables
from hvdtrain.checkpoint.storage import CheckpointFiles
from hvdtrain.checkpoint.tiers import TieredFiles
from hvdtrain.checkpoint.writing import BackgroundWriter, TieredWriter, Writer
from hvdtrain.job import World
from hvdtrain.job.agreement import fail_together
from hvdtrain.native import recorder
from hvdtrain.stores.mirror import local_directory
from hvdtrain.training.building import Batches
from hvdtrain.training.description import describe_run
from hvdtrain.training.due import (
    COMMIT,
    EVALUATE,
    SAVE,
    Interval,
    Requests,
    Votes,
    stopping_on,
)
from hvdtrain.training.elastic import Commits
from hvdtrain.training.evaluation import Evaluations, evaluate_finished
from hvdtrain.training.exporting import Exports
from hvdtrain.training.inputs import warn_if_changed
from hvdtrain.training.observers import notify, scalars
from hvdtrain.training.periodic_save import PeriodicSave
from hvdtrain.training.progress import ProgressMeter
from hvdtrain.training.skipping import Skipping
from hvdtrain.training.specs import EvalSpec, Plan, Result, RunConfig
from hvdtrain.training.stragglers import RankTimes


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """Where one run of a job starts, and what it trains with.

    Attributes:
        plan: with the epochs of the run that wrote the checkpoint.
        files: None without a `model_dir`.
        commits: None unless the job is elastic.
        exports: None without exporters, and on other ranks than the chief.
        observers: see `train_and_evaluate`; none on other ranks than the chief.
    """

    model: keras.Model
    world: World
    config: RunConfig
    batches: Batches
    plan: Plan
    start: Start
    step_variables: StepVariables
    files: CheckpointFiles | TieredFiles | None
    commits: Commits | None
    exports: Exports | None
    skipping: Skipping
    observers: Sequence[object]

    @property
    def is_finished(self) -> bool:
        return self.start.is_finished(
            self.plan.max_steps, global_batch_size=self.plan.global_batch_size
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


class Session:
    """The collaborators of the training of a run, and its `Result`."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        world, plan, start, commits = run.world, run.plan, run.start, run.commits
        # An elastic job keeps its requests when it changes: no request to stop is lost.
        self.requests = commits.requests if commits else Requests()
        self.requests.max_minutes = run.config.max_minutes
        self.writer: Writer | None = None
        if world.is_chief and run.files:
            self.writer = self._make_writer(run.files)
        if commits:
            commits.writer = self.writer
        self._votes = Votes(self.requests, plan, world, start_step=start.step)
        self.progress = ProgressMeter(
            run.model,
            plan,
            world,
            run.observers,
            requests=self.requests,
            votes=self._votes,
            skipping=run.skipping,
            start_step=start.step,
            batch_before=start.header.global_batch_size,
            times=RankTimes(
                recorder.seconds_by_phase,
                recorder.recent_waits,
            ),
        )
        self.start = describe_run(
            world,
            run.model,
            plan,
            start=start,
            local_batch_sizes=run.batches.local_sizes,
        )
        self.history = keras.callbacks.History()
        self.history.history = dict(start.header.history)
        self._evaluations = list(start.header.evaluations)
        self._intervals: list[Interval] = []

    @property
    def result(self) -> Result:
        return Result(
            model=self.run.model,
            start=self.start,
            history=self.history.history,
            test_metrics=self._evaluations[-1]["metrics"],
            step=self._evaluations[-1]["step"],
            train_seconds=self._train_seconds(),
            samples_per_second=self.progress.samples_per_second,
            skipped_updates=self.run.skipping.count,
        )

    def complete(self, eval_spec: EvalSpec) -> None:
        """Evaluate and export a finished job, as far as missing. A collective."""
        run, step = self.run, self.run.start.step
        # There is no evaluation where max_steps was lowered below an old checkpoint.
        if not self._evaluations or self._evaluations[-1]["step"] != step:
            with self.stopping_on_signals():
                metrics = evaluate_finished(
                    run.model,
                    eval_spec,
                    self.requests,
                    run.world,
                    step=step,
                    max_steps=run.plan.max_steps,
                )
            self._evaluations.append({"step": step, "metrics": metrics})
        with fail_together(run.world):
            if run.exports and step <= run.plan.max_steps:
                run.exports.write_missing(run.model, self._evaluations)
                run.exports.check()
        metrics = scalars(self._evaluations[-1]["metrics"])
        notify(run.observers, "on_finished", self.start, metrics)

    def make_evaluations(
        self,
        eval_spec: EvalSpec,
        callbacks: Sequence[keras.callbacks.Callback],
        save: Callable[[int, dict], None] | None,
    ) -> Evaluations:
        """Return the evaluations of a training; see there for the arguments."""
        run = self.run
        return Evaluations(
            run.model,
            eval_spec,
            run.plan,
            self._interval(
                EVALUATE, eval_spec.throttle_steps, eval_spec.throttle_seconds
            ),
            run.observers,
            results=self._evaluations,
            exports=run.exports,
            left_out=self.progress.left_out,
            requests=self.requests,
            world=run.world,
            start=run.start,
            step_variables=run.step_variables,
            callbacks=callbacks,
            save=save,
        )

    def make_saves(
        self,
        make_header: Callable[[int, bool, dict], Header],
        read_callbacks: Callable[[], dict[str, np.ndarray] | None],
    ) -> Iterator[PeriodicSave]:
        """Yield what saves the state: first to files, then in commits.

        A commit leaves the training if hosts have changed.
        """
        run, config = self.run, self.run.config
        save = functools.partial(
            PeriodicSave,
            model=run.model,
            world=run.world,
            make_header=make_header,
            step_variables=run.step_variables,
            read_callbacks=read_callbacks,
        )
        if run.files:
            steps, seconds = config.save_every_steps, config.save_every_seconds
            directory = None
            if self.writer and config.model_dir:
                directory = local_directory(config.model_dir, config.local_dir)
            is_due = self._interval(SAVE, steps, seconds)
            yield save(self.writer, is_due, directory=directory)
        if run.commits:
            steps, seconds = config.commit_every_steps, config.commit_every_seconds
            is_due = self._interval(COMMIT, steps, seconds)
            yield save(run.commits, is_due, is_commit=True)

    def next_stop(self, step: int) -> int:
        """Return the next step at which ranks vote, or something is due by steps."""
        due = [interval.next_step(step) for interval in self._intervals]
        return int(min(self._votes.next_step, *due))

    def stopping_on_signals(self) -> contextlib.AbstractContextManager:
        """Return a context in which signals ask for a stop."""
        # Without checkpoints there is nothing to continue from.
        numbers = self.run.config.stop_signals if self.run.files else ()
        return stopping_on(numbers, self.requests, rank=self.run.world.rank)

    def make_header(
        self, step: int, is_finished: bool, logs: dict, *, evaluation_is_due: bool
    ) -> Header:
        """Return the header of a checkpoint; see `PeriodicSave`."""
        run, before = self.run, self.run.start.header
        history = self.history.history
        added = {name: [*history.get(name, ()), v] for name, v in logs.items()}
        return Header(
            step=step,
            local_batch_sizes=run.batches.local_sizes,
            global_batch_size=run.plan.global_batch_size,
            learning_rate=run.start.learning_rate,
            # Of all runs: a run that leaves a key out does not change its value.
            unchanged=before.unchanged | run.config.unchanged,
            first_batch=run.batches.first,
            sample=run.plan.samples(step),
            original_size=before.original_size,
            fit_epoch_steps=run.plan.fit_epoch_steps,
            steps_per_execution=run.plan.steps_per_execution,
            finished=run.plan.max_steps if is_finished else None,
            train_seconds=self._train_seconds(),
            skipped_updates=run.skipping.count,
            history=_without_arrays(history | added),
            evaluations=_without_arrays(self._evaluations),
            evaluation_is_due=evaluation_is_due,
        )

    def _interval(self, name: str, steps: int, seconds: float) -> Interval:
        interval = Interval(
            name,
            self.requests,
            steps=steps,
            seconds=seconds,
            world=self.run.world,
            start_step=self.run.start.step,
        )
        self._intervals.append(interval)
        return interval

    def _make_writer(self, files: CheckpointFiles | TieredFiles) -> Writer:
        make = functools.partial(
            BackgroundWriter,
            report=functools.partial(notify, self.run.observers, "on_checkpoint"),
            on_failure=self._on_failed_save,
        )
        if isinstance(files, CheckpointFiles):
            return make(files)
        return TieredWriter(
            make(files.disk),
            make(files.store),
            every_steps=self.run.config.upload_every_steps,
            every_seconds=self.run.config.upload_every_seconds,
            start_step=self.run.start.step,
        )

    def _on_failed_save(self) -> None:
        if self.run.config.stop_on_failed_save:
            self.requests.stop("a checkpoint that could not be written")

    def _train_seconds(self) -> float:
        return self.run.start.header.train_seconds + self.progress.seconds


def _without_arrays(values: Any) -> Any:
    """Return nested lists and dicts of numbers, for JSON."""
    return keras.tree.map_structure(lambda value: np.asarray(value).tolist(), values)
