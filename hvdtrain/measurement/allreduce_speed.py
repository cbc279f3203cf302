"""The time of an allreduce by its size, on each path that this job has.

Measured in a loop inside of one `tf.function`, as in a training with several steps per
execution: a call of such a function takes longer than a small reduction. Each reduction
starts after the one before it has ended.
"""

import functools
import statistics
import time

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.collectives import transport
from hvdtrain.job.agreement import fail_together, gather

# Of a path, a size and a round.
_MAX_REPEATS = 2000


def path_of(world, options):
    """Return how this job reduces: a word or two, such as shared memory."""
    if options.strategy in ("mirrored", "split"):
        return "in one process"
    if world.size == 1:
        return "no reduction"
    return transport.reduction_path()


def measure(world, sizes, *, rounds, seconds):
    """Measure allreduces of float32. A collective.

    Args:
        world: the `World`.
        sizes: bytes of each message.
        rounds: rounds of all paths for each size.
        seconds: of each path in a round, at most about.

    Returns:
        For each size a dict of its `bytes` and the median `seconds` by path:
        "Horovod", "hvdtrain", and "copy": each rank copies a buffer of this size in
        memory, all at the same time.
    """
    makers = _makers()
    rows = []
    for count in sizes:
        with fail_together(world):
            paths = {name: make(count) for name, make in makers.items()}
        times = _measure_size(world, paths, rounds=rounds, seconds=seconds)
        medians = {name: statistics.median(found) for name, found in times.items()}
        rows.append({"bytes": count, "seconds": medians})
    return gather(world, rows)[0]


def _measure_size(world, paths, *, rounds, seconds):
    """Return the seconds of one reduction in each round, by path."""
    repeats = {}
    for name, run in paths.items():
        # The first call traces and negotiates.
        _timed(world, run, 1)
        mine = _timed(world, run, 2)
        (slowest, *_) = sorted(gather(world, mine), reverse=True)
        repeats[name] = max(1, min(_MAX_REPEATS, int(seconds / slowest)))
    times = {name: [] for name in paths}
    for _ in range(rounds):
        for name, run in paths.items():
            times[name].append(_timed(world, run, repeats[name]))
    return times


def _timed(world, run, repeats):
    gather(world, None)
    start = time.perf_counter()
    run(repeats)
    return (time.perf_counter() - start) / repeats


def _makers():
    """Return functions by path; each takes a size and returns `run(repeats)`."""
    return {
        "Horovod": functools.partial(
            _in_graph, lambda x: horovod.allreduce(x, op=horovod.Sum, name="raw")
        ),
        "hvdtrain": functools.partial(
            _in_graph, lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, name="ours")[0]
        ),
        "copy": _copy,
    }


def _in_graph(reduce, count):
    numbers = tf.Variable(tf.zeros(count // 4))

    def body(i, last):
        with tf.control_dependencies([last]):
            reduced = reduce(numbers.read_value())
        return i + 1, reduced[0]

    @tf.function(autograph=False)
    def loop(repeats):
        return tf.while_loop(
            lambda i, last: i < repeats,
            body,
            (tf.constant(0), tf.constant(0.0)),
            parallel_iterations=1,
        )

    return lambda repeats: loop(tf.constant(repeats))


def _copy(count):
    source, target = np.zeros(count, "uint8"), np.empty(count, "uint8")
    # np.zeros maps one page of zeros many times.
    source[:] = 1

    def run(repeats):
        for _ in range(repeats):
            np.copyto(target, source)

    return run
