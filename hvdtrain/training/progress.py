"""Progress of a training: speed, metrics over all ranks, and the check of the loss."""

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain import processes
from hvdtrain.checkpoint.snapshot import check_finite
from hvdtrain.events import Progress, RunEnd, RunStart, Straggler
from hvdtrain.job.world import SharedJobError, World
from hvdtrain.keras import Sum, allreduce
from hvdtrain.keras.learning_rates import rate_reader
from hvdtrain.keras.metrics import (
    Share,
    addends,
    are_sums,
    combined,
    is_result,
    local_states,
    metric_variables,
    results,
    warn_of_states,
)
from hvdtrain.keras.replication import get_process_set
from hvdtrain.keras.variables import optimizers_inside
from hvdtrain.native import recorder
from hvdtrain.training.due import REPORT, Requests, Votes
from hvdtrain.training.observers import notify, scalars
from hvdtrain.training.skipping import Skipping
from hvdtrain.training.specs import Plan
from hvdtrain.training.stragglers import RankTimes, column, find_straggler

_REPORT_SECONDS = 1.0
# Objects, since they are keys beside names of metrics, which may be any text.
_COMMUNICATION, _INPUT_WAIT, _TIMES = object(), object(), object()


def check_loss(loss: float, step: int) -> None:
    """Raise `SharedJobError` if `loss`, a mean over all ranks, is not finite."""
    if not math.isfinite(loss):
        raise SharedJobError(
            f"The loss became {loss} before step {step}: training has diverged. Lower "
            "the learning rate, or add a warm-up."
        )


