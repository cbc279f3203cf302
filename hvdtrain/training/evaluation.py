"""Evaluation over the whole test set, of which each rank has some samples."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from hvdtrain.checkpoint.restoring import Start
from hvdtrain.checkpoint.step_variables import StepVariables
from hvdtrain.job.world import SharedJobError, World
from hvdtrain.keras import Sum, allreduce, metrics
from hvdtrain.keras.moving_statistics import (
    average_moving_statistics,
    share_undeclared_weights,
)
from hvdtrain.keras.replication import finalize_weights, get_process_set
from hvdtrain.keras.variables import optimizers_inside
from hvdtrain.native import recorder
from hvdtrain.training.building import check_no_distribution
from hvdtrain.training.due import (
    MAX_GROWTH,
    NAMES,
    STOP,
    Interval,
    Requests,
    agree_on_pause,
    raise_preempted,
)
from hvdtrain.training.exporting import Evaluation, Exports
from hvdtrain.training.observers import notify, scalars
from hvdtrain.training.progress import check_loss
from hvdtrain.training.specs import EvalSpec, Plan


def evaluate(
    model: keras.Model,
    batches: tf.data.Dataset,
    *,
    steps: int | None = None,
    rounds: "Rounds | None" = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> dict:
    """Return the model's metrics over the samples of all ranks, by name.

    Args:
        model: a compiled model, the same on all ranks; with `rounds`, its
            `steps_per_execution` is 1.
        batches: of this rank's samples; ranks may have different numbers of them.
        steps: batches that are evaluated, None for all.
        rounds: the ranks vote in these on a request to stop; by default they do not.
        callbacks: of a training of the model; their `on_test_` methods are called.

    Raises:
        SharedJobError: on all ranks, if no rank has a sample.
        InterruptedEvaluationError: on all ranks, if one of them has asked for a stop.
    """
    check_no_distribution()
    count = itertools.count()
    counter = keras.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: next(count)
    )
    called = [counter, *callbacks]
    if rounds:
        rounds.set_model(model)
        called.append(rounds)
    # Keras would give the callbacks of a plain list other `params` than `fit` has.
    all_callbacks = keras.callbacks.CallbackList(called)
    model.evaluate(batches, steps=steps, verbose=0, callbacks=all_callbacks)
    if rounds:
        rounds.end()
    if not int(allreduce(next(count), name="EvaluatedBatches", op=Sum)):
        raise SharedJobError(
            "Received no sample to evaluate on any rank; expected a test set."
        )
    process_set = get_process_set(model.optimizer)
    return metrics.reduce_metrics(model.metrics, process_set=process_set)


class InterruptedEvaluationError(Exception):
    """A rank has asked for a stop during an evaluation."""


class Rounds(keras.callbacks.Callback):
    """Votes on a request to stop, during an evaluation.

    Ranks may have different numbers of batches. They vote after equal numbers, about
    once in a second. A rank without more batches votes with the others until all are
    done, since they would block in a vote without it.
    """

    def __init__(self, requests: Requests, world: World) -> None:
        super().__init__()
        self._requests = requests
        self._world = world
        self._batches = self._last_batches = 0
        self._next, self._pause = 1, 1
        self._last_seconds = time.monotonic()
        self._is_stopped = self._is_done = False

    def on_test_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._batches += 1
        if self._batches == self._next:
            self._vote(is_done=False)
            self.model.stop_evaluating = self._is_stopped

    def end(self) -> None:
        """Vote until all ranks are done, or raise `InterruptedEvaluationError`."""
        while not (self._is_stopped or self._is_done):
            self._vote(is_done=True)
        if self._is_stopped:
            raise InterruptedEvaluationError

    def _vote(self, *, is_done: bool) -> None:
        # Checkpoints and reports that are due have to wait for the next step.
        is_asked = self._requests.votes()[NAMES.index(STOP)]
        self._pause, (stops, done) = agree_on_pause(
            self._world, self._next_pause(is_done), [is_asked, is_done], name="Rounds"
        )
        self._is_stopped, self._is_done = stops > 0, done == self._world.size
        self._next += self._pause

    def _next_pause(self, is_done: bool) -> int:
        now, batches = time.monotonic(), self._batches - self._last_batches
        seconds = max(now - self._last_seconds, 1e-9)
        self._last_seconds, self._last_batches = now, self._batches
        # A chief that is done cannot measure the speed of the others.
        if is_done:
            return self._pause
        return max(1, min(int(batches / seconds), MAX_GROWTH * self._pause))


def evaluate_finished(
    model: keras.Model,
    spec: EvalSpec,
    requests: Requests,
    world: World,
    *,
    step: int,
    max_steps: int,
) -> dict:
    """Return the metrics of a finished job that lacks its last evaluation.

    Raises:
        PreemptedError: on all ranks, if one of them has asked for a stop. The
            evaluation stays due.
        SharedJobError: on all ranks, if the loss is not finite.
    """
    try:
        with evaluated_weights(model, steps=None):
            results = _evaluate_spec(model, spec, requests, world)
    except InterruptedEvaluationError:
        raise_preempted(requests, world, step=step, max_steps=max_steps)
    if "loss" in results:
        check_loss(results["loss"], step)
    return results


def _evaluate_spec(
    model: keras.Model,
    spec: EvalSpec,
    requests: Requests,
    world: World,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> dict:
    """Return the metrics, by name; none where the spec has no input."""
    batches = spec.batches()
    if batches is None:
        return {}
    rounds = Rounds(requests, world)
    return evaluate(
        model, batches, steps=spec.steps, rounds=rounds, callbacks=callbacks
    )


@contextlib.contextmanager
def evaluated_weights(
    model: keras.Model, *, steps: int | None, unlisted: Sequence[tf.Variable] = ()
) -> Iterator[None]:
    """Give the model the weights that are evaluated and exported. A collective.

    In the block, moving statistics are averaged over the ranks, and each weight is its
    moving average if the optimizer keeps one (`use_ema`). At its end weights, moving
    statistics, the metrics of the epoch and `unlisted` variables of the training step
    are restored. The moving statistics were
    equal on all ranks `steps` steps ago (see `average_moving_statistics`).
    """
    # A copy of all weights may not fit in memory: large tables. `variables` and
    # `non_trainable_variables` have the seeds of random layers, some of which draw in
    # evaluations, too: training must continue with the seeds from before.
    is_finalized = any(map(_finalizes_weights, optimizers_inside(model.optimizer)))
    changed = model.variables if is_finalized else model.non_trainable_variables
    variables = [*changed, *metrics.metric_variables(model.metrics), *unlisted]
    with kept_values(variables):
        average_moving_statistics(model, steps=steps)
        share_undeclared_weights(model)
        finalize_weights(model)
        yield


def _finalizes_weights(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return whether the optimizer may assign to weights at the end of a `fit`."""
    inherited = keras.optimizers.Optimizer.finalize_variable_values
    own = type(optimizer).finalize_variable_values
    return getattr(optimizer, "use_ema", False) or own is not inherited


