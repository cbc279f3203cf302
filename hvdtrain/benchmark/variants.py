"""Variants of a workload, timed in alternating rounds.

A variant leaves out something that a training does. The figures are differences and
ratios of the times of two variants in one round.
"""

import dataclasses
import itertools
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import processes, training
from hvdtrain.benchmark.benchmark_options import BenchmarkOptions
from hvdtrain.benchmark.figures import Executions
from hvdtrain.benchmark.workloads import Workload
from hvdtrain.job import World, launchers
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.training.observers import metrics_text
from hvdtrain.training.progress import ProgressMeter

# The first execution traces; the others give an estimate of the time.
_WARM_UP_EXECUTIONS = 3
_MIN_EXECUTIONS = 2
_MAX_EXECUTIONS = 100_000
# The default of `hvdtrain.mnist`.
_CONSISTENCY_CHECK_STEPS = 1000
# Slurm starts the processes of a job step from this daemon, in a job that may have run
# for long: it counts as the command only where there is no other launcher.
_SLURM_STEP_DAEMON = "slurmstepd"

# The batches of the steps from the first number to the second.
InputFn = Callable[[int, int], tf.data.Dataset]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run a workload that is timed.

    Attributes:
        run: `run(executions)` returns the seconds of each execution.
        is_alone: only rank 0 runs it; the others are blocked in a collective.
    """

    run: Callable[[int], list[float]]
    is_alone: bool = False


def warm_up(world: World, variants: Mapping[str, Variant]) -> dict[str, float]:
    """Trace each variant, and return how many executions take a second. A collective.

    Args:
        variants: by name, with the same names on all ranks.

    Returns:
        Executions per second by name, rank 0's on all ranks: every rank then runs the
        same number of executions. With other numbers, collectives would deadlock.
    """
    speeds = {}
    for name, variant in variants.items():
        seconds = _run(world, variant, _WARM_UP_EXECUTIONS)
        if seconds:
            speeds[name] = 1 / statistics.median(seconds[1:])
    return gather(world, speeds)[0]


def run_rounds(
    world: World,
    variants: Mapping[str, Variant],
    speeds: Mapping[str, float],
    *,
    rounds: int,
    seconds: float,
) -> Executions:
    """Run all variants in each round. A collective.

    The order is reversed in every other round: a drift of the machine's speed then
    cancels in differences of variants.

    Args:
        speeds: executions per second by name.
        seconds: of each variant in each round, at least.

    Returns:
        By name, for each round, the list of the seconds of each execution on this
        rank; empty where it had none.
    """
    measured: Executions = {name: [] for name in variants}
    for number in range(rounds):
        names = list(variants)[:: -1 if number % 2 else 1]
        for name in names:
            count = max(_MIN_EXECUTIONS, round(speeds[name] * seconds))
            count = min(_MAX_EXECUTIONS, count)
            measured[name].append(_run(world, variants[name], count))
    return measured


def _run(world: World, variant: Variant, executions: int) -> list[float]:
    # A barrier: all ranks start at once.
    gather(world, None)
    with fail_together(world):
        if world.is_chief or not variant.is_alone:
            return variant.run(executions)
    return []


def training_variant(
    model: keras.Model,
    input_fn: InputFn,
    workload: Workload,
    options: BenchmarkOptions,
    world: World,
    *,
    callbacks: Iterable[keras.callbacks.Callback] = (),
) -> Variant:
    """Return the variant of `training.train_and_evaluate`: all that users get.

    Args:
        model: a compiled model whose optimizer is distributed.
        input_fn: see `training.TrainSpec`.
    """
    first = keras.tree.map_structure(lambda array: array[:1], workload.batch)
    sample = tf.data.Dataset.from_tensors(first)

    def run(executions: int) -> list[float]:
        timer = ExecutionTimer()
        check = hvd.callbacks.ConsistencyCheckCallback(_CONSISTENCY_CHECK_STEPS)
        spec = _train_spec(
            input_fn,
            (executions + 1) * options.steps_per_execution,
            options,
            callbacks=lambda plan: [check, *callbacks, timer],
        )
        # One sample: evaluation is not measured.
        evaluation = training.EvalSpec(input_fn=lambda: sample)
        training.train_and_evaluate(lambda: model, spec, evaluation, world=world)
        return timer.seconds

    return Variant(run=run)


def lone_training_variant(
    model: keras.Model, input_fn: InputFn, options: BenchmarkOptions
) -> Variant:
    """Return the variant of a training on rank 0, as one rank of one.

    It is `fit` with what `train_and_evaluate` does for one rank in each execution.
    `train_and_evaluate` itself would deadlock: it calls collectives of all ranks.

    Args:
        model: a compiled model whose optimizer is not distributed.
        input_fn: the input of one rank of one; see `training.TrainSpec`.
    """

    def callbacks(steps: int) -> list[keras.callbacks.Callback]:
        spec, size = _train_spec(input_fn, steps, options), options.batch_size
        plan = training.Plan.of(spec, global_batch_size=size)
        meter = ProgressMeter(model, plan, World(), ())
        return [
            keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: meter.begin_epoch(epoch),
                on_train_batch_end=lambda batch, logs: meter.read(batch + 1, logs),
            )
        ]

    return fit_variant(model, input_fn, options, callbacks=callbacks)


def _train_spec(
    input_fn: InputFn,
    steps: int,
    options: BenchmarkOptions,
    callbacks: Callable[[training.Plan], list[keras.callbacks.Callback]] | None = None,
) -> training.TrainSpec:
    return training.TrainSpec(
        input_fn=input_fn,
        max_steps=steps,
        pass_steps=steps,
        local_batch_size=options.batch_size,
        callbacks=callbacks,
        steps_per_execution=options.steps_per_execution,
    )


def fit_variant(
    model: keras.Model,
    input_fn: InputFn,
    options: BenchmarkOptions,
    *,
    callbacks: Callable[[int], Iterable[keras.callbacks.Callback]] = lambda steps: (),
) -> Variant:
    """Return the variant of Keras' `fit`; under a launcher on rank 0 alone.

    Args:
        model: a compiled model whose optimizer is not distributed.
        input_fn: see `training.TrainSpec`.
        callbacks: returns more Keras callbacks for a number of steps.
    """

    def run(executions: int) -> list[float]:
        timer = ExecutionTimer()
        steps = (executions + 1) * options.steps_per_execution
        model.steps_per_execution = options.steps_per_execution
        model.fit(
            input_fn(0, steps),
            steps_per_epoch=steps,
            callbacks=[*callbacks(steps), timer],
            shuffle=False,
            verbose=0,
        )
        return timer.seconds

    return Variant(run=run, is_alone=True)


def function_variant(
    model: keras.Model, batches: tf.data.Dataset, steps_per_execution: int
) -> Variant:
    """Return the variant that calls the compiled train function in a loop, not `fit`.

    Args:
        batches: endless.
    """

    def run(executions: int) -> list[float]:
        model.steps_per_execution = steps_per_execution
        # Keeps the function that an earlier `fit` has traced.
        model.make_train_function()
        iterator = iter(batches)
        ends = []
        for _ in range(executions + 1):
            logs = model.train_function(iterator)
            ends.append(time.perf_counter())
        # A GPU may still compute.
        keras.tree.map_structure(keras.ops.convert_to_numpy, logs)
        ends[-1] = time.perf_counter()
        return _differences(ends)

    return Variant(run=run)


class ExecutionTimer(keras.callbacks.Callback):
    """Times each execution of `fit` but the first, which creates the iterator."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._ends.append(self._clock())

    @property
    def seconds(self) -> list[float]:
        return _differences(self._ends)


