"""The texts of a training for the user, and its summary.json."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hvdtrain.data import Dataset
from hvdtrain.mnist.options import ClassifierOptions
from hvdtrain.training import Result

_RULE = "!" * 72


def first_lines(
    options: ClassifierOptions, dataset: Dataset, *, warning: str = ""
) -> str:
    """Return the lines before the banner, with a `warning` in a frame."""
    lines = [
        f"data           {dataset.name}: {len(dataset.x_train):,} images to train, "
        f"{len(dataset.x_test):,} to test, {dataset.num_classes} classes"
    ]
    if warning:
        lines += [_RULE, f"WARNING: {warning}", _RULE]
    if options.timeline_file:
        lines.append(f"timeline       {options.timeline_file}")
    return "\n".join(lines)


def summarize(
    result: Result, options: ClassifierOptions, dataset: Dataset
) -> dict[str, Any]:
    """Return the summary: what was trained, on which ranks, and its result."""
    start, window = result.start, options.accumulation_steps
    # The ranks that the global batch and the learning rate are for: a job that
    # continues on others keeps them.
    batch_ranks = start.global_batch_size // options.batch_size
    return {
        "size": start.ranks,
        "hosts": dict(Counter(start.hosts)),
        "controller": start.controller,
        "threads": start.threads,
        "versions": start.versions,
        "mesh": start.mesh,
        "reduction": start.reduction,
        "dataset": dataset.name,
        "requested_dataset": options.dataset,
        "model": options.model,
        "optimizer": options.optimizer,
        "local_batch_size": start.local_batch_sizes[0],
        "batch_ranks": batch_ranks,
        "accumulation_steps": window,
        "global_batch_size": start.global_batch_size * window,
        "local_learning_rate": options.local_learning_rate,
        "learning_rate": options.local_learning_rate * batch_ranks,
        "seed": options.seed,
        "flags": dataclasses.asdict(options),
        # Later than `max_steps`, where that was lowered after the last checkpoint.
        "steps": result.step // window,
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
        # The job had finished before, which the console has printed.
        return line
    line += (
        f" after {summary['train_seconds']:.1f} s of training at "
        f"{summary['samples_per_second']:,.0f} samples/s"
    )
    if skipped := summary["skipped_updates"]:
        line += f"; updates left out, as they were not finite: {skipped:,}"
    return line