@contextlib.contextmanager
def kept_values(variables: Sequence[keras.Variable | tf.Variable]) -> Iterator[None]:
    """Put back the values of variables at the end of the block."""
    before = metrics.local_states(variables)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


class Evaluations:
    """Evaluates over all ranks when it is due, and at the end of the training.

    Args:
        is_due: by steps or seconds; at ends of epochs, the spec decides.
        results: the evaluations of the job, to which this appends.
        exports: None without exporters, and on other ranks than the chief.
        left_out: returns a context in which time is not counted as training.
        start: of the run; the evaluation in which the one before was stopped is due.
        step_variables: training continues with their values from before.
        callbacks: the user's.
        save: `save(step, logs)` writes a checkpoint before the last evaluation; None
            without checkpoints.

    Attributes:
        was_interrupted: whether a request to stop has ended an evaluation, which is
            then still due.
        holds_epoch_end: whether the run before was stopped in the evaluation at the
            end of an epoch, before the user's callbacks ended this epoch.
    """

    def __init__(
        self,
        model: keras.Model,
        spec: EvalSpec,
        plan: Plan,
        is_due: Interval,
        observers: Sequence,
        *,
        results: list[Evaluation],
        exports: Exports | None,
        left_out: Callable[[], contextlib.AbstractContextManager[None]],
        requests: Requests,
        world: World,
        start: Start,
        step_variables: StepVariables,
        callbacks: Sequence[keras.callbacks.Callback],
        save: Callable[[int, dict], None] | None,
    ) -> None:
        self._model = model
        self._spec = spec
        self._plan = plan
        self._is_due = is_due
        self._observers = observers
        self._results = results
        self._exports = exports
        self._left_out = left_out
        self._requests = requests
        self._world = world
        was_stopped = start.header.evaluation_is_due
        # A job that has finished has also ended its last epoch.
        is_held = plan.is_epoch_end(start.step) and not start.header.finished
        self.holds_epoch_end = was_stopped and is_held
        self._due_step = start.step if was_stopped and not is_held else None
        self._step_variables = step_variables
        self._callbacks = callbacks
        self._save = save
        self.was_interrupted = False
        self._is_pending, self._has_ended = self.holds_epoch_end, False
        self._test_logs: dict[str, float] = {}

    def run_interrupted(self, epoch: int) -> None:
        """Run the evaluation in which the last run was stopped, if there is one.

        Called before a step changes the weights.
        """
        if self._due_step is not None:
            step, self._due_step = self._due_step, None
            self._run(step, steps=step - self._plan.step(epoch) or None)

    def note(self, step: int) -> None:
        """Note whether an evaluation is due after `step` steps.

        It is kept until the end of the epoch if the step ends it.
        """
        self._is_pending |= self._is_due(step)

    def run_if_due(self, step: int, *, epoch_steps: int) -> None:
        """Evaluate within an epoch, `epoch_steps` steps after its begin."""
        if self._is_pending:
            self._run(step, steps=epoch_steps)

    def end_epoch(self, epoch: int, step: int, logs: dict, *, is_last: bool) -> None:
        """Evaluate at the end of an epoch if it is due, or the last one.

        The results of the epoch's last evaluation are added to the logs for the user's
        callbacks, with the prefix `val_`.
        """
        every = self._spec.every_epochs
        if is_last:
            self._end(step, logs)
        elif self._is_pending or (every and (epoch + 1) % every == 0):
            self._run(step, steps=None)
        # A job that continues within an epoch has its evaluations from the checkpoint.
        self._test_logs = {}
        if self._results and self._results[-1]["step"] > self._plan.step(epoch):
            numbers = scalars(self._results[-1]["metrics"])
            self._test_logs = {f"val_{name}": value for name, value in numbers.items()}
        logs.update(self._test_logs)

    def end_callbacks(self, step: int, logs: dict, *, is_last: bool) -> None:
        """Evaluate if a callback has ended the training after `end_epoch`.

        Remove test metrics from the logs: the history of a job has training metrics.
        """
        for name in self._test_logs:
            logs.pop(name, None)
        if is_last and not self._has_ended:
            self._end(step, logs)

    def _end(self, step: int, logs: dict) -> None:
        self._has_ended = True
        if self._save:
            # `input_fn` and exporters are user code: if they fail, the training that
            # is complete must not be lost.
            self._save(step, logs)
        # At the end of an epoch the moving statistics are equal already.
        self._run(step, steps=None, is_end=True)

    @recorder.phase("evaluation")
    def _run(self, step: int, *, steps: int | None, is_end: bool = False) -> None:
        self._is_pending = False
        unlisted = self._step_variables.unlisted(self._model)
        with (
            self._left_out(),
            evaluated_weights(self._model, steps=steps, unlisted=unlisted),
        ):
            if not self._results or self._results[-1]["step"] != step:
                try:
                    self._evaluate(step, is_end)
                except InterruptedEvaluationError:
                    # Raised on all ranks, so no vote is needed: the loop saves, and
                    # ends the run.
                    self.was_interrupted = True
                    self._requests.agreed |= {STOP}
            elif self._exports:
                # The training ends where it was just evaluated.
                self._exports.write_missing(self._model, self._results)

    def _evaluate(self, step: int, is_end: bool) -> None:
        results = _evaluate_spec(
            self._model, self._spec, self._requests, self._world, self._callbacks
        )
        # The loss of a training step is computed before its update: if an update of the
        # last steps has broken the weights, no training loss shows it.
        if "loss" in results:
            check_loss(results["loss"], step)
        self._results.append({"step": step, "metrics": results})
        if self._spec.input_fn:
            notify(self._observers, "on_evaluation", step, scalars(results))
        if self._exports:
            self._exports.write(self._model, self._results, is_last=is_end)
