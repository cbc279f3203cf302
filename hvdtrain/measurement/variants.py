"""Variants of a workload in alternating rounds."""

import dataclasses
import itertools
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Callable

import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import World, launchers
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.training.observers import metrics_text
from hvdtrain.training.progress import ProgressCallback

# Starts the processes of a job step in a job that may have run for long: it counts only
# where there is no other launcher.
_SCHEDULERS_PROCESS = "slurmstepd"


def memory():
    """Return the memory of this process, in bytes.

    `peak_resident` is the largest resident set so far. `proportional` is the resident
    set of now with each shared page divided by the processes that map it: it adds up
    over the ranks of a node.
    """
    found = {"peak_resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    try:
        lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:  # kernels before 4.14, and some containers
        return found
    sizes = dict(line.split(":", 1) for line in lines[1:])
    return {**found, "proportional": 1024 * int(sizes["Pss"].split()[0])}


def seconds_since_command():
    """Return the seconds since the start of the command that started this process.

    The command is the outermost launcher among the ancestors of this process, or this
    process if there is none. Where a launcher started this process through a daemon on
    another host, it is that daemon.
    """
    _, _, command_started = launchers.process(os.getpid())
    found = ""
    for name, _, started in launchers.ancestors():
        is_launcher = name in launchers.PROCESSES
        if is_launcher and not (found and name == _SCHEDULERS_PROCESS):
            found, command_started = name, started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - command_started


# Enough for tracing in the first, and for a guess of the others' time.
_WARM_UP_EXECUTIONS = 3
# The first execution of `fit` is not counted: it includes the iterator's creation.
_MIN_EXECUTIONS = 2
_MAX_EXECUTIONS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run a workload that is timed.

    Attributes:
        run: `run(executions)` returns the seconds of each execution.
        is_alone: only rank 0 runs it; the others are blocked in a collective.
    """

    run: Callable
    is_alone: bool = False


def warm_up(world, variants):
    """Trace each variant, and return how many executions take a second. A collective.

    Args:
        world: the `World`.
        variants: `Variant`s by name, the same names on all ranks.

    Returns:
        Executions per second by name, rank 0's on all ranks.
    """
    speeds = {}
    for name, variant in variants.items():
        seconds = _run(world, variant, _WARM_UP_EXECUTIONS)
        if seconds:
            speeds[name] = 1 / statistics.median(seconds[1:])
    return gather(world, speeds)[0]


def run_rounds(world, variants, speeds, *, rounds, seconds):
    """Run all variants in each round. A collective.

    The order is reversed in every other round: a drift of the machine's speed then
    cancels in differences of variants.

    Args:
        world: the `World`.
        variants: `Variant`s by name.
        speeds: executions per second by name.
        rounds: number of rounds.
        seconds: of each variant in each round, at least.

    Returns:
        By name, for each round, the list of the seconds of each execution on this
        rank; empty where it had none.
    """
    measured = {name: [] for name in variants}
    for number in range(rounds):
        names = list(variants)[:: -1 if number % 2 else 1]
        for name in names:
            count = _executions(speeds[name] * seconds)
            measured[name].append(_run(world, variants[name], count))
    return measured


def _executions(count):
    return min(_MAX_EXECUTIONS, max(_MIN_EXECUTIONS, round(count)))


def _run(world, variant, executions):
    """Run a variant, started on all ranks at once."""
    gather(world, None)
    with fail_together(world):
        if world.is_chief or not variant.is_alone:
            return variant.run(executions)
    return []


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
            seconds = seconds_since_command()
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
        options: the `BenchmarkOptions`.
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
        options: the `BenchmarkOptions`.
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
        options: the `BenchmarkOptions`.
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
        options: the `BenchmarkOptions`.
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
