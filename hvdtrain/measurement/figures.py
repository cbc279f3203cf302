"""Figures from measured times: pure functions of numbers."""

import dataclasses
import math
import statistics

PERCENTILES = (50, 90, 99)


def percentile(values, percent):
    """Return the smallest value that `percent` % of `values` do not exceed.

    The nearest rank: always one of the measured values, no interpolation.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The distribution of the time of a step, in seconds.

    Executions are timed, not steps: each value is the time of an execution divided by
    its steps, so that an outlier of one step is spread over those of its execution.

    Attributes:
        mean: of all executions.
        p50: median.
        p90: 90 % of the executions take no longer per step.
        p99: 99 % of them.
        executions: number of executions.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    executions: int

    @classmethod
    def of(cls, executions, *, steps_per_execution):
        """Return the distribution for a list of seconds of executions."""
        steps = [seconds / steps_per_execution for seconds in executions]
        p50, p90, p99 = (percentile(steps, percent) for percent in PERCENTILES)
        mean = statistics.fmean(steps)
        return cls(mean=mean, p50=p50, p90=p90, p99=p99, executions=len(steps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The parts of the time of a step, in seconds; they add up to `step`.

    Attributes:
        compute: forward and backward pass, update, metrics.
        communication: what the reduction adds, waiting for the slowest rank included;
            what the backward pass hides is not in it.
        overhead: of `fit`, its callbacks and the loop in Python.
        input_wait: what the input pipeline adds over one batch in memory.
        step: all of it.
    """

    compute: float
    communication: float
    overhead: float
    input_wait: float
    step: float


def split(*, train, constant, function, local):
    """Return the `Split` of one round from the step times of its variants.

    Args:
        train: `fit` with the real input.
        constant: `fit` with one batch in memory; None if that is the real input.
        function: the compiled train function called in a loop, with that batch.
        local: the same of the model without reduction; None with one rank.
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


def median_split(rounds):
    """Return the `Split` of the medians of each part over rounds.

    A difference is formed in each round, between neighbours in time, and then the
    median is taken: a slow phase of the machine changes both sides of a difference.
    Medians need not add up: `step` is the median of the steps.
    """
    names = [field.name for field in dataclasses.fields(Split)]
    return Split(
        **{
            name: statistics.median(getattr(each, name) for each in rounds)
            for name in names
        }
    )


def median_ratio(numerators, denominators):
    """Return the median of the ratios of paired rounds."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(a / b for a, b in pairs)


def summarize(by_rank, options, count):
    """Return the figures of a training from the times of its executions.

    Args:
        by_rank: the results of `run_rounds` of each rank.
        options: the `Options`.
        count: number of ranks, or of devices in one process.
    """
    steps = options.steps_per_execution
    # Of each rank, by variant and then by round.
    means = [
        {name: [_mean(each, steps) for each in found] for name, found in ranks.items()}
        for ranks in by_rank
    ]
    splits = [_splits(ranks) for ranks in means]
    parts = median_split([each for ranks in splits for each in ranks])
    samples = options.batch_size * count / len(by_rank)
    speeds = [samples / statistics.median(ranks["train"]) for ranks in means]
    pooled = [seconds for found in by_rank[0]["train"] for seconds in found]
    return {
        "devices": count,
        "samples_per_second": sum(speeds),
        "samples_per_second_by_rank": speeds,
        "step_seconds": dataclasses.asdict(
            StepTimes.of(pooled, steps_per_execution=steps)
        ),
        "split_seconds": dataclasses.asdict(parts),
        "one_rank": _one_rank(means[0], count, options),
        "load_balance": _load_balance(means, parts, options),
        "rounds": {
            "step_seconds_by_rank": means,
            "split_seconds": [dataclasses.asdict(each) for each in splits[0]],
        },
    }


def _mean(executions, steps):
    return statistics.fmean(executions) / steps if executions else None


def _splits(means):
    """Return the `Split` of each round on one rank."""
    count = len(means["train"])
    columns = {
        name: means.get(name, [None] * count)
        for name in ("train", "constant", "function", "local")
    }
    return [
        split(**{name: column[i] for name, column in columns.items()})
        for i in range(count)
    ]


def _one_rank(means, size, options):
    """Return the comparison with one rank alone and with bare Keras.

    Args:
        means: rank 0's seconds of a step, by variant and round.
        size: number of ranks.
        options: the `Options`.
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


def _load_balance(means, parts, options):
    """Return the mean time that a rank or device computes, divided by the largest.

    Ranks: the steps without reduction. In one process the devices share their threads
    and cannot be timed one by one. With `split`, what a step takes longer than that of
    independent devices is work of the first one; with `mirrored` all do the same.

    Args:
        means: seconds of a step by rank, variant and round.
        parts: the median `Split`.
        options: the `Options`.
    """
    if options.strategy == "split":
        first = parts.compute + max(0.0, parts.communication)
        others = (options.devices - 1) * parts.compute
        return (first + others) / (options.devices * first)
    if len(means) == 1:
        return 1.0
    busy = [statistics.median(ranks["local"]) for ranks in means]
    return statistics.fmean(busy) / max(busy)
