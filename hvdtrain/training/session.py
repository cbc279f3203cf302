"""One run of a job: from its start, which may be a checkpoint, to its end or a stop."""

import contextlib
import dataclasses
from collections.abc import Sequence

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.job import World
from hvdtrain.job.agreement import fail_together
from hvdtrain.training.checkpoint.restoring import (
    RestoreCallback,
    RestoreGeneratorsCallback,
    Start,
)
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
    InterruptedEvaluationError,
    Rounds,
    evaluate,
    evaluated_weights,
)
from hvdtrain.training.exporting import Exports
from hvdtrain.training.fitting import fit
from hvdtrain.training.plan import Plan
from hvdtrain.training.preemption import (
    PreemptionCallback,
    raise_preempted,
    stopping_on,
)
from hvdtrain.training.progress import ProgressCallback, check_loss
from hvdtrain.training.requests import (
    COMMIT,
    EVALUATE,
    SAVE,
    Every,
    Requests,
    StopAtEpochEndCallback,
    Votes,
)
from hvdtrain.training.skipping import Skipping
from hvdtrain.training.specs import EvalSpec, Result, RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What the parts of one run of a job have in common.

    Attributes:
        world: the `World`.
        config: the `RunConfig`.
        plan: the `Plan`.
        start: the `Start`.
        local_batch_sizes: samples in a batch of each rank.
        files: the `CheckpointFiles`; None without checkpoints.
        commits: the `Commits` of an elastic job, or None.
        exports: the `Exports` on the chief; None elsewhere, and without exporters.
        skipping: the `Skipping`.
        observers: see `train_and_evaluate`.
        first_batch: `step` and `digests`, by replica; None if it is not checked.
    """

    world: World
    config: RunConfig
    plan: Plan
    start: Start
    local_batch_sizes: tuple
    files: CheckpointFiles | None
    commits: Commits | None
    exports: Exports | None
    skipping: Skipping
    observers: Sequence
    first_batch: dict | None

    @property
    def global_batch_size(self):
        """Samples of a step of the whole job."""
        return sum(self.local_batch_sizes)


class Session:
    """The callbacks of a `Run`, and what they have found."""

    def __init__(self, run):
        self._run = run
        world, plan, commits = run.world, run.plan, run.commits
        self._requests = commits.requests if commits else Requests()
        self._requests.max_minutes = run.config.max_minutes
        self._writer = None
        if world.is_chief and run.files:
            self._writer = BackgroundWriter(
                run.files, run.observers, on_failure=self._on_failed_save
            )
        if commits:
            commits.writer = self._writer
        self._votes = Votes(self._requests, plan, world, start_step=run.start.step)
        self._progress = ProgressCallback(
            plan,
            run.global_batch_size,
            world,
            run.observers,
            requests=self._requests,
            votes=self._votes,
            skipping=run.skipping,
            start_step=run.start.step,
            batch_before=run.start.metadata.get("global_batch_size"),
        )
        self._history = keras.callbacks.History()
        self._history.history = dict(run.start.metadata.get("history", {}))
        self._evaluations = list(run.start.metadata.get("evaluations", ()))
        self._periods = []

    def run(self, model, train_spec, eval_spec):
        """Train to the end, or until the job is asked to stop."""
        # The last epoch of a shorter job is completed, and reported again.
        epochs = self._run.start.step // self._run.plan.fit_epoch_steps
        history = self._history.history
        self._history.history = {name: each[:epochs] for name, each in history.items()}
        writing = self._writer or contextlib.nullcontext()
        with self._stopping_on_signals(), writing:
            plan, start_step = self._run.plan, self._run.start.step
            fit(
                model,
                train_spec.batches(start_step, plan.max_steps),
                plan,
                world=self._run.world,
                start_step=start_step,
                stops=self._next_stop,
                callbacks=self._callbacks(train_spec, eval_spec),
            )
            complete_together(self._run.world, self._writer)
            with fail_together(self._run.world):
                if self._run.exports:
                    self._run.exports.check()

    def complete(self, model, eval_spec):
        """Evaluate and export a finished job, as far as that is missing."""
        step = self._run.start.step
        # There is none where max_steps was lowered below an earlier checkpoint.
        if not self._evaluations or self._evaluations[-1]["step"] != step:
            with self._stopping_on_signals():
                found = self._evaluated(model, eval_spec)
            if "loss" in found:
                check_loss(found["loss"], step)
            self._evaluations.append({"step": step, "metrics": found})
        with fail_together(self._run.world):
            if self._run.exports and step <= self._run.plan.max_steps:
                self._run.exports.write_missing(model, self._evaluations)
                self._run.exports.check()

    def _stopping_on_signals(self) -> contextlib.AbstractContextManager:
        # Without checkpoints there is nothing to continue from.
        numbers = self._run.config.stop_signals if self._run.config.model_dir else ()
        return stopping_on(numbers, self._requests, rank=self._run.world.rank)

    def _evaluated(self, model: keras.Model, eval_spec: EvalSpec) -> dict:
        """Return the metrics of a finished job, or end it where it is asked to stop."""
        world, step = self._run.world, self._run.start.step
        rounds = Rounds(self._requests, world)
        try:
            with evaluated_weights(model, steps=None):
                return evaluate(
                    model, eval_spec.batches(), steps=eval_spec.steps, rounds=rounds
                )
        except InterruptedEvaluationError:
            # As in the run before, which has left this evaluation due.
            max_steps = self._run.plan.max_steps
            raise_preempted(self._requests, world, step=step, max_steps=max_steps)

    def result(self, model):
        """Return the `Result`."""
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

    def _next_stop(self, step: int) -> int:
        """Return the next step that is due for a vote, or by its number."""
        due = [every.next_step(step) for every in self._periods]
        return min(self._votes.next_step, *due)

    def _callbacks(self, train_spec, eval_spec):
        """Return all callbacks, in their order."""
        config, plan = self._run.config, self._run.plan
        savings = list(self._savings())
        evaluation = EvaluationCallback(
            eval_spec,
            plan,
            self._every(EVALUATE, eval_spec.throttle_steps, eval_spec.throttle_seconds),
            self._run.observers,
            results=self._evaluations,
            exports=self._run.exports,
            left_out=self._progress.left_out,
            requests=self._requests,
            world=self._run.world,
            start=self._run.start,
            save=savings[0].save_before_evaluation if config.model_dir else None,
        )
        self._evaluation = evaluation
        preemption = PreemptionCallback(
            plan,
            self._requests,
            self._run.world,
            self._writer,
            evaluation=evaluation,
        )
        return [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.AverageMovingStatisticsCallback(),
            # After these two, which make the ranks equal.
            RestoreCallback(self._run.start, plan),
            hvd.callbacks.MetricAverageCallback(),
            # Before callbacks of users, whose logs may differ by rank.
            self._progress,
            # The last evaluation is a collective: ranks agree whether it is here.
            StopAtEpochEndCallback(self._run.world),
            evaluation,
            *(train_spec.callbacks(plan) if train_spec.callbacks else ()),
            StopAtEpochEndCallback(self._run.world),
            EndOfEvaluationsCallback(evaluation),
            # Before the checkpoint, which contains it.
            self._history,
            *savings,
            preemption,
            RestoreGeneratorsCallback(self._run.start, plan),
        ]

    def _on_failed_save(self):
        if self._run.config.stop_on_failed_save:
            self._requests.stop("a checkpoint that could not be written")

    def _savings(self):
        config = self._run.config
        # A commit leaves the training where hosts have changed: the file comes first.
        if config.model_dir:
            every = self._every(
                SAVE, config.save_every_steps, config.save_every_seconds
            )
            yield self._saving(self._writer, every)
        if self._run.commits:
            steps, seconds = config.commit_every_steps, config.commit_every_seconds
            every = self._every(COMMIT, steps, seconds)
            yield self._saving(self._run.commits, every, is_commit=True)

    def _saving(self, writer, every, **options):
        return CheckpointCallback(
            writer,
            self._run.plan,
            every,
            self._requests,
            self._run.world,
            describe=self._describe,
            **options,
        )

    def _every(self, name, steps, seconds):
        every = Every(
            name,
            self._requests,
            steps=steps,
            seconds=seconds,
            world=self._run.world,
            start_step=self._run.start.step,
        )
        self._periods.append(every)
        return every

    def _describe(self, step: int, is_finished: bool, logs: dict) -> dict:
        """Return the metadata of a checkpoint."""
        run, start = self._run, self._run.start
        new_samples = (step - start.step) * run.global_batch_size
        history = self._history.history
        history = history | {
            name: [*history.get(name, ()), v] for name, v in logs.items()
        }
        first_size = len(run.local_batch_sizes)
        if run.commits:
            first_size = run.commits.original_size
        return {
            "local_batch_sizes": run.local_batch_sizes,
            "global_batch_size": run.global_batch_size,
            "learning_rate": start.learning_rate,
            # Of all runs: one that leaves a key out does not change its value.
            "unchanged": start.metadata.get("unchanged", {}) | run.config.unchanged,
            "first_batch": run.first_batch,
            "sample": start.metadata.get("sample", 0) + new_samples,
            "original_size": start.metadata.get("original_size", first_size),
            "fit_epoch_steps": self._run.plan.fit_epoch_steps,
            "steps_per_execution": self._run.plan.steps_per_execution,
            "finished": self._run.plan.max_steps if is_finished else None,
            "train_seconds": self._train_seconds(),
            "skipped_updates": self._run.skipping.count,
            "history": _for_json(history),
            "evaluations": _for_json(self._evaluations),
            "evaluation_is_due": self._evaluation.was_interrupted,
        }

    def _train_seconds(self):
        before = self._run.start.metadata.get("train_seconds", 0.0)
        return before + self._progress.seconds


def _for_json(values):
    """Return lists and dicts of numbers and arrays, without arrays."""
    return keras.tree.map_structure(lambda value: np.asarray(value).tolist(), values)
