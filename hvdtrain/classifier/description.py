"""The first lines, the last line and the summary of a run."""

import dataclasses
import platform
import socket

import horovod
import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import __version__
from hvdtrain.collectives import transport
from hvdtrain.job.agreement import gather


def run_info(world, options, run):
    """Return the part of the summary that is known before training. A collective.

    Args:
        world: the `World`.
        options: the `Options` of the run.
        run: the `Run` built from them.
    """
    window = options.accumulation_steps
    return {
        **describe(world),
        "mesh": dataclasses.asdict(run.mesh_shape),
        "reduction": transport.reduction_path(),
        "dataset": run.dataset.name,
        "requested_dataset": options.dataset,
        "model": options.model,
        "optimizer": options.optimizer,
        "local_batch_size": run.train_spec.local_batch_size,
        "batch_ranks": run.batch_ranks,
        "accumulation_steps": window,
        "global_batch_size": options.batch_size * run.batch_ranks * window,
        "steps": run.train_spec.max_steps // window,
        "local_learning_rate": options.local_learning_rate,
        "learning_rate": options.local_learning_rate * run.batch_ranks,
        "seed": options.seed,
        "flags": dataclasses.asdict(options),
    }


def describe(world):
    """Return the environment of a run, for its summary. A collective.

    Its keys: size, hosts (name to number of ranks), controller (MPI or Gloo), threads
    (of each rank), versions.
    """
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    ranks = gather(world, (socket.gethostname(), threads))
    hosts = [host for host, _ in ranks]
    return {
        "size": world.size,
        "hosts": {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        "controller": "MPI" if hvd.mpi_enabled() else "Gloo",
        "threads": [threads for _, threads in ranks],
        "versions": {
            "hvdtrain": __version__,
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "Horovod": horovod.__version__,
            "Python": platform.python_version(),
        },
    }


def banner(info, dataset, *, warning=""):
    """Return the first lines of a run.

    Args:
        info: the dict of `run_info`.
        dataset: the `Dataset`.
        warning: for the user, in a frame.
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
        rule = "!" * 72
        lines += [rule, f"WARNING: {warning}", rule]
    return "\n".join(lines)


def summarize(result, info):
    """Return the summary: `run_info` and the numbers of a `training.Result`."""
    return {
        **info,
        # Where max_steps was lowered, the model is that of a later step.
        "steps": result.step // info["accumulation_steps"],
        **{f"train_{name}": value for name, value in result.train_metrics.items()},
        **{f"test_{name}": value for name, value in result.test_metrics.items()},
        "samples_per_second": result.samples_per_second,
        "train_seconds": result.train_seconds,
        "skipped_updates": result.skipped_updates,
    }


def last_line(summary):
    """Return the line after training."""
    line = (
        f"test accuracy {summary['test_accuracy']:.4f} after "
        f"{summary['train_seconds']:.1f} s of training at "
        f"{summary['samples_per_second']:,.0f} samples/s"
    )
    if skipped := summary["skipped_updates"]:
        line += f"; updates left out, as they were not finite: {skipped:,}"
    return line
