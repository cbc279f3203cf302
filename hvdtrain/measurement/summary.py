"""The figures of a training, from the times of all its executions."""

import dataclasses
import statistics

from hvdtrain.measurement.figures import (
    StepTimes,
    median_ratio,
    median_split,
    split,
)


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
