"""The texts of a training for the user, and its summary.json."""

import dataclasses
import platform
import socket
from collections.abc import Mapping
from typing import Any

import horovod
import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import __version__
from hvdtrain.collectives import transport
from hvdtrain.data import Dataset
from hvdtrain.job.agreement import gather
from hvdtrain.job.world import MeshShape, World
from hvdtrain.mnist.options import ClassifierOptions
from hvdtrain.training.specs import Result, TrainSpec

_RULE = "!" * 72


def describe_run(
    world: World,
    options: ClassifierOptions,
    *,
    shape: MeshShape,
    dataset: Dataset,
    train_spec: TrainSpec,
    batch_ranks: int,
) -> dict[str, Any]:
    """Return the values of the summary that are known before training. A collective.

    Args:
        batch_ranks: number of replicas that the global batch and the learning rate are
            for.
    """
    window = options.accumulation_steps
    return {
        **describe_job(world),
        "mesh": dataclasses.asdict(shape),
        "reduction": transport.reduction_path(),
        "dataset": dataset.name,
        "requested_dataset": options.dataset,
        "model": options.model,
        "optimizer": options.optimizer,
        "local_batch_size": train_spec.local_batch_size,
        "batch_ranks": batch_ranks,
        "accumulation_steps": window,
        "global_batch_size": options.batch_size * batch_ranks * window,
        "steps": train_spec.max_steps // window,
        "local_learning_rate": options.local_learning_rate,
        "learning_rate": options.local_learning_rate * batch_ranks,
        "seed": options.seed,
        "flags": dataclasses.asdict(options),
    }


def describe_job(world: World) -> dict[str, Any]:
    """Return the ranks and the software of a job, for a summary. A collective.

    Its keys: size, hosts (number of ranks by name), controller (MPI or Gloo), threads
    (by rank), versions.
    """
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    hosts_and_threads = gather(world, (socket.gethostname(), threads))
    hosts = [host for host, _ in hosts_and_threads]
    return {
        "size": world.size,
        "hosts": {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        "controller": "MPI" if hvd.mpi_enabled() else "Gloo",
        "threads": [threads for _, threads in hosts_and_threads],
        "versions": {
            "hvdtrain": __version__,
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "Horovod": horovod.__version__,
            "Python": platform.python_version(),
        },
    }


def banner(info: Mapping[str, Any], dataset: Dataset, *, warning: str = "") -> str:
    """Return the lines before training, with a `warning` in a frame.

    Args:
        info: the result of `describe_run`.
    """
    versions = ", ".join(f"{name} {value}" for name, value in info["versions"].items())
    hosts = ", ".join(f"{count} on {host}" for host, count in info["hosts"].items())
    threads = " or ".join(str(count) for count in sorted(set(info["threads"])))
    window = info["accumulation_steps"]
    controller = ""
    if info["size"] > 1:
        controller = f"{info['controller']}; reduction: {info['reduction']}; "
    mesh = info["mesh"]
    kind = "rank" if mesh["data"] == info["size"] else "replica"
    replicas, batch_ranks = (
        f"{count} {kind}{'s' if count > 1 else ''}"
        for count in (mesh["data"], info["batch_ranks"])
    )
    accumulated = f" x {window} accumulated" if window > 1 else ""
    updates = "updates" if window > 1 else "steps"
    lines = [
        versions,
        f"ranks          {hosts}; {controller}threads per rank: {threads}",
        f"data           {dataset.name}: {len(dataset.x_train):,} images to train, "
        f"{len(dataset.x_test):,} to test, {dataset.num_classes} classes",
        f"model          {info['model']}, {info['optimizer']}",
        f"batch          {info['local_batch_size']} per {kind} x {replicas}"
        f"{accumulated} = {info['global_batch_size']}; {info['steps']:,} {updates}",
        f"learning rate  {info['local_learning_rate']:g} x {batch_ranks} = "
        f"{info['learning_rate']:g}",
    ]
    if kind == "replica":
        lines.insert(
            2,
            f"mesh           data {mesh['data']} x pipeline {mesh['pipeline']} x "
            f"model {mesh['model']}",
        )
    if path := info["flags"]["timeline_file"]:
        lines.append(f"timeline       {path}")
    if warning:
        lines += [_RULE, f"WARNING: {warning}", _RULE]
    return "\n".join(lines)


def summarize(result: Result, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary: the result of `describe_run`, and that of the training."""
    return {
        **info,
        # Later than `max_steps`, where that was lowered after the last checkpoint.
        "steps": result.step // info["accumulation_steps"],
        **{f"train_{name}": value for name, value in result.train_metrics.items()},
        **{f"test_{name}": value for name, value in result.test_metrics.items()},
        "samples_per_second": result.samples_per_second,
        "train_seconds": result.train_seconds,
        "skipped_updates": result.skipped_updates,
    }


def last_line(summary: Mapping[str, Any]) -> str:
    """Return the line after training."""
    line = f"test accuracy {summary['test_accuracy']:.4f}"
    if not summary["samples_per_second"]:
        return f"{line}; the job had finished before, and trained no further step"
    line += (
        f" after {summary['train_seconds']:.1f} s of training at "
        f"{summary['samples_per_second']:,.0f} samples/s"
    )
    if skipped := summary["skipped_updates"]:
        line += f"; updates left out, as they were not finite: {skipped:,}"
    return line
