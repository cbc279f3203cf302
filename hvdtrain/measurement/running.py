"""A whole benchmark: checks, measurement, table and files."""

import dataclasses
import datetime
import logging
import platform

import tensorflow as tf

from hvdtrain import report
from hvdtrain.collectives import transport
from hvdtrain.job.agreement import check_same_flags, fail_together
from hvdtrain.measurement import files, tables, throughput

# Files are written by the chief; hosts may have their data in different places.
_OWN_FLAGS = ("data_dir", "json", "plot")


def run(options, world):
    """Measure what the options say. A collective.

    Returns:
        The result, a dict for JSON, and the table for the screen.

    Raises:
        JobError: on all ranks, for options that cannot be measured here.
    """
    # Each `fit` broadcasts the weights by a function of its own: TensorFlow warns of
    # repeated tracing.
    tf.get_logger().setLevel(logging.ERROR)
    values = dataclasses.asdict(options)
    check_same_flags(world, values, but=_OWN_FLAGS)
    with fail_together(world):
        if world.is_chief:
            files.check(options)
    result = {**_environment(world), "flags": values}
    result["figures"] = throughput.measure(options, world)
    return result, tables.training(result)


def write(options, world, result):
    """Write the files that the options name, on the chief. A collective."""
    with fail_together(world):
        if world.is_chief and options.json:
            files.write_json(options.json, result)
        if world.is_chief and options.plot:
            files.write_plot(options.plot, result)


def _environment(world):
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        **report.describe(world),
        "path": path(world),
    }


def path(world):
    """Return how this job reduces: shared memory, MPI or Horovod."""
    if world.size == 1:
        return "no reduction"
    found = getattr(transport, "path", None)
    return found() if found else "Horovod"


def _processor():
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
