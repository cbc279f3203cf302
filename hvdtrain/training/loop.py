"""The loop of a training: epochs, executions and steps, from any step on.

The model's `train_step`, its metrics and the user's callbacks are called as Keras'
`fit` calls them, and batches are numbered as if the training had not been interrupted.
"""

import contextlib
import functools
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.checkpoint.header import Header
from hvdtrain.checkpoint.writing import complete_together
from hvdtrain.job import JobError
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.job.world import SharedJobError
from hvdtrain.keras.callbacks.effects import (
    changing_callbacks,
    find_writers,
    warn_of_batch_logs,
    written_twice,
)
from hvdtrain.keras.callbacks.fit_start import callbacks_differ, shared_callbacks
from hvdtrain.keras.metrics import metric_variables
from hvdtrain.keras.seams import replace
from hvdtrain.native import recorder
from hvdtrain.training.callback_states import CallbackStates, check_callbacks
from hvdtrain.training.due import STOP, raise_preempted
from hvdtrain.training.evaluation import kept_values
from hvdtrain.training.session import Session
from hvdtrain.training.specs import EvalSpec, TrainSpec
from hvdtrain.training.steps import BatchReader, make_steps

# The error of `assert_cardinality`.
_EARLY_END = re.compile(r"expected to contain \d+ elements? but contained only (\d+)")