class ProgressMeter:
    """Measures a training, and calls the observers on the chief about every second.

    A report combines the metrics of the ranks, which is a collective: all ranks report
    at the same steps, on which they vote. The chief asks for it. A loss that is not
    finite stops all ranks at one step.

    Args:
        skipping: by default nothing is left out.
        batch_before: samples of a step before `start_step`, by default as many.
        collective_seconds: returns the seconds that this rank has spent in collectives.
        input_seconds: returns the seconds in which it has waited for input.
        times: None to find no straggler.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: Plan,
        world: World,
        observers: Sequence[object],
        *,
        requests: Requests | None = None,
        votes: Votes | None = None,
        skipping: Skipping | None = None,
        start_step: int = 0,
        batch_before: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        collective_seconds: Callable[[], float] = recorder.seconds_in_collectives,
        input_seconds: Callable[[], float] = recorder.seconds_of_input_waits,
        times: RankTimes | None = None,
    ) -> None:
        self._model = model
        self._requests = requests or Requests()
        self._votes = votes or Votes(
            self._requests, plan, world, start_step=start_step, clock=clock
        )
        self._skipping = skipping or Skipping()
        self._start_step = start_step
        self._weight_before = (
            batch_before or plan.global_batch_size
        ) / plan.global_batch_size
        self._plan = plan
        self._world = world
        self._observers = observers
        self._clock = clock
        self._time = _EpochClock(clock)
        self._input = _EpochClock(input_seconds)
        self._collectives = _EpochClock(
            collective_seconds if world.size > 1 else lambda: math.nan
        )
        self._times = times
        self._hosts = [""] * world.size
        self._clocks = (self._time, self._input, self._collectives)
        self._first_steps: int | None = None
        self._steps = self._reported_steps = start_step
        self._first_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Seconds in the steps so far, without evaluations."""
        return self._time.total

    @property
    def samples_per_second(self) -> float:
        """Speed of all ranks, without the first execution, which contains tracing."""
        if self._first_steps is None:
            return 0.0
        speed = self._steps_per_second(self._first_steps, self._first_seconds)
        return speed * self._plan.global_batch_size

    def begin(self, start: RunStart) -> None:
        """Report the start of the run."""
        self._hosts = start.hosts
        age = processes.read_stat(os.getpid()).age_seconds
        start = dataclasses.replace(start, process_seconds=age)
        notify(self._observers, "on_start", start)

    def end(self) -> None:
        """Report the end of the training."""
        own = self._read_times()
        end = RunEnd(
            step=self._steps,
            evaluation_seconds=_seconds(own, "evaluation"),
            saving_seconds=_seconds(own, "saving"),
        )
        notify(self._observers, "on_end", end)

    def begin_epoch(self, epoch: int) -> None:
        """Start the clocks, and the means of an epoch."""
        self._epoch = epoch
        self._resume()
        # Steps and means of the last report; a mean covers the epoch so far.
        self._reported_means: tuple[float, Mapping[str, float]] | None = None
        self._recent = _RecentMetrics(self._model, self._world)
        self._skipping.begin_epoch()

    def end_epoch(self, logs: Mapping[str, Any]) -> None:
        """Stop the clock of input, and check weights that no loss checks."""
        # Before the evaluation, which waits for input of its own.
        self._input.read()
        if "loss" not in logs:
            # No loss shows a divergence, and metrics such as an accuracy stay finite:
            # read the weights. Once an epoch, since this takes long for large models.
            check_finite(self._model, self._world, self._steps)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave out the time from the last execution to the end of the block."""
        self._input.read()
        yield
        self._resume()

    def _resume(self) -> None:
        for clock in self._clocks:
            clock.resume()

    def read(self, step: int, logs: Mapping[str, Any]) -> None:
        """Read the clocks after `step` steps, vote, and report if all ranks agree.

        Called before anything else takes time. A collective.
        """
        self._steps = step
        # The clock of input is read in reports only: reading it takes longer than all
        # Python code of a short step.
        self._time.read()
        self._collectives.read()
        if self._first_steps is None:
            self._first_steps, self._first_seconds = self._steps, self._time.total
            self._input.read()
            self._read_times()
            self._note_report()
        elif self._world.is_chief and self._is_report_due():
            self._requests.ask(REPORT)
        self._votes(self._steps)
        if REPORT in self._requests.agreed or self._steps == self._plan.max_steps:
            self._report(scalars(logs))

    def _is_report_due(self) -> bool:
        # The first report comes soon: after the second execution.
        is_first = self._reported_steps == self._first_steps
        is_soon = is_first and self._steps > self._plan.execution(self._start_step)[1]
        return is_soon or self._clock() - self._reported_clock >= _REPORT_SECONDS

    def _report(self, logs: Mapping[str, float]) -> None:
        self._input.read()
        sent: dict[Any, float | np.ndarray] = {**self._since_report(logs)}
        sent |= self._recent.arrays(logs)
        sent[_COMMUNICATION] = self._share(self._collectives)
        sent[_INPUT_WAIT] = self._share(self._input)
        # A sum in which each rank fills its own row gathers them.
        own = self._read_times()
        rows = np.zeros((self._world.size, len(own)))
        rows[self._world.rank] = own
        sent[_TIMES] = rows
        # One reduction for all of them: the cost is latency.
        means = _averaged(sent, self._world)
        recent = {name: float(means[name]) for name in logs}
        recent |= self._recent.results(means)
        self._check(recent)
        if self._observers:
            progress = self._progress(recent, means, own)
            notify(self._observers, "on_progress", progress)
        self._note_report()

    def _read_times(self) -> np.ndarray:
        return self._times.read() if self._times else np.empty(0)

    def _find_straggler(self, rows: np.ndarray) -> Straggler | None:
        steps = self._steps - self._reported_steps
        # A run of a single execution has no times without its tracing.
        if not self._times or not steps:
            return None
        return find_straggler(rows, steps=steps, hosts=self._hosts)

    def _check(self, means: Mapping[str, float]) -> None:
        """Raise an error if the training has diverged. A collective."""
        if "loss" in means and not self._skipping.is_on:
            check_loss(means["loss"], self._steps)
        elif not all(map(math.isfinite, means.values())):
            # No loss was finite, or a `train_step` of the user's own returns none.
            # Training goes on as long as the weights are finite.
            check_finite(self._model, self._world, self._steps)

    def _note_report(self) -> None:
        self._reported_steps = self._steps
        self._reported_clock = self._clock()
        for clock in self._clocks:
            clock.reported = clock.total

    def _share(self, clock: "_EpochClock") -> float:
        """Return a clock's share of this rank's time since the last report."""
        # Without tracing, as in the speed, except in a run of a single execution.
        is_single = self._steps == self._reported_steps
        start, start_seconds = (
            (0.0, 0.0) if is_single else (clock.reported, self._time.reported)
        )
        return (clock.total - start) / (self._time.total - start_seconds)

    @functools.cached_property
    def _read_rate(self) -> Callable[[], float]:
        # Of a MultiOptimizer, the rate of the first of its optimizers.
        return rate_reader(optimizers_inside(self._model.optimizer)[0])

    def _progress(
        self, metrics: dict[str, float], means: Mapping[object, Any], own: np.ndarray
    ) -> Progress:
        plan = self._plan
        samples_left = (plan.max_steps - self._steps) * plan.global_batch_size
        speed = self._steps_per_second(self._reported_steps, self._time.reported)
        return Progress(
            step=self._steps,
            max_steps=plan.max_steps,
            epoch=self._epoch + 1,
            epochs=plan.epochs,
            metrics=metrics,
            learning_rate=self._read_rate(),
            communication=float(means[_COMMUNICATION]),
            input_wait=float(means[_INPUT_WAIT]),
            samples_per_second=speed * self._plan.global_batch_size,
            seconds_left=samples_left / self.samples_per_second,
            skipped_updates=self._skipping.count,
            straggler=self._find_straggler(means[_TIMES] * self._world.size),
            evaluation_seconds=_seconds(own, "evaluation"),
            saving_seconds=_seconds(own, "saving"),
        )

    def _steps_per_second(self, first_steps: int, first_seconds: float) -> float:
        steps, seconds = self._steps, self._time.total
        # A run of a single execution has no speed without its tracing.
        if steps == first_steps:
            return (steps - self._start_step) / seconds
        return (steps - first_steps) / (seconds - first_seconds)

    def _since_report(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Convert means since the start of the epoch to means since the last report."""
        first = self._plan.step(self._epoch)
        # Steps of an interrupted epoch may have had another number of samples.
        steps_before = max(0, self._start_step - first)
        count = self._steps - first + steps_before * (self._weight_before - 1)
        before, self._reported_means = self._reported_means, (count, means)
        if before is None:
            return means
        count_before, means_before = before
        return {
            name: (mean * count - means_before[name] * count_before)
            / (count - count_before)
            for name, mean in means.items()
        }


