"""What a run is, for its first lines, and what came of it, for its summary."""

import pathlib
import platform
import socket

from hvdtrain import __version__, checkpoint
from hvdtrain.job import agreement

_MODEL, _SUMMARY = "model.keras", "summary.json"
# Room for the largest model with the largest optimizer state, and some logs.
_NEEDED_BYTES = 32 << 20


def describe(world):
    """Return where a run runs, as a dict for its summary. A collective.

    Its keys: size, hosts (name to number of ranks), controller (MPI or Gloo), threads
    (of each rank), versions.
    """
    import horovod
    import keras
    import tensorflow as tf

    import hvdtrain.keras as hvd

    threads = tf.config.threading.get_intra_op_parallelism_threads()
    everyone = agreement.gather(world, (socket.gethostname(), threads))
    hosts = [host for host, _ in everyone]
    return {
        "size": world.size,
        "hosts": {host: hosts.count(host) for host in dict.fromkeys(hosts)},
        "controller": "MPI" if hvd.mpi_enabled() else "Gloo",
        "threads": [threads for _, threads in everyone],
        "versions": {
            "hvdtrain": __version__,
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "Horovod": horovod.__version__,
            "Python": platform.python_version(),
        },
    }


def banner(facts, dataset, *, warning=""):
    """Return the first lines of a run.

    Args:
        facts: the summary so far: `describe`, and what was asked for.
        dataset: the `Dataset`.
        warning: what cannot be overlooked.
    """
    versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
    hosts = ", ".join(f"{count} on {host}" for host, count in facts["hosts"].items())
    threads = " or ".join(str(count) for count in sorted(set(facts["threads"])))
    window = facts["accumulation_steps"]
    controller = f"{facts['controller']}; " if facts["size"] > 1 else ""
    ranks = f"{facts['size']} {'ranks' if facts['size'] > 1 else 'rank'}"
    accumulated = f" x {window} accumulated" if window > 1 else ""
    updates = "updates" if window > 1 else "steps"
    lines = [
        versions,
        f"ranks          {hosts}; {controller}threads per rank: {threads}",
        f"data           {dataset.name}: {len(dataset.x_train):,} images to train, "
        f"{len(dataset.x_test):,} to test, {dataset.num_classes} classes",
        f"model          {facts['model']}, {facts['optimizer']}",
        f"batch          {facts['local_batch_size']} per rank x {ranks}"
        f"{accumulated} = {facts['global_batch_size']}; {facts['steps']:,} {updates}",
        f"learning rate  {facts['local_learning_rate']:g} x {ranks} = "
        f"{facts['learning_rate']:g}",
    ]
    if warning:
        rule = "!" * 72
        lines += [rule, f"WARNING: {warning}", rule]
    return "\n".join(lines)


def summarize(result, facts):
    """Return the summary: `facts` and what a `training.Result` says."""
    return {
        **facts,
        **{f"train_{name}": value for name, value in result.train_metrics.items()},
        **{f"test_{name}": value for name, value in result.test_metrics.items()},
        "samples_per_second": result.samples_per_second,
        "train_seconds": result.train_seconds,
    }


def prepare(model_dir):
    """Make sure, before the run, that `write` will be able to write.

    Raises:
        JobError: as `checkpoint.prepare_directory`.
    """
    checkpoint.prepare_directory(
        model_dir, files=(_MODEL, _SUMMARY), needed_bytes=_NEEDED_BYTES
    )


def write(model_dir, *, model, summary):
    """Write `model.keras`, then `summary.json`: who sees the second has both."""
    directory = pathlib.Path(model_dir)
    # An earlier run's summary must not stand beside this run's model.
    (directory / _SUMMARY).unlink(missing_ok=True)
    checkpoint.save_model(model, directory / _MODEL)
    checkpoint.save_json(summary, directory / _SUMMARY)
