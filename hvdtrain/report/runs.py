"""Runs, read from their directories, and their costs."""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain import log
from hvdtrain.log import Line
from hvdtrain.stores.mirror import downloaded


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """A job, over all of its starts, as its files record it.

    Attributes:
        name: the end of its directory's path, as short as is unique.
        lines: all lines of log.jsonl, superseded ones as well.
        summary: the contents of summary.json; empty without it.
    """

    name: str
    lines: list[Line]
    summary: dict[str, Any]

    def series(
        self, event: str, value: Callable[[Line], float | None]
    ) -> tuple[list[int], list[float]]:
        """Return the steps and the values of the valid lines of an event.

        A `value` that is None becomes nan, which leaves a gap in a curve.
        """
        lines = _valid_lines(self.lines, event)
        values = [math.nan if (v := value(line)) is None else v for line in lines]
        return [line["step"] for line in lines], values

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics, the loss first."""
        names = {name for line in self.lines for name in line.get("metrics", ())}
        return sorted(names, key=lambda name: (name != "loss", name))

    @property
    def restarts(self) -> list[int]:
        """The steps of later starts that no start after them has superseded."""
        starts = [line for line in self.lines if line["event"] == "start"]
        valid_starts = _valid_lines(self.lines, "start")
        return [line["step"] for line in valid_starts if line in starts[1:]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a run, and its evaluations.

    Attributes:
        ranks: number of ranks of each start.
        global_batch_size: samples per step since the last start.
        step: the last step in the log.
        max_steps: steps of the whole job.
        samples: samples that were trained on, in repeated steps as well.
        seconds: running time, from each start to its last line, with tracing,
            evaluation and checkpoints; without the start of processes and the time
            between a kill and the next start.
        speed_of_steps: samples per second in steps alone, by the reports; 0 without.
        repeated_steps: steps that were taken again, because a start continued from an
            earlier step. The log lacks the steps of a killed process after its last
            line.
        evaluations: valid lines, by step.
    """

    ranks: list[int]
    global_batch_size: int
    step: int
    max_steps: int
    samples: int
    seconds: float
    speed_of_steps: float
    starts: int
    repeated_steps: int
    evaluations: list[Line]

    @property
    def samples_per_second(self) -> float:
        """The mean over the running time; 0 before the first line after a start."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def best_evaluation(self) -> Line | None:
        """The evaluation with the lowest loss; None where no evaluation has a loss."""
        with_loss = [
            line for line in self.evaluations if line["metrics"].get("loss") is not None
        ]
        return min(with_loss, key=lambda line: line["metrics"]["loss"], default=None)


def read(directories: Sequence[str | os.PathLike]) -> list[LoggedRun]:
    """Return the run of each directory.

    Raises:
        JobError: a directory has no log that can be read.
    """
    runs = []
    for name, directory in zip(_names(directories), directories, strict=True):
        with downloaded(directory) as path:
            lines, summary = log.read(path), _summary(path)
        runs.append(LoggedRun(name=name, lines=lines, summary=summary))
    return runs


def compute_costs(lines: Sequence[Line]) -> Costs:
    """Return the costs of all lines of a run, superseded ones as well."""
    lines_by_start = split_at_starts(lines)
    starts = [lines[0] for lines in lines_by_start]
    reached = [max(line["step"] for line in lines) for lines in lines_by_start]
    return Costs(
        ranks=[start["ranks"] for start in starts],
        global_batch_size=starts[-1]["global_batch_size"],
        step=reached[-1],
        max_steps=starts[-1]["max_steps"],
        samples=sum(
            (end - start["step"]) * start["global_batch_size"]
            for start, end in zip(starts, reached, strict=True)
        ),
        seconds=sum(
            lines[-1]["seconds"] - lines[0]["seconds"] for lines in lines_by_start
        ),
        speed_of_steps=_speed_of_steps(lines_by_start),
        starts=len(starts),
        repeated_steps=sum(
            max(0, end - start["step"])
            for end, start in zip(reached, starts[1:], strict=False)
        ),
        evaluations=_valid_lines(lines, "evaluation"),
    )


def _speed_of_steps(lines_by_start: Sequence[Sequence[Line]]) -> float:
    samples, seconds = 0, 0.0
    for start, *lines in lines_by_start:
        before = start
        for line in lines:
            if line["event"] == "progress" and line["samples_per_second"]:
                steps = max(0, line["step"] - before["step"])
                samples += steps * start["global_batch_size"]
                seconds += seconds_of_steps(start, before, line)
                before = line
    return samples / seconds if seconds else 0.0


def compute_delays(lines: Sequence[Line]) -> dict[int, dict[str, float]]:
    """Return by rank the share of the steps' time by which it was late, by cause.

    Only reports in which arrivals were measured count; superseded ones do as well.
    """
    total = 0.0
    delays: dict[int, collections.Counter] = collections.defaultdict(
        collections.Counter
    )
    for one_start in split_at_starts(lines):
        before = start = one_start[0]
        for line in one_start:
            if line["event"] == "progress" and line.get("straggler"):
                seconds = seconds_of_steps(start, before, line)
                total += seconds
                straggler = line["straggler"]
                for cause, delay in straggler["delay_by_cause"].items():
                    delays[straggler["rank"]][cause] += delay * seconds
            before = line if line["event"] == "progress" else before
    return {
        rank: {cause: s / total for cause, s in by_cause.most_common() if total}
        for rank, by_cause in delays.items()
    }


def seconds_of_steps(start: Line, before: Line, line: Line) -> float:
    """Return the seconds of the steps to a report, by the speed without tracing."""
    # The line "end" has none.
    speed = line.get("samples_per_second")
    samples = max(0, line["step"] - before["step"]) * start["global_batch_size"]
    return samples / speed if speed else 0.0


def _valid_lines(lines: Sequence[Line], event: str) -> list[Line]:
    return [line for line in log.drop_superseded(lines) if line["event"] == event]


def split_at_starts(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the lines of each start of a run, which begin with its line."""
    lines_by_start: list[list[Line]] = []
    for line in lines:
        if line["event"] == "start":
            lines_by_start.append([])
        lines_by_start[-1].append(line)
    return lines_by_start


def _names(directories: Sequence[str | os.PathLike]) -> list[str]:
    paths = [pathlib.Path(os.path.abspath(directory)) for directory in directories]
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest + 1):
        names = [str(pathlib.Path(*path.parts[-count:])) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _summary(directory: str | os.PathLike) -> dict[str, Any]:
    # The file is missing until a job is finished. The log alone makes a report.
    with contextlib.suppress(OSError, ValueError, RecursionError):
        summary = json.loads(pathlib.Path(directory, "summary.json").read_text())
        if isinstance(summary, dict):
            return summary
    return {}


def duration_text(seconds: float) -> str:
    """Return hours, minutes and seconds, rounded down to tenths."""
    minutes, seconds = divmod(math.floor(10 * max(0, seconds)) / 10, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02}:{seconds:04.1f}"