class _EpochClock:
    """Adds up the seconds of a clock within epochs, without the time between them.

    Attributes:
        total: seconds in all epochs, as of the last `read`.
        reported: `total` at the last report.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.total = self.reported = 0.0

    def resume(self) -> None:
        """Leave out the time since the last `read`."""
        self._start = self._clock() - self.total

    def read(self) -> None:
        self.total = self._clock() - self._start


class _RecentMetrics:
    """The results of metrics since the last report of an epoch, over all ranks.

    They are computed from differences of states. A state that is not known to be a sum,
    such as a maximum, has no difference: it counts since the epoch began.
    """

    def __init__(self, model: keras.Model, world: World) -> None:
        self._model = model
        self._process_set = get_process_set(model.optimizer) if world.size > 1 else None
        if self._process_set:
            self._share = Share(self._process_set.rank(), self._process_set.size())
        self._before: list[np.ndarray] | None = None

    def arrays(self, logs: Mapping[str, float]) -> dict[tuple, float | np.ndarray]:
        """Return the arrays by key whose means over the ranks `results` takes."""
        metrics = self._model.metrics
        variables = metric_variables(metrics)
        states = local_states(variables)
        own = results(metrics, states)
        arrays: dict[tuple, float | np.ndarray] = {
            (name, "is_result"): is_result(value, name, own)
            for name, value in logs.items()
        }
        before, self._before = self._before, states
        # A metric may make variables in its first update.
        if before is not None and len(before) == len(states):
            known = zip(states, before, are_sums(metrics), strict=True)
            states = [now - then if is_sum else now for now, then, is_sum in known]
        self._dtypes = [state.dtype for state in states]
        if self._process_set:
            states = addends(variables, states, self._share)
        return arrays | {("state", number): s for number, s in enumerate(states)}

    def results(self, means: Mapping[object, np.ndarray]) -> dict[str, float]:
        """Return the results that all ranks have logged, by name."""
        size = self._process_set.size() if self._process_set else 1
        totals = [
            _as_dtype(means["state", number] * size, dtype)
            for number, dtype in enumerate(self._dtypes)
        ]
        metrics = self._model.metrics
        if self._process_set:
            totals = combined(metric_variables(metrics), totals, size)
            if self._share.rank == 0:
                warn_of_states(metrics)
        recent = results(metrics, totals)
        return {
            n: float(v) for n, v in recent.items() if means.get((n, "is_result")) == 1
        }


def _seconds(row: np.ndarray, phase: str) -> float:
    return float(column(row, phase)) if row.size else math.nan


def _as_dtype(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    # A mean of integers, times the number of ranks, may be just below an integer.
    return (np.rint(value) if dtype.kind in "iu" else np.asarray(value)).astype(dtype)


def _averaged(values: Mapping[object, Any], world: World) -> Mapping[object, Any]:
    """Return the means of numbers and arrays over all ranks, in one reduction."""
    if world.size == 1:
        return values
    arrays = [np.asarray(value, "float64") for value in values.values()]
    sent = np.concatenate([array.ravel() for array in arrays])
    sums = allreduce(sent, name="Progress", op=Sum).numpy()
    flat = np.split(sums, np.cumsum([array.size for array in arrays])[:-1])
    return {
        key: total.reshape(array.shape) / world.size
        for key, total, array in zip(values, flat, arrays, strict=True)
    }