def train(session: Session, train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
    """Train to the end of the plan, or until the job is asked to stop. A collective.

    Raises:
        JobError: the ranks hold different weights, the input has ended early, or a
            callback has compiled the model again or is a `BackupAndRestore`.
        PreemptedError: on all ranks, when the job was asked to stop.
    """
    run = session.run
    start, end = run.start.step, run.plan.max_steps
    with session.stopping_on_signals(), session.writer or contextlib.nullcontext():
        # Without `take`, one batch more than asserted would be read, and be an error.
        batches = train_spec.batches(start, end).take(end - start)
        batches = batches.apply(tf.data.experimental.assert_cardinality(end - start))
        iterator = iter(batches)
        recorder.set_step(start)
        try:
            loop = _Loop(session, train_spec, eval_spec)
            loop.run(BatchReader(iterator, run.world))
        except hvd.callbacks.DesynchronizedError as error:
            raise SharedJobError(str(error)) from None
        except tf.errors.OpError as error:
            if early_end := _EARLY_END.search(str(error)):
                raise JobError(
                    f"Received {early_end[1]} batches from input_fn for the steps "
                    f"{start} to {end}; expected one for each step: set "
                    "TrainSpec.repeat, or lower max_steps."
                ) from None
            raise
        finally:
            run.model.train_function = None
        complete_together(run.world, session.writer)
        with fail_together(run.world):
            if run.exports:
                run.exports.check()


class _Loop:
    """Takes the steps of a run. `_after_steps` and `_end_epoch` say what follows them.

    Whether a checkpoint, a commit or an evaluation is due is decided by a
    `due.Interval`, which has its steps and seconds from `RunConfig` and
    `EvalSpec`. The ranks vote on what is due by seconds, and on a stop.
    """

    def __init__(
        self, session: Session, train_spec: TrainSpec, eval_spec: EvalSpec
    ) -> None:
        run = session.run
        self._session, self._run, self._model = session, run, run.model
        self._progress, self._plan = session.progress, run.plan
        self._step = run.start.step
        self._logs: dict = {}
        # What differs by rank in the checkpoint, until the first epoch has begun.
        self._per_rank = run.start.per_rank_state
        # Once: evaluations call them, too.
        with fail_together(run.world):
            users = list(train_spec.callbacks(run.plan) if train_spec.callbacks else ())
            check_callbacks(users)
        self._has_callbacks = bool(users)
        self._saves = list(session.make_saves(self._make_header, self._read_callbacks))
        self._evaluations = session.make_evaluations(
            eval_spec,
            users,
            save=self._saves[0].save_before_evaluation if run.files else None,
        )
        make_list = functools.partial(
            keras.callbacks.CallbackList,
            model=run.model,
            verbose=0,
            epochs=run.plan.epochs,
            steps=run.plan.fit_epoch_steps,
            steps_per_execution=run.plan.steps_per_execution,
        )
        # Equal weights before the first step, and moving statistics, then metrics, of
        # all ranks at the end of an epoch: evaluations and checkpoints need them.
        self._first = make_list(
            [
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.AverageMovingStatisticsCallback(),
                hvd.callbacks.MetricAverageCallback(),
            ]
        )
        # The last evaluation has collectives, and so do checkpoints: before them, the
        # ranks agree whether the training ends.
        self._agreements = [
            hvd.callbacks.StopTogetherCallback(every_steps=None) for _ in range(2)
        ]
        make_list(self._agreements)
        self._users = make_list(users)
        self._callback_states = CallbackStates(self._users.callbacks)
        # Of the whole job, as opposed to a user's own.
        make_list([session.history])

    def run(self, batches: BatchReader) -> None:
        model, plan = self._model, self._plan
        # Drop the partial last epoch from the history: it is recomputed.
        first_epoch = self._step // plan.fit_epoch_steps
        history = self._session.history.history
        for name, values in history.items():
            history[name] = values[:first_epoch]
        model.stop_training = False
        # `compile` removes it.
        replace(model, "train_function", self._take_steps, by=train)
        self._begin()
        # After the callbacks, which may replace the model's `train_step`.
        self._steps = make_steps(
            model, batches, plan.steps_per_execution, self._run.step_variables
        )
        logs: dict = {}
        epochs = range(first_epoch, plan.epochs)
        if self._evaluations.holds_epoch_end:
            logs = self._end_held_epoch(first_epoch - 1)
            epochs = epochs[:0] if model.stop_training else epochs
        for epoch in epochs:
            self._begin_epoch(epoch)
            self._take_epoch(epoch)
            logs = self._end_epoch(epoch)
            if model.stop_training:
                break
        model.optimizer.finalize_variable_values(model.trainable_weights)
        self._end(logs)

    @recorder.phase("callbacks")
    def _begin(self) -> None:
        before, after = self._agreements
        self._first.on_train_begin()
        self._compare_callbacks()
        if self._per_rank:
            self._per_rank.assign(self._model)
        self._progress.begin(self._session.start)
        before.on_train_begin()
        with self._keep_variables(is_kept=bool(self._per_rank)):
            self._users.on_train_begin()
        if self._plan.is_epoch_end(self._step):
            self._restore_callbacks()
        after.on_train_begin()
        self._session.history.on_train_begin()
        # Last: the checkpoint has what callbacks draw when a training begins.
        if self._per_rank:
            self._per_rank.restore_generators()

    def _compare_callbacks(self) -> None:
        users = self._users.callbacks
        # `_agreements` are of all ranks.
        changing = changing_callbacks(users, stops_together=True)
        on_all = [*shared_callbacks(self._users), *sorted(changing)]
        own = self._has_callbacks, on_all, find_writers(users, self._model)
        are_used, names, writers = zip(*gather(self._run.world, own), strict=True)
        self._has_callbacks = any(are_used)
        ranks = range(self._run.world.size)
        if fault := callbacks_differ(names, ranks) or written_twice(writers, ranks):
            raise SharedJobError(fault)
        if len(ranks) > 1:
            warn_of_batch_logs(users)

    @recorder.phase("callbacks")
    def _begin_epoch(self, epoch: int) -> None:
        self._model.reset_metrics()
        is_continued = self._step > self._plan.step(epoch)
        self._first.on_epoch_begin(epoch)
        if self._per_rank and is_continued:
            self._per_rank.assign_metrics(self._model)
        self._progress.begin_epoch(epoch)
        if not is_continued:
            self._evaluations.run_interrupted(epoch)
        with self._keep_variables(is_kept=is_continued):
            self._users.on_epoch_begin(epoch)
            first, _ = self._plan.execution(self._step)
            if self._step > first:
                self._begin_execution(first - self._plan.step(epoch))
        if is_continued:
            self._restore_callbacks()
            self._evaluations.run_interrupted(epoch)
        if self._evaluations.was_interrupted:
            # It stays due in the checkpoint that this run has read, since no step has
            # changed the weights.
            self._stop()
        if self._per_rank:
            if is_continued:
                self._per_rank.restore_generators()
            self._per_rank.release()
            self._per_rank = None

    def _keep_variables(self, *, is_kept: bool) -> contextlib.AbstractContextManager:
        """Return a context that puts back all variables that callbacks change in it.

        In a run that continues, callbacks begin the training, and perhaps its epoch and
        execution, for the second time. The checkpoint has what they changed then, such
        as a learning rate or pretrained weights.
        """
        if not (is_kept and self._users.callbacks):
            return contextlib.nullcontext()
        return kept_values(
            [
                *self._model.variables,
                *self._model.optimizer.variables,
                *metric_variables(self._model.metrics),
                *self._run.step_variables.unlisted(self._model),
            ]
        )

    def _restore_callbacks(self) -> None:
        """Restore the states of callbacks, which have begun what was interrupted."""
        if self._per_rank:
            # A finished job that is made longer waits anew for an improvement.
            is_longer = bool(self._run.start.header.finished)
            states = self._per_rank.callbacks
            self._callback_states.restore(states, of_files=is_longer)

    def _read_callbacks(self) -> dict[str, np.ndarray] | None:
        return self._callback_states.capture() if self._has_callbacks else None

    def _take_epoch(self, epoch: int) -> None:
        epoch_start, epoch_end = self._plan.step(epoch), self._plan.step(epoch + 1)
        while self._step < epoch_end:
            first, end = self._plan.execution(self._step)
            if self._step == first:
                self._begin_execution(first - epoch_start)
            while self._step < end:
                self._logs = self._take_steps(
                    min(self._session.next_stop(self._step), end)
                )
                self._after_steps(
                    self._step - epoch_start, is_execution_end=self._step == end
                )
                if self._model.stop_training:
                    return

    @recorder.phase("callbacks")
    def _begin_execution(self, batch: int) -> None:
        self._first.on_train_batch_begin(batch)
        self._users.on_train_batch_begin(batch)
        # A checkpoint restores what model_fn returns: a resumed job would differ.
        if self._model.train_function != self._take_steps:
            raise JobError(
                "Received a model that a callback has compiled again; expected the "
                "model that model_fn has compiled: compile it there."
            )

    def _take_steps(self, end: int) -> dict:
        logs = self._steps(end - self._step)
        self._step = end
        return logs

    @recorder.phase("callbacks")
    def _after_steps(self, epoch_steps: int, *, is_execution_end: bool) -> None:
        """Do what is due after some steps: on all ranks after the same ones.

        At the end of an epoch, evaluations and checkpoints follow in `_end_epoch`.
        """
        # First, since it reads the clocks. It checks the loss before a checkpoint of
        # diverged weights could replace a good one.
        self._progress.read(self._step, self._logs)
        self._evaluations.note(self._step)
        if not self._ends_epoch:
            self._evaluations.run_if_due(self._step, epoch_steps=epoch_steps)
        if is_execution_end:
            self._first.on_train_batch_end(epoch_steps - 1)
            self._users.on_train_batch_end(epoch_steps - 1, self._logs)
        for save in self._saves:
            save.note(self._step)
        if not self._ends_epoch:
            self._save_or_stop(is_finished=False)

    def _end_epoch(self, epoch: int) -> dict:
        """End an epoch, and return its logs."""
        before, _ = self._agreements
        logs = _as_numbers(self._epoch_logs())
        with recorder.phase("callbacks"):
            for callback in self._first.callbacks:
                callback.on_epoch_end(epoch, logs)
            self._progress.end_epoch(logs)
            before.on_epoch_end(epoch)
        self._evaluate_epoch(epoch, logs)
        return logs

    @recorder.phase("callbacks")
    def _evaluate_epoch(self, epoch: int, logs: dict) -> None:
        """Evaluate, and let the user's callbacks end the epoch with the results."""
        _, after = self._agreements
        self._evaluations.end_epoch(epoch, self._step, logs, is_last=self._is_last)
        # If a stop has ended the evaluation, they end the epoch in the next run.
        if self._is_last or not self._evaluations.was_interrupted:
            for callback in self._users.callbacks:
                callback.on_epoch_end(epoch, logs)
        after.on_epoch_end(epoch)
        self._evaluations.end_callbacks(self._step, logs, is_last=self._is_last)
        self._session.history.on_epoch_end(epoch, logs)
        self._save_or_stop(is_finished=self._is_last)

    def _end_held_epoch(self, epoch: int) -> dict:
        """End an epoch in whose evaluation the run before was stopped.

        Its metrics are in the history, without what callbacks add to them.
        """
        self._progress.begin_epoch(epoch)
        history = self._session.history.history
        logs = {n: values.pop() for n, values in history.items() if len(values) > epoch}
        self._evaluate_epoch(epoch, logs)
        return logs

    def _end(self, logs: dict) -> None:
        before, after = self._agreements
        for callback in self._first.callbacks:
            callback.on_train_end(logs)
        self._progress.end()
        before.on_train_end()
        self._users.on_train_end(logs)
        after.on_train_end()

    @property
    def _is_last(self) -> bool:
        """Whether the training ends here; a callback may have ended it."""
        return self._step == self._plan.max_steps or self._model.stop_training

    @property
    def _ends_epoch(self) -> bool:
        return self._plan.is_epoch_end(self._step) or self._model.stop_training

    def _epoch_logs(self) -> dict:
        # As in `fit`: a `train_step` may return other logs than the model's metrics.
        results = self._model.get_metrics_result()
        return results if results.keys() == self._logs.keys() else self._logs

    def _save_or_stop(self, *, is_finished: bool) -> None:
        is_stopped = STOP in self._session.requests.agreed
        for save in self._saves:
            save.save_if_due(self._step, is_finished=is_finished, is_stopped=is_stopped)
        # A job whose last evaluation was interrupted has to continue.
        is_end = is_finished and not self._evaluations.was_interrupted
        if is_stopped and not is_end:
            self._stop()

    def _stop(self) -> NoReturn:
        # A launcher kills all ranks once one has ended with exit code 75, and so would
        # kill a chief that is still writing.
        complete_together(self._run.world, self._session.writer)
        raise_preempted(
            self._session.requests,
            self._run.world,
            step=self._step,
            max_steps=self._plan.max_steps,
        )

    def _make_header(self, step: int, is_finished: bool, logs: dict) -> Header:
        return self._session.make_header(
            step,
            is_finished,
            logs,
            evaluation_is_due=self._evaluations.was_interrupted,
        )


def _as_numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs as Keras passes them to callbacks: flat, with numbers as floats."""
    numbers: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        if isinstance(value, dict):
            numbers |= _as_numbers(value)
            continue
        if tf.is_tensor(value):
            is_bfloat16 = value.dtype == tf.bfloat16
            value = (tf.cast(value, tf.float32) if is_bfloat16 else value).numpy()
        with contextlib.suppress(TypeError, ValueError):
            value = float(value)
        numbers[name] = value
    return numbers
