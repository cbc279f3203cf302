"""The variants of a training that are timed, each as a `Variant`.

Every one runs the compiled train function of a Keras model, with more or less around
it, and returns the seconds of each execution, that is of each call of this function.
"""

import itertools
import time

import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import World, launchers
from hvdtrain.measurement import resources
from hvdtrain.measurement.variants import Variant
from hvdtrain.training.observers import metrics_text
from hvdtrain.training.progress import ProgressCallback

# As `hvdtrain.mnist` has it.
_CONSISTENCY_CHECK_STEPS = 1000


class Stopwatch(keras.callbacks.Callback):
    """Notes when each execution has ended.

    Args:
        clock: returns seconds.
    """

    def __init__(self, *, clock=time.perf_counter):
        super().__init__()
        self._clock = clock
        self.stamps = []

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time."""
        self.stamps.append(self._clock())

    @property
    def seconds(self):
        """Of each execution but the first, which creates the iterator."""
        return [end - start for start, end in itertools.pairwise(self.stamps)]


class StartUp(keras.callbacks.Callback):
    """Notes the time from the command to the end of the first execution of all."""

    def __init__(self):
        super().__init__()
        self.figures = {}

    def on_train_batch_end(self, batch, logs=None):
        """Notes the time once."""
        if not self.figures:
            command = launchers.launch().launcher or "python"
            seconds = resources.seconds_since_command()
            self.figures = {"command": command, "seconds": seconds}


class StepLines(keras.callbacks.Callback):
    """Prints a line every so many steps of this training, over all its `fit`s.

    Loss and accuracy are those of this rank since the start of this `fit`.

    Args:
        every_steps: steps between lines.
        steps_per_execution: steps of each execution.
    """

    def __init__(self, *, every_steps, steps_per_execution):
        super().__init__()
        self._every_steps = every_steps
        self._steps_per_execution = steps_per_execution
        self._steps = 0

    def on_train_batch_end(self, batch, logs=None):
        """Prints the line if it is due."""
        before = self._steps // self._every_steps
        self._steps += self._steps_per_execution
        if self._steps // self._every_steps > before:
            metrics = {name: float(value) for name, value in logs.items()}
            print(f"step {self._steps}  {metrics_text(metrics)}", flush=True)


def trained(model, input_fn, workload, options, world, *, callbacks=()):
    """Return the variant of `training.train_and_evaluate`: all that users get.

    Args:
        model: a compiled model whose optimizer is distributed.
        input_fn: see `training.TrainSpec`.
        workload: the `Workload`.
        options: the `Options`.
        world: the `World`.
        callbacks: more Keras callbacks.
    """
    sample = tf.data.Dataset.from_tensors(tuple(part[:1] for part in workload.batch))

    def run(executions):
        stopwatch = Stopwatch()
        steps = (executions + 1) * options.steps_per_execution
        check = hvd.callbacks.ConsistencyCheckCallback(_CONSISTENCY_CHECK_STEPS)
        spec = training.TrainSpec(
            input_fn=input_fn,
            max_steps=steps,
            pass_steps=steps,
            local_batch_size=options.batch_size,
            callbacks=lambda plan: [check, *callbacks, stopwatch],
            steps_per_execution=options.steps_per_execution,
        )
        # One sample: evaluation is not measured.
        evaluation = training.EvalSpec(input_fn=lambda: sample)
        training.train_and_evaluate(lambda: model, spec, evaluation, world=world)
        return stopwatch.seconds

    return Variant(run=run)


def trained_alone(model, input_fn, options):
    """Return the variant of one rank that trains as if it were alone, on rank 0.

    `train_and_evaluate` would call collectives, in which the other ranks do not take
    part. This is `fit` with what it does for one rank in each execution.

    Args:
        model: a compiled model whose optimizer is not distributed.
        input_fn: as in `trained`, for one rank of one.
        options: the `Options`.
    """

    def callbacks(steps):
        spec = training.TrainSpec(
            input_fn=input_fn,
            max_steps=steps,
            pass_steps=steps,
            local_batch_size=options.batch_size,
            steps_per_execution=options.steps_per_execution,
        )
        plan = training.Plan.of(spec)
        return [ProgressCallback(plan, options.batch_size, World(), ())]

    return fitted(model, input_fn, options, callbacks=callbacks)


def bare(model, workload, options):
    """Return the variant of Keras' `fit` with one batch and nothing of hvdtrain."""

    def input_fn(start_step, end_step):
        return workload.constant_batches().take(end_step - start_step)

    return fitted(model, input_fn, options)


def fitted(model, input_fn, options, *, callbacks=lambda steps: ()):
    """Return the variant of Keras' `fit`; under a launcher on rank 0 alone.

    Args:
        model: a compiled model whose optimizer is not distributed.
        input_fn: see `training.TrainSpec`.
        options: the `Options`.
        callbacks: returns more Keras callbacks for a number of steps.
    """

    def run(executions):
        stopwatch = Stopwatch()
        steps = (executions + 1) * options.steps_per_execution
        model.steps_per_execution = options.steps_per_execution
        model.fit(
            input_fn(0, steps),
            steps_per_epoch=steps,
            callbacks=[*callbacks(steps), stopwatch],
            shuffle=False,
            verbose=0,
        )
        return stopwatch.seconds

    return Variant(run=run, is_alone=True)


def called(model, batches, options, *, clock=time.perf_counter):
    """Return the variant that calls the compiled train function in a loop.

    Without `fit` and its callbacks.

    Args:
        model: a compiled model.
        batches: an endless `tf.data.Dataset`.
        options: the `Options`.
        clock: returns seconds.
    """

    def run(executions):
        model.steps_per_execution = options.steps_per_execution
        # Keeps the function that an earlier `fit` has traced.
        model.make_train_function()
        iterator = iter(batches)
        stamps = []
        for _ in range(executions + 1):
            logs = model.train_function(iterator)
            stamps.append(clock())
        # A GPU may still compute.
        keras.tree.map_structure(keras.ops.convert_to_numpy, logs)
        stamps[-1] = clock()
        return [end - start for start, end in itertools.pairwise(stamps)]

    return Variant(run=run)
