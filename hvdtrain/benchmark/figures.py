"""Figures from measured times: pure functions of numbers."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from hvdtrain.benchmark.benchmark_options import BenchmarkOptions

PERCENTILES = (50, 90, 99)

# The seconds of each execution on one rank, by variant and then by round.
Executions = dict[str, list[list[float]]]
# The mean seconds of a step, by variant and then by round: a float, or None where the
# rank had no execution.
StepSeconds = dict[str, list[Any]]
# Figures as they stand in the JSON file.
Figures = dict[str, Any]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` % of `values` do not exceed.

    The nearest rank: always one of the measured values, no interpolation.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The distribution of the time of a step, in seconds.

    Executions are timed, not steps: each value is the time of an execution divided by
    its steps, which spreads the outlier of one step over all steps of its execution.

    Attributes:
        p90: 90 % of the executions take no longer per step.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    executions: int

    @classmethod
    def from_executions(
        cls, executions: Sequence[float], *, steps_per_execution: int
    ) -> "StepTimes":
        steps = [seconds / steps_per_execution for seconds in executions]
        p50, p90, p99 = (percentile(steps, percent) for percent in PERCENTILES)
        mean = statistics.fmean(steps)
        return cls(mean=mean, p50=p50, p90=p90, p99=p99, executions=len(steps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The parts of the time of a step, in seconds; they add up to `step`.

    Attributes:
        compute: forward and backward pass, update, metrics.
        communication: time that the reduction adds, including the wait for the slowest
            rank, but not the time that the backward pass hides.
        overhead: time of `fit`, its callbacks and the loop in Python.
        input_wait: time that the input pipeline adds over one batch in memory.
        step: all of it.
    """

    compute: float
    communication: float
    overhead: float
    input_wait: float
    step: float


def split(
    *, train: float, constant: float | None, function: float, local: float | None
) -> Split:
    """Return the `Split` of one round from the step times of its variants.

    Args:
        train: `fit` with the real input.
        constant: `fit` with one batch in memory; None if that is the real input.
        function: the compiled train function called in a loop, with that batch.
        local: the same loop, of the model without reduction; None with one rank.
    """
    constant = train if constant is None else constant
    local = function if local is None else local
    return Split(
        compute=local,
        communication=function - local,
        overhead=constant - function,
        input_wait=train - constant,
        step=train,
    )


def median_split(rounds: Sequence[Split]) -> Split:
    """Return the `Split` of the medians of each part over rounds.

    A difference is formed in each round, between neighbours in time, and then the
    median is taken: a slow phase of the machine changes both sides of a difference.
    Medians need not add up: `step` is the median of the steps.
    """
    names = [field.name for field in dataclasses.fields(Split)]
    return Split(
        **{
            name: statistics.median(getattr(parts, name) for parts in rounds)
            for name in names
        }
    )


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios of paired rounds."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(a / b for a, b in pairs)


def summarize(
    executions_by_rank: Sequence[Executions], options: BenchmarkOptions, count: int
) -> Figures:
    """Return the figures of a training from the times of its executions.

    Args:
        executions_by_rank: the results of `run_rounds` of each rank.
        count: number of ranks, or of devices in one process.
    """
    steps = options.steps_per_execution
    means_by_rank = [
        {
            name: [_mean(each_round, steps) for each_round in rounds]
            for name, rounds in executions.items()
        }
        for executions in executions_by_rank
    ]
    splits_by_rank = [_split_rounds(means) for means in means_by_rank]
    parts = median_split([each for splits in splits_by_rank for each in splits])
    samples = options.batch_size * count / len(executions_by_rank)
    speeds = [samples / statistics.median(means["train"]) for means in means_by_rank]
    train = [seconds for each in executions_by_rank[0]["train"] for seconds in each]
    times = StepTimes.from_executions(train, steps_per_execution=steps)
    return {
        "devices": count,
        "samples_per_second": sum(speeds),
        "samples_per_second_by_rank": speeds,
        "step_seconds": dataclasses.asdict(times),
        "split_seconds": dataclasses.asdict(parts),
        "one_rank": _compare_one_rank(means_by_rank[0], count, options),
        "load_balance": _load_balance(means_by_rank, parts, options),
        "rounds": {
            "step_seconds_by_rank": means_by_rank,
            "split_seconds": [dataclasses.asdict(each) for each in splits_by_rank[0]],
        },
    }


def _mean(executions: Sequence[float], steps: int) -> Any:
    return statistics.fmean(executions) / steps if executions else None


def _split_rounds(means: StepSeconds) -> list[Split]:
    """Return the `Split` of each round on one rank."""
    missing = [None] * len(means["train"])
    columns = {
        name: means.get(name, missing)
        for name in ("train", "constant", "function", "local")
    }
    return [
        split(**{name: column[i] for name, column in columns.items()})
        for i in range(len(missing))
    ]


def _compare_one_rank(
    means: StepSeconds, size: int, options: BenchmarkOptions
) -> Figures:
    """Return the comparison with one rank alone and with bare Keras.

    Args:
        means: of rank 0, which runs these variants.
        size: number of ranks.
    """
    alone = means.get("alone", means["train"])
    # With as many samples of each rank in the same time, `size` times the speed.
    speedup = size * median_ratio(alone, means["train"])
    bare = statistics.median(means["bare"])
    return {
        "samples_per_second": options.batch_size / statistics.median(alone),
        "bare_samples_per_second": options.batch_size / bare,
        "speedup": speedup,
        "efficiency": speedup / size,
        "against_bare": median_ratio(means["bare"], alone),
        "all_ranks_against_bare": size * median_ratio(means["bare"], means["train"]),
    }


def _load_balance(
    means_by_rank: Sequence[StepSeconds], parts: Split, options: BenchmarkOptions
) -> float:
    """Return the mean time that a rank or device computes, divided by the largest.

    The time of a rank is its step without reduction. The devices of one process share
    their threads and cannot be timed one by one: with `split`, the time that a step
    takes longer than a step of independent devices is work of the first device; with
    `mirrored`, all devices do the same work.
    """
    if options.strategy == "split":
        first = parts.compute + max(0.0, parts.communication)
        others = (options.devices - 1) * parts.compute
        return (first + others) / (options.devices * first)
    if len(means_by_rank) == 1:
        return 1.0
    busy = [statistics.median(means["local"]) for means in means_by_rank]
    return statistics.fmean(busy) / max(busy)
