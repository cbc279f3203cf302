"""A benchmark from its options to its files: checks, measurement, table."""

import dataclasses
import datetime
import logging
import os
import platform
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdtrain.classifier import description
from hvdtrain.job import World
from hvdtrain.job.agreement import check_same, fail_together
from hvdtrain.measurement import (
    allreduce_speed,
    input_speed,
    parallelism,
    records,
    tables,
    throughput,
)
from hvdtrain.measurement.benchmark_options import BenchmarkOptions

# Files are written by the chief; hosts may have their data in different places.
_OWN_FLAGS = ("data_dir", "json", "plot")


def run(
    options: BenchmarkOptions, world: World, *, mpi_seconds: Mapping[int, float]
) -> tuple[dict[str, Any], str]:
    """Measure what the options say. A collective.

    Args:
        options: with defaults.
        mpi_seconds: the result of `mpi.measure`.

    Returns:
        The result, a dict for JSON, and the table for the screen.

    Raises:
        JobError: on all ranks, for options that cannot be measured here.
    """
    # Each `fit` traces a function of its own to broadcast the weights; TensorFlow logs
    # a warning of repeated tracing.
    tf.get_logger().setLevel(logging.ERROR)
    values = dataclasses.asdict(options)
    check_same(world, values, but=_OWN_FLAGS, prefix="--")
    result = {**_environment(options, world), "flags": values}
    if options.collectives:
        result["collectives"] = _collectives(options, world, mpi_seconds)
        return result, tables.collectives(result)
    if options.input:
        with fail_together(world):
            result["input"] = input_speed.measure(
                batch_size=options.batch_size,
                rounds=options.rounds,
                seconds=options.seconds,
            )
        return result, tables.input_speed(result)
    if options.compares_parallelism:
        result["parallelism"] = parallelism.measure(options, world)
        return result, tables.parallelism(result)
    result["figures"] = throughput.measure(options, world)
    return result, tables.training(result)


def _collectives(
    options: BenchmarkOptions, world: World, mpi_seconds: Mapping[int, float]
) -> dict[str, Any]:
    rows = allreduce_speed.measure(
        world, options.message_sizes, rounds=options.rounds, seconds=options.seconds
    )
    if mpi_seconds:
        for row in rows:
            row["seconds"] = {"MPI": mpi_seconds[row["bytes"]], **row["seconds"]}
    return {"rows": rows}


def write(options: BenchmarkOptions, world: World, result: Mapping[str, Any]) -> None:
    """Write the files that the options name, on the chief. A collective."""
    with fail_together(world):
        if world.is_chief and options.json:
            records.write_json(options.json, result)
        if world.is_chief and options.plot:
            records.write_plot(options.plot, result)


def _environment(options: BenchmarkOptions, world: World) -> dict[str, Any]:
    return {
        "format": tables.FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        # Of the last minute: a high one shows that other processes disturb the figures.
        "load_average": os.getloadavg()[0],
        **description.describe_job(world),
        "path": allreduce_speed.name_path(world, options),
    }


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
