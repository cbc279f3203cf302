"""Steps of a training: the batches of this rank, and functions that take steps."""

import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.step_variables import StepVariables
from hvdtrain.job import World
from hvdtrain.job.agreement import on_all
from hvdtrain.keras import compiled_gradients
from hvdtrain.native import recorder


class BatchReader:
    """Batches of this rank; the first one has been read on all ranks. A collective."""

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


def make_steps(
    model: keras.Model,
    batches: BatchReader,
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
    # The step reduces gradients, which XLA cannot: it compiles what is inside of it.
    step = tf.function(train_step, reduce_retracing=True)
    take = _compiled_steps(step, batches.iterator, is_one=steps_per_execution == 1)
    take = compiled_gradients.warning_of_own_step(model, take)
    return lambda steps: take(batches.take_first(), np.int32(steps))


def _take_eagerly(step: Callable, batches: BatchReader, steps: int) -> dict:
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
