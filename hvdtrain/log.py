"""log.jsonl: the course of a training, one JSON object per line.

    {"event": "start", "seconds": 1.5e9, "step": 0, "max_steps": 5000, "ranks": 2,
     "global_batch_size": 128, "learning_rate": 0.2, "process_seconds": 4.2}
    {"event": "progress", "seconds": 1.5e9, "step": 40, "metrics": {"loss": 0.99},
     "learning_rate": 0.2, "communication": 0.1, "input_wait": 0.02,
     "samples_per_second": 106668.1, "skipped_updates": 0,
     "evaluation_seconds": 0.0, "saving_seconds": 0.0, "straggler": {"rank": 1,
     "host": "node1", "last_share": 0.9, "late_seconds": 0.02, "delay": 0.18,
     "delay_by_cause": {"input": 0.17, "other": 0.01}, "cause": "input",
     "cause_seconds": 0.03, "others_seconds": 0.01, "waiting": 0.1,
     "late_seconds_by_rank": [0.0, 0.02]}}
    {"event": "evaluation", "seconds": 1.5e9, "step": 5000, "metrics": {"loss": 0.07}}
    {"event": "checkpoint", "seconds": 1.5e9, "step": 5000, "text":
     "copied in 0.002 s, written in 0.1 s"}
    {"event": "end", "seconds": 1.5e9, "step": 5000, "evaluation_seconds": 0.3,
     "saving_seconds": 0.1}

Lines of the event export have the fields of checkpoints. `events.RunStart` has all
fields of a start, and `events.Straggler` all fields of a straggler, which is null where
it is not measured. Readers accept a progress or an end without `straggler` or the
seconds of evaluation and saving. `seconds` is the time since the epoch. A number that
is not finite is null. All runs of a job append to the file, and lines are never
changed: a start at step s supersedes the lines of later steps above it, and of several
lines of an event and a step the last is valid. Readers skip lines that are not JSON: a
killed process truncated them.

Importing this module loads no TensorFlow.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import pathlib
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

from hvdtrain.events import Progress, RunEnd, RunStart, Straggler
from hvdtrain.job import JobError
from hvdtrain.job.files import one_line_errors
from hvdtrain.open_directory import open_regular

NAME = "log.jsonl"
Line = dict[str, Any]
Metrics = dict[str, float | None]

_NUMBER = (int, float)
_NULLABLE = (*_NUMBER, type(None))
_COMMON: dict[str, Any] = {"event": str, "seconds": _NUMBER, "step": int}
_FIELDS: dict[str, dict[str, Any]] = {
    "start": {"max_steps": int, "ranks": int, "global_batch_size": int},
    "progress": {
        "metrics": dict,
        "learning_rate": _NULLABLE,
        "communication": _NULLABLE,
        "input_wait": _NULLABLE,
        "samples_per_second": _NULLABLE,
    },
    "evaluation": {"metrics": dict},
    "checkpoint": {"text": str},
    "export": {"text": str},
    "end": {},
}
# Lines of earlier versions lack these.
_OPTIONAL: dict[str, Any] = {
    "process_seconds": _NULLABLE,
    "evaluation_seconds": _NULLABLE,
    "saving_seconds": _NULLABLE,
    "straggler": (dict, type(None)),
}


class WarnOnce:
    """A context in which a log that cannot be written does not end the training.

    Args:
        warn: receives the message of the first `JobError`; later ones are dropped.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._has_warned = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> bool:
        if not isinstance(error, JobError):
            return False
        if not self._has_warned:
            self._has_warned = True
            self._warn(str(error))
        return True


