"""Kinds of parallelism beside each other: memory, bytes and time of a step."""

import math
import statistics

import numpy as np
import tensorflow as tf

from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.measurement import variants
from hvdtrain.measurement.figures import median_ratio
from hvdtrain.measurement.parallel_workloads import BATCHES, WORKLOADS
from hvdtrain.measurement.sent_bytes import count_bytes

DENSE = "replicated"


def measure(options, world):
    """Measure the kinds of parallelism of a workload. A collective.

    Args:
        options: the `BenchmarkOptions`, with defaults.
        world: the `World`.

    Returns:
        By kind, "replicated" first, a dict for JSON, the same on all ranks;
        docs/benchmark.md describes it.
    """
    workload = WORKLOADS[options.workload]
    found, runs = {}, {}
    for name, kind in workload.kinds.items():
        if world.size > kind.most_ranks:
            continue
        with fail_together(world):
            model = kind.build(options)
            batches = _batches(workload, kind, options, world)
            found[name] = _first_steps(model, batches, options) | _memory(model)
        runs[name] = variants.called(model, batches, options)
    speeds = variants.warm_up(world, runs)
    measured = variants.run_rounds(
        world, runs, speeds, rounds=options.rounds, seconds=options.seconds
    )
    for name, executions in measured.items():
        found[name]["step_seconds"] = [
            statistics.fmean(each) / options.steps_per_execution for each in executions
        ]
    return summarize(gather(world, found))


def summarize(by_rank):
    """Return the figures of each kind from those of each rank.

    Args:
        by_rank: for each rank, by kind, a dict of `weight_bytes` and `slot_bytes`, the
            `sent_bytes` of a step, the `loss`, and for each round the `step_seconds`.

    Returns:
        By kind, a dict of these, by rank with the ending `_by_rank`; of the mean
        `loss`; of the median `step_seconds`, of the slowest rank in each round; and of
        the largest memory and bytes of a rank, and the time, `against_replicated`.
    """
    return {name: _of_kind(by_rank, name) for name in by_rank[0]}


def _of_kind(by_rank, name):
    ranks = [each[name] for each in by_rank]
    keys = ("weight_bytes", "slot_bytes", "sent_bytes")
    seconds = _slowest(by_rank, name)
    return {
        **{f"{key}_by_rank": [rank[key] for rank in ranks] for key in keys},
        "loss": statistics.fmean(rank["loss"] for rank in ranks),
        "step_seconds": statistics.median(seconds),
        "rounds": seconds,
        "against_replicated": {
            "memory": _largest(by_rank, name, *keys[:2])
            / _largest(by_rank, DENSE, *keys[:2]),
            "sent_bytes": _largest(by_rank, name, keys[2])
            / _largest(by_rank, DENSE, keys[2]),
            "step_seconds": median_ratio(seconds, _slowest(by_rank, DENSE)),
        },
    }


def _largest(by_rank, name, *keys):
    return max(sum(rank[name][key] for key in keys) for rank in by_rank)


def _slowest(by_rank, name):
    """Return the seconds of a step in each round, of the slowest rank."""
    times = [rank[name]["step_seconds"] for rank in by_rank]
    return [max(each) for each in zip(*times, strict=True)]


def _batches(workload, kind, options, world):
    """Return an endless `tf.data.Dataset` of a rank's batches."""
    ranks = range(world.size) if kind.shares_samples else [world.rank]
    parts = [workload.samples(options, rank) for rank in ranks]
    arrays = tuple(np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    return tf.data.Dataset.from_tensor_slices(arrays).repeat()


def _first_steps(model, batches, options):
    """Train some steps; return the mean bytes and loss of one."""
    model.steps_per_execution = options.steps_per_execution
    # A function that makes variables is traced twice.
    model.optimizer.build(model.trainable_variables)
    with count_bytes() as counter:
        model.make_train_function()
        iterator = iter(batches)
        model.train_function(iterator)
        # What ranks exchange while they trace is not of each step.
        before = counter.bytes
        for _ in range(BATCHES):
            logs = model.train_function(iterator)
    steps = BATCHES * options.steps_per_execution
    return {"sent_bytes": (counter.bytes - before) / steps, "loss": float(logs["loss"])}


def _memory(model):
    """Return the bytes of this rank's weights, and of the optimizer's slots."""
    # Scalars are counters and rates.
    slots = [each for each in model.optimizer.variables if len(each.shape)]
    return {"weight_bytes": _bytes(model.weights), "slot_bytes": _bytes(slots)}


def _bytes(variables):
    return sum(
        math.prod(each.shape) * tf.as_dtype(each.dtype).size for each in variables
    )
