"""The time of an allreduce by its size, on each path that a job has.

Measured in a loop inside one `tf.function`, as in a training with several steps per
execution: a call of such a function takes longer than a small reduction. Each reduction
starts after the previous one has ended.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.job import World
from hvdtrain.job.agreement import fail_together, gather

_MAX_REPEATS = 2000

# Reduces, or copies, so many times.
Run = Callable[[int], Any]
# Takes the bytes of a message.
Maker = Callable[[int], Run]


def measure(
    world: World,
    sizes: Sequence[int],
    peers: Mapping[str, Maker],
    *,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Measure allreduces of float32. A collective.

    Args:
        sizes: bytes of each message.
        peers: paths of other packages, by name, the same names on all ranks.
        rounds: rounds of all paths for each size.
        seconds: of each path in a round, at most about.

    Returns:
        For each size a dict of its `bytes` and the median `seconds` by path:
        "Horovod", "hvdtrain", the peers, and "copy": each rank copies a buffer of this
        size in memory, all at the same time.
    """
    makers = {**_makers(), **peers, "copy": _make_copy}
    rows = []
    for count in sizes:
        with fail_together(world):
            paths = {name: make(count) for name, make in makers.items()}
        times = _measure_size(world, paths, rounds=rounds, seconds=seconds)
        medians = {name: statistics.median(each) for name, each in times.items()}
        rows.append({"bytes": count, "seconds": medians})
    # All ranks report the times of rank 0.
    return gather(world, rows)[0]


def _measure_size(
    world: World, paths: Mapping[str, Run], *, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Return the seconds of one reduction in each round, by path."""
    repeats = {}
    for name, run in paths.items():
        # The first call traces and negotiates.
        _time(world, run, 1)
        # The same number on all ranks: a rank with more repeats would wait for ever.
        slowest = max(gather(world, _time(world, run, 2)))
        repeats[name] = max(1, min(_MAX_REPEATS, int(seconds / slowest)))
    times: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(rounds):
        for name, run in paths.items():
            times[name].append(_time(world, run, repeats[name]))
    return times


def _time(world: World, run: Run, repeats: int) -> float:
    # A barrier: the wait for a late rank is not part of the reduction.
    gather(world, None)
    start = time.perf_counter()
    run(repeats)
    return (time.perf_counter() - start) / repeats


def _makers() -> dict[str, Maker]:
    return {
        "Horovod": functools.partial(
            _make_loop, lambda x: horovod.allreduce(x, op=horovod.Sum, name="raw")
        ),
        "hvdtrain": functools.partial(
            _make_loop,
            lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, name="ours")[0],
        ),
    }


def _make_loop(reduce: Callable[[tf.Tensor], tf.Tensor], count: int) -> Run:
    # A variable: a reduction of constants would be folded, that is, run once.
    numbers = tf.Variable(tf.zeros(count // 4))

    def body(i: tf.Tensor, last: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([last]):
            reduced = reduce(numbers.read_value())
        # An element of the result is used: an unused reduction would be pruned.
        return i + 1, reduced[0]

    @tf.function(autograph=False)
    def loop(repeats: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda i, last: i < repeats,
            body,
            (tf.constant(0), tf.constant(0.0)),
            parallel_iterations=1,
        )

    return lambda repeats: loop(tf.constant(repeats))


def _make_copy(count: int) -> Run:
    source, target = np.zeros(count, "uint8"), np.empty(count, "uint8")
    # np.zeros maps one page of zeros many times.
    source[:] = 1

    def run(repeats: int) -> None:
        for _ in range(repeats):
            np.copyto(target, source)

    return run