def _differences(ends: Iterable[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(ends)]


class StartUpTimer(keras.callbacks.Callback):
    """Times the start-up: from the command to the end of the first execution of all.

    Attributes:
        figures: the `command` and the `seconds`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, str | float] = {}

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if not self.figures:
            command = launchers.launch().launcher or "python"
            seconds = seconds_since_command()
            self.figures = {"command": command, "seconds": seconds}


class StepLines(keras.callbacks.Callback):
    """Prints a line every so many steps of this training, over all its `fit`s.

    Loss and accuracy are of this rank, since the start of this `fit`.
    """

    def __init__(self, *, every_steps: int, steps_per_execution: int) -> None:
        super().__init__()
        self._every_steps = every_steps
        self._steps_per_execution = steps_per_execution
        self._steps = 0

    def on_train_batch_end(
        self, batch: int, logs: Mapping[str, float] | None = None
    ) -> None:
        lines_before = self._steps // self._every_steps
        self._steps += self._steps_per_execution
        if self._steps // self._every_steps > lines_before:
            metrics = {name: float(value) for name, value in (logs or {}).items()}
            print(f"step {self._steps}  {metrics_text(metrics)}", flush=True)


def seconds_since_command() -> float:
    """Return the seconds since the start of the command that started this process.

    The command is the outermost launcher among the ancestors of this process, or this
    process if there is none. If a launcher started this process through a daemon on
    another host, it is that daemon.
    """
    command = processes.read_stat(os.getpid())
    for _, stat in processes.read_ancestors():
        has_launcher = command.name in launchers.PROCESSES
        is_step = has_launcher and stat.name == _SLURM_STEP_DAEMON
        if stat.name in launchers.PROCESSES and not is_step:
            command = stat
    return command.age_seconds


def memory() -> dict[str, int]:
    """Return the memory of this process, in bytes.

    `peak_resident` is the largest resident set so far. `proportional` is the resident
    set of now with each shared page divided by the processes that map it: it adds up
    over the ranks of a node.
    """
    sizes = {"peak_resident": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    try:
        lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:  # kernels before 4.14, and some containers
        return sizes
    fields = dict(line.split(":", 1) for line in lines[1:])
    return {**sizes, "proportional": 1024 * int(fields["Pss"].split()[0])}
