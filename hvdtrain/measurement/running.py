"""A whole benchmark: checks, measurement, table and files."""

import dataclasses
import datetime
import logging
import os
import platform

import tensorflow as tf

from hvdtrain.classifier import description
from hvdtrain.job.agreement import check_same, fail_together
from hvdtrain.measurement import (
    allreduce_speed,
    parallelism,
    records,
    tables,
    throughput,
)
from hvdtrain.measurement.comparison import FORMAT

# Files are written by the chief; hosts may have their data in different places.
_OWN_FLAGS = ("data_dir", "json", "plot")


def run(options, world, *, mpi_seconds):
    """Measure what the options say. A collective.

    Args:
        options: the `Options`, with defaults.
        world: the `World`.
        mpi_seconds: the result of `mpi.measure`.

    Returns:
        The result, a dict for JSON, and the table for the screen.

    Raises:
        JobError: on all ranks, for options that cannot be measured here.
    """
    # Each `fit` broadcasts the weights by a function of its own: TensorFlow warns of
    # repeated tracing.
    tf.get_logger().setLevel(logging.ERROR)
    values = dataclasses.asdict(options)
    check_same(world, values, but=_OWN_FLAGS, prefix="--")
    result = {**_environment(options, world), "flags": values}
    if options.collectives:
        result["collectives"] = _collectives(options, world, mpi_seconds)
        return result, tables.collectives(result)
    if options.compares_parallelism:
        result["parallelism"] = parallelism.measure(options, world)
        return result, tables.table(result)
    result["figures"] = throughput.measure(options, world)
    return result, tables.training(result)


def _collectives(options, world, mpi_seconds):
    sizes = options.message_sizes
    rows = allreduce_speed.measure(
        world, sizes, rounds=options.rounds, seconds=options.seconds
    )
    if mpi_seconds:
        for row in rows:
            row["seconds"] = {"MPI": mpi_seconds[row["bytes"]], **row["seconds"]}
    return {"rows": rows}


def write(options, world, result):
    """Write the files that the options name, on the chief. A collective."""
    with fail_together(world):
        if world.is_chief and options.json:
            records.write_json(options.json, result)
        if world.is_chief and options.plot:
            records.write_plot(options.plot, result)


def _environment(options, world):
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        # Of the minute before: other processes make the figures worse.
        "load_average": os.getloadavg()[0],
        **description.describe(world),
        "path": allreduce_speed.path_of(world, options),
    }


def _processor():
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
