"""Runs as their directories describe them, and what they cost."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib

from hvdtrain import log


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A job, over all times that it was started.

    Attributes:
        name: of its directory, as short as is unique.
        lines: those of log.jsonl, superseded ones as well.
        summary: the contents of summary.json; empty without it.
    """

    name: str
    lines: list
    summary: dict

    def series(self, event, value):
        """Return steps and values, of the lines that are not superseded.

        Args:
            event: of the lines.
            value: returns the value of a line; None is not a number.
        """
        lines = [line for line in log.valid(self.lines) if line["event"] == event]
        values = [math.nan if (v := value(line)) is None else v for line in lines]
        return [line["step"] for line in lines], values

    @property
    def metrics(self):
        """The names of all metrics, the loss first."""
        names = {name for line in self.lines for name in line.get("metrics", ())}
        return sorted(names, key=lambda name: (name != "loss", name))

    @property
    def restarts(self):
        """The steps that it was continued from, of what is not superseded."""
        starts = [line for line in self.lines if line["event"] == "start"]
        valid = [line for line in log.valid(self.lines) if line in starts[1:]]
        return [line["step"] for line in valid]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What a run has cost, and what it has reached.

    Attributes:
        ranks: of each start.
        global_batch_size: of the last start.
        step: the last one.
        max_steps: steps of the whole job.
        samples: that were trained on, in repeated steps as well.
        seconds: from each start to its last line, with tracing, evaluation and
            checkpoints; without the time between a kill and the next start.
        starts: how often the job was started.
        repeated_steps: steps between each start and what was reached before it.
            Those that a killed process took after its last line are not known.
        evaluations: lines that are not superseded, by step.
    """

    ranks: list
    global_batch_size: int
    step: int
    max_steps: int
    samples: int
    seconds: float
    starts: int
    repeated_steps: int
    evaluations: list

    @property
    def samples_per_second(self):
        """The mean over all seconds; 0 before the first line after a start."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def best_evaluation(self):
        """The one with the lowest loss; None without an evaluation with a loss."""
        with_loss = [
            line for line in self.evaluations if line["metrics"].get("loss") is not None
        ]
        return min(with_loss, key=lambda line: line["metrics"]["loss"], default=None)


def read(directories):
    """Return the `Run` of each directory.

    Raises:
        JobError: a directory has no log that can be read.
    """
    return [
        Run(name=name, lines=log.read(directory), summary=_summary(directory))
        for name, directory in zip(_names(directories), directories, strict=True)
    ]


def costs(lines):
    """Return the `Costs` of the lines of a run, superseded ones as well."""
    parts = _parts(lines)
    starts = [part[0] for part in parts]
    reached = [max(line["step"] for line in part) for part in parts]
    return Costs(
        ranks=[start["ranks"] for start in starts],
        global_batch_size=starts[-1]["global_batch_size"],
        step=reached[-1],
        max_steps=starts[-1]["max_steps"],
        samples=sum(
            (end - start["step"]) * start["global_batch_size"]
            for start, end in zip(starts, reached, strict=True)
        ),
        seconds=sum(part[-1]["seconds"] - part[0]["seconds"] for part in parts),
        starts=len(starts),
        repeated_steps=sum(
            max(0, end - start["step"])
            for end, start in zip(reached, starts[1:], strict=False)
        ),
        evaluations=[
            line for line in log.valid(lines) if line["event"] == "evaluation"
        ],
    )


def _parts(lines):
    """Return the lines of each start, which is the first of them."""
    parts = []
    for line in lines:
        if line["event"] == "start":
            parts.append([])
        parts[-1].append(line)
    return parts


def _names(directories):
    paths = [pathlib.Path(os.path.abspath(directory)) for directory in directories]
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest + 1):
        names = [str(pathlib.Path(*path.parts[-count:])) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _summary(directory):
    # It is missing until a job is finished, and the log is enough.
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads(pathlib.Path(directory, "summary.json").read_text())
        if isinstance(summary, dict):
            return summary
    return {}