class JsonLog:
    """An observer that appends to log.jsonl.

    Args:
        directory: where the file is.
        warn: called once, with the reason why a line could not be written.
        clock: returns seconds since the epoch.

    Raises:
        JobError: the file cannot be opened.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        warn: Callable[[str], object],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = pathlib.Path(directory, NAME)
        self._clock = clock
        self._warn_once = WarnOnce(warn)
        # The thread that writes checkpoints appends lines, too.
        self._lock = threading.Lock()
        with self._one_line_errors("choose another --model_dir"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: each line is one write, and a line that fails stays out.
            self._file = _open(self._path)
            self._is_within_line = not _ends_with_newline(self._file)

    def on_start(self, start: RunStart) -> None:
        self._append("start", **_finite_fields(start))

    def on_progress(self, progress: Progress) -> None:
        self._append(
            "progress",
            step=progress.step,
            metrics=_finite_values(progress.metrics),
            learning_rate=_finite(progress.learning_rate),
            communication=_finite(progress.communication),
            input_wait=_finite(progress.input_wait),
            samples_per_second=_finite(progress.samples_per_second),
            skipped_updates=progress.skipped_updates,
            evaluation_seconds=_finite(progress.evaluation_seconds),
            saving_seconds=_finite(progress.saving_seconds),
            straggler=progress.straggler and _finite_fields(progress.straggler),
        )

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._append("evaluation", step=step, metrics=_finite_values(metrics))

    def on_checkpoint(self, step: int, text: str) -> None:
        self._append("checkpoint", step=step, text=text)

    def on_export(self, step: int, text: str) -> None:
        self._append("export", step=step, text=text)

    def on_end(self, end: RunEnd) -> None:
        self._append("end", **_finite_fields(end))

    def _append(self, event: str, **values: Any) -> None:
        values = {"event": event, "seconds": self._clock(), **values}
        line = json.dumps(values, allow_nan=False) + "\n"
        with (
            self._lock,
            self._warn_once,
            self._one_line_errors("training continues, without lines in it meanwhile"),
        ):
            # Ends the line that a killed process or a full disk has truncated.
            data = ("\n" * self._is_within_line + line).encode()
            self._is_within_line = True
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._is_within_line = False

    def _one_line_errors(self, remedy: str) -> contextlib.AbstractContextManager:
        return one_line_errors(f"write {self._path}", remedy=remedy)


def _open(path: pathlib.Path) -> BinaryIO:
    # A link is not followed: other users may write in the directory of a shared run.
    return open(path, "a+b", buffering=0, opener=open_regular)


def read(directory: str | os.PathLike) -> list[Line]:
    """Return all lines of a log.jsonl that can be read, from its first start on.

    Raises:
        JobError: it is missing, cannot be read, or has no line of a start.
    """
    path = pathlib.Path(directory, NAME)
    remedy = "expected the --model_dir of a training"
    with one_line_errors(f"read {path}", remedy=remedy):
        if not path.parent.is_dir():
            raise JobError(f"Received {directory}; {remedy}, an existing directory.")
        # A pipe or a device would be read without end.
        if path.exists() and not path.is_file():
            raise OSError("Not a regular file")
        texts = path.read_text(errors="replace").splitlines()
    lines = [line for line in map(_parse, texts) if line]
    for number, line in enumerate(lines):
        if line["event"] == "start":
            return lines[number:]
    raise JobError(f"{path} has no line of a start; {remedy}.")


def drop_superseded(lines: Iterable[Line]) -> list[Line]:
    """Return the valid lines of the result of `read`, ordered by step."""
    valid: dict[tuple[int, str], Line] = {}
    for line in lines:
        if line["event"] == "start":
            valid = {key: old for key, old in valid.items() if key[0] <= line["step"]}
        valid[line["step"], line["event"]] = line
    return sorted(valid.values(), key=lambda line: line["step"])


def _ends_with_newline(file: BinaryIO) -> bool:
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _parse(text: str) -> Line | None:
    """Return a line; None for a text that is truncated, or not of this format."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    fields = _COMMON | _FIELDS.get(str(line.get("event")), {"event": type(None)})
    fields = fields | {name: kind for name, kind in _OPTIONAL.items() if name in line}
    if not all(isinstance(line.get(name), kind) for name, kind in fields.items()):
        return None
    metrics = line.get("metrics", {}).values()
    if not all(isinstance(value, _NULLABLE) for value in metrics):
        return None
    return line


def _finite_values(metrics: Mapping[str, float]) -> Metrics:
    return {name: _finite(value) for name, value in metrics.items()}


def _finite_fields(value: RunStart | Straggler | RunEnd) -> dict[str, Any]:
    fields = dataclasses.asdict(value).items()
    return {n: _finite(v) if isinstance(v, float) else v for n, v in fields}


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
