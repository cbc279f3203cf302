"""The loop of a training: epochs, executions and steps, from any step on.

Epochs and metrics begin and end as in Keras' `fit`. The model's `train_step`, metrics
and callbacks are called as Keras calls them.
"""

import re
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.job import JobError, World
from hvdtrain.job.world import SharedJobError
from hvdtrain.keras.learning_rates import rate_variable
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import optimizers_inside
from hvdtrain.native import recorder
from hvdtrain.training.checkpoint.step_variables import StepVariables
from hvdtrain.training.specs import Plan
from hvdtrain.training.steps import BatchReader, make_steps

# The error of `assert_cardinality`.
_EARLY_END = re.compile(r"expected to contain \d+ elements? but contained only (\d+)")


def train(
    model: keras.Model,
    batches: tf.data.Dataset,
    plan: Plan,
    *,
    world: World,
    start_step: int,
    stops: Callable[[int], int],
    step_variables: StepVariables,
    callbacks: Sequence[keras.callbacks.Callback],
) -> None:
    """Train from `start_step` to the end of the plan.

    The callbacks see a training in which batches are numbered as if it had not been
    interrupted.

    Args:
        batches: of the steps from `start_step` on.
        stops: `stops(step)` returns the next step at which an execution is split: a
            vote, a checkpoint or an evaluation is due there. Callbacks that have the
            attribute `acts_within_executions` are called after it.
        step_variables: finds the variables of the step when it is traced.

    Raises:
        JobError: the ranks hold different weights, the input has ended early, or a
            callback has compiled the model again.
    """
    steps = plan.max_steps - start_step
    # Without `take`, one batch more than asserted would be read, and be an error.
    batches = batches.take(steps)
    batches = batches.apply(tf.data.experimental.assert_cardinality(steps))
    iterator = iter(batches)
    recorder.set_step(start_step)
    try:
        loop = _Loop(
            model,
            plan,
            start_step=start_step,
            stops=stops,
            step_variables=step_variables,
            batches=BatchReader(iterator, world),
            callbacks=callbacks,
        )
        loop.run()
    except hvd.callbacks.DesynchronizedError as error:
        raise SharedJobError(str(error)) from None
    except tf.errors.OpError as error:
        if early_end := _EARLY_END.search(str(error)):
            raise JobError(
                f"Received {early_end[1]} batches from input_fn for the steps "
                f"{start_step} to {plan.max_steps}; expected one for each step: set "
                "TrainSpec.repeat, or lower max_steps."
            ) from None
        raise
    finally:
        model.train_function = None


class _Loop:
    """Calls callbacks, and takes the steps between them.

    Callbacks are called once in an execution, which may be split into several calls of
    the compiled function. Callbacks with the attribute `acts_within_executions` are
    called after each of these calls.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: Plan,
        *,
        start_step: int,
        stops: Callable[[int], int],
        step_variables: StepVariables,
        batches: BatchReader,
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        self._model = model
        self._plan = plan
        self._step = start_step
        self._stops = stops
        self._step_variables = step_variables
        self._batches = batches
        self._callbacks = keras.callbacks.CallbackList(
            callbacks,
            add_history=True,
            model=model,
            verbose=0,
            epochs=plan.epochs,
            steps=plan.fit_epoch_steps,
            steps_per_execution=plan.steps_per_execution,
        )
        self._within = [
            callback
            for callback in self._callbacks.callbacks
            if getattr(callback, "acts_within_executions", False)
        ]
        self._logs: dict = {}

    def run(self) -> None:
        """Train to the end of the plan, or until a callback ends the training."""
        model, plan = self._model, self._plan
        model.stop_training = False
        # `compile` removes it.
        replace(model, "train_function", self._take_steps, by=train)
        with recorder.phase("callbacks"):
            self._callbacks.on_train_begin()
        # After the callbacks, which may replace the model's `train_step`.
        self._steps = make_steps(
            model, self._batches, plan.steps_per_execution, self._step_variables
        )
        logs = None
        for epoch in range(self._step // plan.fit_epoch_steps, plan.epochs):
            self._begin_epoch(epoch)
            self._take_epoch(epoch)
            logs = self._end_epoch(epoch)
            if model.stop_training:
                break
        model.optimizer.finalize_variable_values(model.trainable_weights)
        self._callbacks.on_train_end(logs)

    def _begin_epoch(self, epoch: int) -> None:
        self._model.reset_metrics()
        # In an interrupted epoch, callbacks such as `LearningRateScheduler` have set
        # the learning rate before, and would now change it twice.
        is_continued = self._step > self._plan.step(epoch)
        rates = map(rate_variable, optimizers_inside(self._model.optimizer))
        variables = [rate for rate in rates if rate is not None]
        kept = [(v, v.numpy()) for v in variables] if is_continued else []
        with recorder.phase("callbacks"):
            self._callbacks.on_epoch_begin(epoch)
        for variable, value in kept:
            variable.assign(value)

    def _take_epoch(self, epoch: int) -> None:
        start, end = self._plan.step(epoch), self._plan.step(epoch + 1)
        while self._step < end:
            first, last = self._plan.execution(self._step)
            with recorder.phase("callbacks"):
                self._callbacks.on_train_batch_begin(first - start)
            self._check_train_function()
            self._take_execution(start, last)
            if self._model.stop_training:
                break

    def _take_execution(self, epoch_start: int, end: int) -> None:
        while self._step < end:
            self._logs = self._take_steps(min(self._stops(self._step), end))
            batch = self._step - epoch_start - 1
            with recorder.phase("callbacks"):
                if self._step == end:
                    self._callbacks.on_train_batch_end(batch, self._logs)
                else:
                    for callback in self._within:
                        callback.on_train_batch_end(batch, self._logs)
            if self._model.stop_training:
                break

    def _take_steps(self, end: int) -> dict:
        logs = self._steps(end - self._step)
        self._step = end
        return logs

    def _end_epoch(self, epoch: int) -> dict:
        logs = dict(self._epoch_logs())
        # Keras converts numbers of other dtypes.
        for name, value in logs.items():
            if tf.is_tensor(value) and value.dtype == tf.bfloat16:
                logs[name] = tf.cast(value, tf.float32).numpy().tolist()
        with recorder.phase("callbacks"):
            self._callbacks.on_epoch_end(epoch, logs)
        return logs

    def _epoch_logs(self) -> dict:
        # As in `fit`: a `train_step` may return other logs than the model's metrics.
        results = self._model.get_metrics_result()
        return results if results.keys() == self._logs.keys() else self._logs

    def _check_train_function(self) -> None:
        # A checkpoint restores what model_fn returns: a resumed job would differ.
        if self._model.train_function != self._take_steps:
            raise JobError(
                "Received a model that a callback has compiled again; expected the "
                "model that model_fn has compiled: compile it there."
            )
