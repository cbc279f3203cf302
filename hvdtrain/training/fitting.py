"""Keras' `fit`, from any step on."""

import functools
import re
import warnings
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import on_all
from hvdtrain.job.world import SharedJobError
from hvdtrain.keras.learning_rates import rate_variable
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import optimizers_inside
from hvdtrain.native import recorder
from hvdtrain.training.checkpoint.step_variables import StepVariables
from hvdtrain.training.specs import Plan

# The error of `assert_cardinality`.
_EARLY_END = re.compile(r"expected to contain \d+ elements? but contained only (\d+)")


def fit(
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
    """Train from `start_step` to the end of the plan, by one call of Keras' `fit`.

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
        training = _Training(
            callbacks,
            model=model,
            plan=plan,
            start_step=start_step,
            stops=stops,
            step_variables=step_variables,
            batches=_Batches(iterator, world),
        )
        replace(model, "train_function", training.train_function, by=fit)
        with warnings.catch_warnings():
            # A StopIteration ends an epoch.
            warnings.filterwarnings("ignore", message="Your input ran out of data")
            model.fit(
                _calls(plan),
                initial_epoch=start_step // plan.fit_epoch_steps,
                epochs=plan.epochs,
                callbacks=training,
                shuffle=False,
                verbose=0,
            )
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


def _calls(plan: Plan) -> tf.data.Dataset:
    """Return the dataset that `fit` iterates over; it has more elements than calls.

    The number of calls of an epoch is not known before: a StopIteration that
    `train_function` raises ends it. Keras then makes a new iterator, so this cannot be
    the dataset of the batches, which would start again.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.range(plan.max_steps + 1).with_options(options)


class _Batches:
    """Batches, the first of which has been read on all ranks. A collective."""

    def __init__(self, iterator: tf.data.Iterator, world: World) -> None:
        self.iterator = iterator
        self._none = tf.experimental.Optional.empty(iterator.element_spec)
        # A rank that skips the batches of earlier steps may take long: `on_all` has no
        # limit of time, and a step does.
        self._first = on_all(
            world, iterator.get_next_as_optional, name="the first batch of input_fn"
        )

    def take_first(self) -> tf.experimental.Optional:
        """Return the first batch once, then none: it must not stay in memory."""
        first, self._first = self._first, self._none
        return first


def _steps_function(
    model: keras.Model,
    batches: _Batches,
    steps_per_execution: int,
    step_variables: StepVariables,
) -> Callable[[int], dict]:
    """Return a function that takes a number of steps, and returns the last logs."""

    # AutoGraph would convert the whole package, which has no need of it.
    @tf.autograph.experimental.do_not_convert
    def train_step(batch: tuple) -> dict:
        logs = model.train_step(batch)
        step_variables.note_graph()
        return logs

    if model.run_eagerly:
        # A trace repeats the side effects of the step in Python.
        if step_variables.are_stored:
            step_variables.trace(model)
        return functools.partial(_take_eagerly, train_step, batches)
    step = tf.function(train_step, reduce_retracing=True, jit_compile=model.jit_compile)
    take = _compiled_steps(step, batches.iterator, is_one=steps_per_execution == 1)
    return lambda steps: take(batches.take_first(), np.int32(steps))


def _take_eagerly(step: Callable, batches: _Batches, steps: int) -> dict:
    for _ in range(steps):
        first = batches.take_first()
        recorder.mark_phase("input", begins_step=True)
        batch = first.get_value() if first.has_value() else next(batches.iterator)
        recorder.mark_phase("compute")
        logs = step(batch)
    return logs


def _compiled_steps(
    step: tf.types.experimental.PolymorphicFunction,
    iterator: tf.data.Iterator,
    *,
    is_one: bool,
) -> Callable[[tf.experimental.Optional, np.int32], dict]:
    """Return a compiled function of an optional first batch and a number of steps.

    One graph loops over any number of steps, so that the bits of a step do not depend
    on how many are taken together. Keras' own function unrolls a constant number, and
    each graph may be optimized differently. If the number is always 1 (`is_one`), the
    graph has no loop.
    """

    def next_batch(
        first: tf.experimental.Optional, is_first: bool | tf.Tensor
    ) -> tf.Tensor | tuple:
        is_first = tf.logical_and(is_first, first.has_value())
        with tf.control_dependencies(recorder.mark_phase("input", begins_step=True)):
            batch = tf.cond(is_first, first.get_value, iterator.get_next)
        # The step does not wait for this operation, which would lengthen it.
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            recorder.mark_phase("compute")
        return batch

    @tf.function(autograph=False)
    def one_step(first: tf.experimental.Optional, steps: tf.Tensor) -> dict:
        del steps
        return step(next_batch(first, True))

    @tf.function(autograph=False)
    def several_steps(first: tf.experimental.Optional, steps: tf.Tensor) -> dict:
        logs = step.get_concrete_function(iterator.element_spec).structured_outputs
        specs = tf.nest.flatten(logs, expand_composites=True)

        def body(done: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, ...]:
            new_logs = step(next_batch(first, tf.equal(done, 0)))
            return done + 1, *tf.nest.flatten(new_logs, expand_composites=True)

        _, *flat_logs = tf.while_loop(
            lambda done, *_: done < steps,
            body,
            # Logs have no value before the first step; the loop takes one or more.
            [tf.constant(0), *map(_zeros, specs)],
            shape_invariants=[tf.TensorShape([]), *[spec.shape for spec in specs]],
        )
        return tf.nest.pack_sequence_as(logs, flat_logs, expand_composites=True)

    return one_step if is_one else several_steps


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    """Return a tensor of this spec; unknown dimensions are zero."""
    return tf.zeros([size or 0 for size in spec.shape.as_list()], spec.dtype)


class _Training(keras.callbacks.CallbackList):
    """The callbacks of a training, and the steps between them.

    Callbacks are called once in an execution, which may take several calls of the
    compiled function. Callbacks with the attribute `acts_within_executions` are called
    after each of these calls.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        model: keras.Model,
        plan: Plan,
        start_step: int,
        stops: Callable[[int], int],
        step_variables: StepVariables,
        batches: _Batches,
    ) -> None:
        super().__init__(
            callbacks,
            add_history=True,
            model=model,
            verbose=0,
            epochs=plan.epochs,
            steps=plan.fit_epoch_steps,
            steps_per_execution=plan.steps_per_execution,
        )
        self._plan = plan
        self._step = start_step
        self._is_continued = start_step % plan.fit_epoch_steps > 0
        # Steps before and after the current execution.
        self._execution = (start_step, start_step)
        self._stops = stops
        self._step_variables = step_variables
        self._batches = batches
        self._within = [
            callback
            for callback in self.callbacks
            if getattr(callback, "acts_within_executions", False)
        ]

    def train_function(self, calls: tf.data.Iterator) -> dict:
        """Take steps to the end of the execution, or to an earlier stop."""
        del calls
        if self._step == self._epoch_end:
            raise StopIteration
        end = min(self._stops(self._step), self._execution[1])
        logs = self._take_steps(end - self._step)
        self._step = end
        return logs

    @recorder.phase("callbacks")
    def on_train_begin(self, logs: dict | None = None) -> None:
        super().on_train_begin(logs)
        # After the callbacks, which may replace the model's `train_step`.
        self._take_steps = _steps_function(
            self.model,
            self._batches,
            self._plan.steps_per_execution,
            self._step_variables,
        )

    @recorder.phase("callbacks")
    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        # Keras converts numbers of other dtypes.
        for name, value in (logs or {}).items():
            if logs and tf.is_tensor(value) and value.dtype == tf.bfloat16:
                logs[name] = tf.cast(value, tf.float32).numpy().tolist()
        super().on_epoch_end(epoch, logs)

    @recorder.phase("callbacks")
    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch_start = self._plan.step(epoch)
        self._epoch_end = self._plan.step(epoch + 1)
        # In an interrupted epoch, callbacks such as `LearningRateScheduler` have set
        # the learning rate before, and would now change it twice.
        rates = map(rate_variable, optimizers_inside(self.model.optimizer))
        variables = [rate for rate in rates if rate is not None]
        kept = [(v, v.numpy()) for v in variables] if self._is_continued else []
        self._is_continued = False
        super().on_epoch_begin(epoch, logs)
        for variable, value in kept:
            variable.assign(value)

    @recorder.phase("callbacks")
    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Call the callbacks at the beginning of an execution only."""
        execution = self._plan.execution(self._step)
        if self._step < self._epoch_end and execution != self._execution:
            self._execution = execution
            super().on_train_batch_begin(execution[0] - self._epoch_start, logs)
            self._check_train_function()

    def _check_train_function(self) -> None:
        # A checkpoint restores what model_fn returns: a resumed job would differ.
        if self.model.train_function != self.train_function:
            raise JobError(
                "Received a model that a callback has compiled again; expected the "
                "model that model_fn has compiled: compile it there."
            )

    @recorder.phase("callbacks")
    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        # Keras counts calls of `train_function`, and callbacks count batches.
        batch = self._step - self._epoch_start - 1
        if self._step == self._execution[1]:
            super().on_train_batch_end(batch, logs)
        else:
            for callback in self._within:
                callback.on_train_batch_end(batch, logs)
