"""What is reported with figures: the machine, the job, the flags; and where."""

import datetime
import logging
import os
import platform
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdtrain.benchmark import records, tables
from hvdtrain.collectives import transport
from hvdtrain.job import World
from hvdtrain.job.agreement import check_same, fail_together
from hvdtrain.training import description

# The chief writes files, and hosts may have their data in different places.
_OWN_FLAGS = ("data_dir", "json")


def describe(
    world: World, flags: Mapping[str, Any], *, strategy: str = "horovod"
) -> dict[str, Any]:
    """Return what a result has beside its figures, a dict for JSON. A collective.

    Args:
        flags: by name, with the defaults filled in.
        strategy: see `BenchmarkOptions`.

    Raises:
        JobError: on all ranks, if the flags of the ranks differ.
    """
    # Each `fit` traces a function of its own to broadcast the weights; TensorFlow logs
    # a warning of repeated tracing.
    tf.get_logger().setLevel(logging.ERROR)
    check_same(world, dict(flags), but=_OWN_FLAGS, prefix="--")
    return {
        "format": tables.FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": _processor(),
        # Of the last minute: a high one shows that other processes disturb the figures.
        "load_average": os.getloadavg()[0],
        "size": world.size,
        **description.describe_job(world),
        "path": _name_path(world, strategy),
        "flags": dict(flags),
    }


def report(
    world: World, result: Mapping[str, Any], table: str, *, path: str | None
) -> None:
    """Print the table, and write the result to a file, on the chief. A collective."""
    if world.is_chief:
        print(table, flush=True)
    with fail_together(world):
        if world.is_chief and path:
            records.write_json(path, result)


def _name_path(world: World, strategy: str) -> str:
    """Return how this job reduces: a word or two, such as shared memory."""
    if strategy in ("mirrored", "split"):
        return "in one process"
    if world.size == 1:
        return "no reduction"
    return transport.reduction_path()


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
