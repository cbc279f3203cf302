"""Kinds of parallelism beside each other: memory, bytes and time of a step."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from benchmarks.parallel_workloads import BATCHES, WORKLOADS, Kind, ParallelWorkload
from benchmarks.parallelism import ParallelismOptions
from benchmarks.sent_bytes import count_bytes
from hvdtrain.benchmark import variants
from hvdtrain.benchmark.figures import Figures, median_ratio
from hvdtrain.collectives.dtypes import local_shard
from hvdtrain.job import World
from hvdtrain.job.agreement import fail_together, gather

# The kind that the others are compared with.
REPLICATED = "replicated"


def measure(options: ParallelismOptions, world: World) -> Figures:
    """Measure the kinds of parallelism of a workload. A collective.

    Args:
        options: with defaults.

    Returns:
        By kind, "replicated" first, a dict for JSON, the same on all ranks;
        docs/figures/comparisons.md describes it.
    """
    workload = WORKLOADS[options.workload]
    figures: dict[str, Figures] = {}
    runs = {}
    for name, kind in workload.kinds.items():
        if world.size > kind.most_ranks:
            continue
        with fail_together(world):
            model = kind.build(options)
            batches = _batches(workload, kind, options, world)
            figures[name] = _first_steps(model, batches, options) | _memory(model)
        runs[name] = variants.function_variant(
            model, batches, options.steps_per_execution
        )
    speeds = variants.warm_up(world, runs)
    measured = variants.run_rounds(
        world, runs, speeds, rounds=options.rounds, seconds=options.seconds
    )
    for name, executions in measured.items():
        figures[name]["step_seconds"] = [
            statistics.fmean(each) / options.steps_per_execution for each in executions
        ]
    return summarize(gather(world, figures))


def summarize(figures_by_rank: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Return the figures of each kind from the figures of each rank.

    Args:
        figures_by_rank: for each rank, by kind, `weight_bytes` and `slot_bytes`, the
            `sent_bytes` of a step, the `loss`, and for each round the `step_seconds`.

    Returns:
        By kind, the bytes of each rank; the mean `loss`; the median `step_seconds` of
        the slowest rank in each round; and the ratios `against_replicated` of the
        largest memory and bytes of a rank, and of the time.
    """
    names = figures_by_rank[0]
    by_kind = {name: [each[name] for each in figures_by_rank] for name in names}
    return {
        name: _compare_kind(ranks, by_kind[REPLICATED])
        for name, ranks in by_kind.items()
    }


def _compare_kind(ranks: Sequence[Figures], replicated: Sequence[Figures]) -> Figures:
    keys = ("weight_bytes", "slot_bytes", "sent_bytes")
    seconds = _slowest(ranks)
    return {
        **{f"{key}_by_rank": [rank[key] for rank in ranks] for key in keys},
        "loss": statistics.fmean(rank["loss"] for rank in ranks),
        "step_seconds": statistics.median(seconds),
        "rounds": seconds,
        "against_replicated": {
            "memory": _largest(ranks, *keys[:2]) / _largest(replicated, *keys[:2]),
            "sent_bytes": _largest(ranks, keys[2]) / _largest(replicated, keys[2]),
            "step_seconds": median_ratio(seconds, _slowest(replicated)),
        },
    }


def _largest(ranks: Sequence[Figures], *keys: str) -> float:
    return max(sum(rank[key] for key in keys) for rank in ranks)


def _slowest(ranks: Sequence[Figures]) -> list[float]:
    """Return the seconds of a step in each round, of the slowest rank."""
    times = [rank["step_seconds"] for rank in ranks]
    return [max(seconds) for seconds in zip(*times, strict=True)]


def _batches(
    workload: ParallelWorkload, kind: Kind, options: ParallelismOptions, world: World
) -> tf.data.Dataset:
    """Return an endless dataset of a rank's batches."""
    ranks = range(world.size) if kind.shares_samples else [world.rank]
    samples = [workload.samples(options, rank) for rank in ranks]
    arrays = tuple(np.concatenate(each, axis=1) for each in zip(*samples, strict=True))
    return tf.data.Dataset.from_tensor_slices(arrays).repeat()


def _first_steps(
    model: keras.Model, batches: tf.data.Dataset, options: ParallelismOptions
) -> dict[str, float]:
    """Train some steps; return the mean bytes and loss of one."""
    model.steps_per_execution = options.steps_per_execution
    # A function that makes variables is traced twice.
    model.optimizer.build(model.trainable_variables)
    with count_bytes() as counter:
        model.make_train_function()
        iterator = iter(batches)
        model.train_function(iterator)
        # The first step traces, and the ranks exchange shapes meanwhile: not counted.
        before = counter.bytes
        for _ in range(BATCHES):
            logs = model.train_function(iterator)
    steps = BATCHES * options.steps_per_execution
    return {"sent_bytes": (counter.bytes - before) / steps, "loss": float(logs["loss"])}


def _memory(model: keras.Model) -> dict[str, int]:
    """Return the bytes of this rank's weights, and of the optimizer's slots."""
    # Scalars are no slots: the step, the learning rate.
    slots = [each for each in model.optimizer.variables if len(each.shape)]
    return {"weight_bytes": _bytes(model.weights), "slot_bytes": _bytes(slots)}


def _bytes(variables: Iterable[keras.Variable]) -> int:
    return sum(
        math.prod(each.shape) * tf.as_dtype(each.dtype).size
        for each in map(local_shard, variables)
    )
