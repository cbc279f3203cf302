"""One run of a job: from its start, which may be a checkpoint, to its end or a stop.

What happens at the end of a step, in the order of `Session._callbacks`:

1.  Broadcast, moving statistics, `RestoreCallback`: before the first step, the weights
    become equal on all ranks, then each rank restores what differs by rank. At the end
    of an epoch the moving statistics are averaged, so that evaluation and checkpoint
    see the same on all ranks.
2.  `MetricAverageCallback`: at the end of an epoch, the logs become equal on all ranks.
3.  `ProgressCallback`: reads the clocks, before any other callback takes time. The
    ranks vote (`requests.Votes`): for the rest of this step they agree on what is due
    and on a stop. Then the metrics are reported and the loss is checked, before a
    checkpoint of diverged weights could replace a good one.
4.  `StopTogetherCallback`: at the end of an epoch, the ranks agree whether it is the
    last one. The last evaluation contains collectives, which all ranks must enter.
5.  `EvaluationCallback`: evaluates and exports if it is due. User callbacks that follow
    find `val_` metrics in the logs of an epoch.
6.  The user's callbacks. One of them may set `stop_training`, on some ranks only.
7.  `StopTogetherCallback` again, and `EndOfEvaluationsCallback`, which evaluates if the
    training ends here and step 5 did not know.
8.  The history, then the checkpoint and the commit (`CheckpointCallback`), which
    contain all of the above. The file comes first: a commit leaves the training if
    hosts have changed.
9.  `PreemptionCallback`: ends the run if a stop is agreed on, once the checkpoint of
    this step is written.
10. `RestoreGeneratorsCallback`: before the first step, after all callbacks that may
    draw random numbers in `on_train_begin`.

Whether a checkpoint, a commit or an evaluation is due is decided by a
`requests.Interval`, which has its steps and seconds from `RunConfig` and `EvalSpec`.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.job import World
from hvdtrain.job.agreement import fail_together
from hvdtrain.native import recorder
from hvdtrain.training.building import Batches
from hvdtrain.training.checkpoint.header import Header
from hvdtrain.training.checkpoint.restoring import (
    RestoreCallback,
    RestoreGeneratorsCallback,
    Start,
)
from hvdtrain.training.checkpoint.step_variables import StepVariables
from hvdtrain.training.checkpoint.storage import CheckpointFiles
from hvdtrain.training.checkpoint.writing import (
    BackgroundWriter,
    CheckpointCallback,
    complete_together,
)
from hvdtrain.training.elastic import Commits
from hvdtrain.training.evaluation import (
    EndOfEvaluationsCallback,
    EvaluationCallback,
    evaluate_finished,
)
from hvdtrain.training.exporting import Exports
from hvdtrain.training.inputs import warn_if_changed
from hvdtrain.training.loop import train
from hvdtrain.training.preemption import PreemptionCallback, stopping_on
from hvdtrain.training.progress import ProgressCallback
from hvdtrain.training.requests import COMMIT, EVALUATE, SAVE, Interval, Requests, Votes
from hvdtrain.training.skipping import Skipping
from hvdtrain.training.specs import EvalSpec, Plan, Result, RunConfig, TrainSpec
from hvdtrain.training.stragglers import RankTimes


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
    step_variables: StepVariables
    files: CheckpointFiles | None
    commits: Commits | None
    exports: Exports | None
    skipping: Skipping
    observers: Sequence[object]

    @property
    def global_batch_size(self) -> int:
        return sum(self.batches.local_sizes)

    @property
    def is_finished(self) -> bool:
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


class Session:
    """Runs the training, or what a finished job lacks, and returns the `Result`."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        world, plan, start, commits = run.world, run.plan, run.start, run.commits
        # An elastic job keeps its requests when it changes: no request to stop is lost.
        self._requests = commits.requests if commits else Requests()
        self._requests.max_minutes = run.config.max_minutes
        self._writer = None
        if world.is_chief and run.files:
            self._writer = BackgroundWriter(
                run.files, run.observers, on_failure=self._on_failed_save
            )
        if commits:
            commits.writer = self._writer
        self._votes = Votes(self._requests, plan, world, start_step=start.step)
        self._progress = ProgressCallback(
            plan,
            run.global_batch_size,
            world,
            run.observers,
            requests=self._requests,
            votes=self._votes,
            skipping=run.skipping,
            start_step=start.step,
            batch_before=start.header.global_batch_size,
            times=RankTimes(
                recorder.seconds_by_phase,
                recorder.recent_waits,
            ),
        )
        self._history = keras.callbacks.History()
        self._history.history = dict(start.header.history)
        self._evaluations = list(start.header.evaluations)
        self._intervals: list[Interval] = []

    def run(
        self, model: keras.Model, train_spec: TrainSpec, eval_spec: EvalSpec
    ) -> None:
        """Train to the end, or until the job is asked to stop. A collective."""
        run, start_step = self._run, self._run.start.step
        # Drop the partial last epoch from the history: it is recomputed.
        epochs = start_step // run.plan.fit_epoch_steps
        history = self._history.history.items()
        self._history.history = {name: values[:epochs] for name, values in history}
        with self._stopping_on_signals(), self._writer or contextlib.nullcontext():
            train(
                model,
                train_spec.batches(start_step, run.plan.max_steps),
                run.plan,
                world=run.world,
                start_step=start_step,
                stops=self._next_stop,
                step_variables=run.step_variables,
                callbacks=self._callbacks(train_spec, eval_spec),
            )
            complete_together(run.world, self._writer)
            with fail_together(run.world):
                if run.exports:
                    run.exports.check()

    def complete(self, model: keras.Model, eval_spec: EvalSpec) -> None:
        """Evaluate and export a finished job, as far as missing. A collective."""
        run, step = self._run, self._run.start.step
        # There is no evaluation where max_steps was lowered below an old checkpoint.
        if not self._evaluations or self._evaluations[-1]["step"] != step:
            with self._stopping_on_signals():
                metrics = evaluate_finished(
                    model,
                    eval_spec,
                    self._requests,
                    run.world,
                    step=step,
                    max_steps=run.plan.max_steps,
                )
            self._evaluations.append({"step": step, "metrics": metrics})
        with fail_together(run.world):
            if run.exports and step <= run.plan.max_steps:
                run.exports.write_missing(model, self._evaluations)
                run.exports.check()

    def result(self, model: keras.Model) -> Result:
        return Result(
            model=model,
            history=self._history.history,
            test_metrics=self._evaluations[-1]["metrics"],
            start_step=self._run.start.step,
            step=self._evaluations[-1]["step"],
            train_seconds=self._train_seconds(),
            samples_per_second=self._progress.samples_per_second,
            skipped_updates=self._run.skipping.count,
        )

    def _callbacks(
        self, train_spec: TrainSpec, eval_spec: EvalSpec
    ) -> list[keras.callbacks.Callback]:
        """Return all callbacks. The docstring of the module explains their order."""
        run = self._run
        checkpoints = list(self._checkpoint_callbacks())
        # Once: evaluations call them, too.
        of_user = list(train_spec.callbacks(run.plan) if train_spec.callbacks else ())
        self._evaluation = EvaluationCallback(
            eval_spec,
            run.plan,
            self._interval(
                EVALUATE, eval_spec.throttle_steps, eval_spec.throttle_seconds
            ),
            run.observers,
            results=self._evaluations,
            exports=run.exports,
            left_out=self._progress.left_out,
            requests=self._requests,
            world=run.world,
            start=run.start,
            step_variables=run.step_variables,
            callbacks=of_user,
            save=checkpoints[0].save_before_evaluation if run.files else None,
        )
        return [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.AverageMovingStatisticsCallback(),
            RestoreCallback(run.start, run.plan),
            hvd.callbacks.MetricAverageCallback(),
            self._progress,
            hvd.callbacks.StopTogetherCallback(every_steps=None),
            self._evaluation,
            *of_user,
            hvd.callbacks.StopTogetherCallback(every_steps=None),
            EndOfEvaluationsCallback(self._evaluation),
            self._history,
            *checkpoints,
            PreemptionCallback(
                run.plan,
                self._requests,
                run.world,
                self._writer,
                evaluation=self._evaluation,
            ),
            RestoreGeneratorsCallback(run.start, run.plan),
        ]

    def _checkpoint_callbacks(self) -> Iterator[CheckpointCallback]:
        run, config = self._run, self._run.config
        common = (self._requests, run.world, self._header, run.step_variables)
        if run.files:
            steps, seconds = config.save_every_steps, config.save_every_seconds
            is_due = self._interval(SAVE, steps, seconds)
            yield CheckpointCallback(self._writer, run.plan, is_due, *common)
        if run.commits:
            steps, seconds = config.commit_every_steps, config.commit_every_seconds
            is_due = self._interval(COMMIT, steps, seconds)
            yield CheckpointCallback(
                run.commits, run.plan, is_due, *common, is_commit=True
            )

    def _interval(self, name: str, steps: int, seconds: float) -> Interval:
        interval = Interval(
            name,
            self._requests,
            steps=steps,
            seconds=seconds,
            world=self._run.world,
            start_step=self._run.start.step,
        )
        self._intervals.append(interval)
        return interval

    def _next_stop(self, step: int) -> int:
        """Return the next step at which ranks vote, or something is due by steps."""
        due = [interval.next_step(step) for interval in self._intervals]
        return int(min(self._votes.next_step, *due))

    def _stopping_on_signals(self) -> contextlib.AbstractContextManager:
        # Without checkpoints there is nothing to continue from.
        numbers = self._run.config.stop_signals if self._run.files else ()
        return stopping_on(numbers, self._requests, rank=self._run.world.rank)

    def _on_failed_save(self) -> None:
        if self._run.config.stop_on_failed_save:
            self._requests.stop("a checkpoint that could not be written")

    def _header(self, step: int, is_finished: bool, logs: dict) -> Header:
        """Return the header of a checkpoint; see `CheckpointCallback`."""
        run, before = self._run, self._run.start.header
        history = self._history.history
        added = {name: [*history.get(name, ()), v] for name, v in logs.items()}
        return Header(
            step=step,
            local_batch_sizes=run.batches.local_sizes,
            global_batch_size=run.global_batch_size,
            learning_rate=run.start.learning_rate,
            # Of all runs: a run that leaves a key out does not change its value.
            unchanged=before.unchanged | run.config.unchanged,
            first_batch=run.batches.first,
            sample=before.sample + (step - before.step) * run.global_batch_size,
            original_size=before.original_size,
            fit_epoch_steps=run.plan.fit_epoch_steps,
            steps_per_execution=run.plan.steps_per_execution,
            finished=run.plan.max_steps if is_finished else None,
            train_seconds=self._train_seconds(),
            skipped_updates=run.skipping.count,
            history=_without_arrays(history | added),
            evaluations=_without_arrays(self._evaluations),
            evaluation_is_due=self._evaluation.was_interrupted,
        )

    def _train_seconds(self) -> float:
        return self._run.start.header.train_seconds + self._progress.seconds


def _without_arrays(values: Any) -> Any:
    """Return nested lists and dicts of numbers, for JSON."""
    return keras.tree.map_structure(lambda value: np.asarray(value).tolist(), values)
