"""One run of a job: from its start, which may be a checkpoint, to its end or a stop."""

import contextlib

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.job.agreement import fail_together
from hvdtrain.training.evaluation import (
    EvaluationCallback,
    evaluate,
    evaluated_weights,
)
from hvdtrain.training.fitting import fit
from hvdtrain.training.preemption import PreemptionCallback, stopping_on
from hvdtrain.training.progress import ProgressCallback
from hvdtrain.training.requests import COMMIT, EVALUATE, SAVE, Every, Requests
from hvdtrain.training.resuming import RestoreCallback
from hvdtrain.training.saving import (
    BackgroundWriter,
    CheckpointCallback,
    complete_together,
)
from hvdtrain.training.specs import Result
from hvdtrain.training.stepping import StopAtEpochEndCallback


class Session:
    """One run of a job: its callbacks, and what they have found.

    Args:
        plan: the `Plan`.
        start: the `Start`.
        config: the `RunConfig`.
        world: the `World`.
        files: the `CheckpointFiles`; None without checkpoints.
        commits: the `Commits` of an elastic job, or None.
        exports: the `Exports` on the chief; None elsewhere, and without exporters.
        skipping: the `Skipping`.
        observers: see `train_and_evaluate`.
        shares: samples in a batch of each rank.
    """

    def __init__(
        self,
        plan,
        start,
        config,
        world,
        *,
        files,
        commits,
        exports,
        skipping,
        observers,
        shares,
    ):
        self._plan = plan
        self._start = start
        self._config = config
        self._world = world
        self._commits = commits
        self._exports = exports
        self._skipping = skipping
        self._observers = observers
        self._shares = shares
        self._requests = commits.requests if commits else Requests()
        self._writer = None
        if world.is_chief and files:
            self._writer = BackgroundWriter(
                files, observers, on_failure=self._on_failed_save
            )
        if commits:
            commits.writer = self._writer
        self._progress = ProgressCallback(
            plan,
            sum(shares),
            world,
            observers,
            requests=self._requests,
            skipping=skipping,
            start_step=start.step,
            batch_before=start.metadata.get("global_batch_size"),
        )
        self._history = keras.callbacks.History()
        self._history.history = dict(start.metadata.get("history", {}))
        self._evaluations = list(start.metadata.get("evaluations", ()))

    def run(self, model, train_spec, eval_spec):
        """Train to the end, or until the job is asked to stop."""
        # The last epoch of a shorter job is completed, and reported again.
        epochs = self._start.step // self._plan.fit_epoch_steps
        history = self._history.history
        self._history.history = {name: each[:epochs] for name, each in history.items()}
        # Without checkpoints there is nothing to continue from.
        numbers = self._config.stop_signals if self._config.model_dir else ()
        writing = self._writer or contextlib.nullcontext()
        with stopping_on(numbers, self._requests, rank=self._world.rank), writing:
            fit(
                model,
                train_spec.batches,
                self._plan,
                start_step=self._start.step,
                callbacks=self._callbacks(train_spec, eval_spec),
            )
            complete_together(self._world, self._writer)
            with fail_together(self._world):
                if self._exports:
                    self._exports.check()

    def complete(self, model, eval_spec):
        """Do what a finished job lacks: the last evaluation, and exports."""
        step = self._start.step
        # There is none where max_steps was lowered below an earlier checkpoint.
        if not self._evaluations or self._evaluations[-1]["step"] != step:
            with evaluated_weights(model, steps=None):
                found = evaluate(model, eval_spec.batches(), steps=eval_spec.steps)
            self._evaluations.append({"step": step, "metrics": found})
        with fail_together(self._world):
            if self._exports and step <= self._plan.max_steps:
                self._exports.write_missing(model, self._evaluations)
                self._exports.check()

    def result(self, model):
        """Return the `Result`."""
        return Result(
            model=model,
            history=self._history.history,
            test_metrics=self._evaluations[-1]["metrics"],
            start_step=self._start.step,
            train_seconds=self._train_seconds(),
            samples_per_second=self._progress.samples_per_second,
            skipped_updates=self._skipping.count,
        )

    def _callbacks(self, train_spec, eval_spec):
        """Return all callbacks, in their order."""
        config, plan = self._config, self._plan
        evaluation = EvaluationCallback(
            eval_spec,
            plan,
            self._every(EVALUATE, eval_spec.throttle_steps, eval_spec.throttle_seconds),
            self._observers,
            results=self._evaluations,
            exports=self._exports,
            on_end=self._progress.leave_out,
        )
        preemption = PreemptionCallback(
            plan,
            self._requests,
            self._world,
            self._writer,
            max_minutes=config.max_minutes,
        )
        return [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.AverageMovingStatisticsCallback(),
            # After these two, which make the ranks equal.
            RestoreCallback(self._start, plan),
            hvd.callbacks.MetricAverageCallback(),
            # Before callbacks of users, whose logs may differ by rank.
            self._progress,
            *(train_spec.callbacks(plan) if train_spec.callbacks else ()),
            StopAtEpochEndCallback(self._world),
            evaluation,
            # Before the checkpoint, which contains it.
            self._history,
            *self._savings(),
            preemption,
        ]

    def _on_failed_save(self):
        if self._config.stop_on_failed_save:
            self._requests.stop("a checkpoint that could not be written")

    def _savings(self):
        config = self._config
        # A commit leaves the training where hosts have changed: the file comes first.
        if config.model_dir:
            every = self._every(
                SAVE, config.save_every_steps, config.save_every_seconds
            )
            yield self._saving(self._writer, every)
        if self._commits:
            steps, seconds = config.commit_every_steps, config.commit_every_seconds
            every = self._every(COMMIT, steps, seconds)
            yield self._saving(self._commits, every, is_commit=True)

    def _saving(self, writer, every, **options):
        return CheckpointCallback(
            writer,
            self._plan,
            every,
            self._requests,
            self._world,
            describe=self._describe,
            **options,
        )

    def _every(self, name, steps, seconds):
        return Every(
            name,
            self._requests,
            steps=steps,
            seconds=seconds,
            world=self._world,
            start_step=self._start.step,
        )

    def _describe(self, step, is_finished):
        """Return the metadata of a checkpoint."""
        start, global_batch_size = self._start, sum(self._shares)
        new_samples = (step - start.step) * global_batch_size
        first_size = self._commits.original_size if self._commits else self._world.size
        return {
            "shares": self._shares,
            "global_batch_size": global_batch_size,
            "sample": start.metadata.get("sample", 0) + new_samples,
            "original_size": start.metadata.get("original_size", first_size),
            "fit_epoch_steps": self._plan.fit_epoch_steps,
            "steps_per_execution": self._plan.steps_per_execution,
            "finished": self._plan.max_steps if is_finished else None,
            "train_seconds": self._train_seconds(),
            "skipped_updates": self._skipping.count,
            "history": _for_json(self._history.history),
            "evaluations": _for_json(self._evaluations),
        }

    def _train_seconds(self):
        return self._start.metadata.get("train_seconds", 0.0) + self._progress.seconds


def _for_json(values):
    """Return lists and dicts of numbers and arrays, without arrays."""
    return keras.tree.map_structure(lambda value: np.asarray(value).tolist(), values)
