"""Observers of a training: the console, and TensorBoard's logs.

hvdtrain/log.py has a third one, which writes log.jsonl.
"""

import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TextIO

import numpy as np
import tensorflow as tf
import tqdm

from hvdtrain.banner import banner
from hvdtrain.events import OTHER, Progress, RunStart, Straggler
from hvdtrain.job import launchers
from hvdtrain.job.files import one_line_errors
from hvdtrain.log import JsonLog, WarnOnce
from hvdtrain.stores.mirror import local_directory
from hvdtrain.training.stragglers import CAUSES, StragglerNotice


def notify(observers: Sequence, method: str, *arguments: object) -> None:
    """Call a method of all observers that have it; see `train_and_evaluate`."""
    for observer in observers:
        if call := getattr(observer, method, None):
            call(*arguments)


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, as floats, without arrays.

    As in `fit`, dictionaries in the logs of a `train_step` are flattened.
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            found |= scalars(value)
        elif np.ndim(value) == 0:
            found[name] = float(value)
    return found


def make_observers(
    file: TextIO,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    local_dir: str | None = None,
) -> list:
    """Return the observers of a program.

    A `Console` prints to `file`. With a `model_dir`, a `JsonLog` and an `EventLog`
    write to it, and the console prints their warnings. See `RunConfig` for `local_dir`.

    Raises:
        JobError: the logs cannot be written.
    """
    # A launcher connects its ranks to a pseudo terminal, even if its own output is a
    # file. A bar would fill that file with control characters.
    has_bar = file.isatty() and not launchers.launch().launcher
    console = Console(file, has_bar=has_bar)
    if not model_dir:
        return [console]
    directory = local_directory(model_dir, local_dir)
    return [
        console,
        *(log(directory, warn=console.warn) for log in (JsonLog, EventLog)),
    ]


class Console:
    """Prints a progress bar, for terminals, or a line every few seconds."""

    def __init__(
        self,
        file: TextIO,
        *,
        has_bar: bool,
        every_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._has_bar = has_bar
        self._every_seconds = every_seconds
        self._clock = clock
        self._last_seconds = -math.inf
        self._bar: tqdm.tqdm | None = None
        self._notice = StragglerNotice(clock=clock)

    def on_start(self, start: RunStart) -> None:
        self._write(banner(start))

    def on_finished(self, start: RunStart, metrics: Mapping[str, float]) -> None:
        self._write(
            f"had finished before: step {start.step:,} of {start.max_steps:,} in "
            f"{start.checkpoint}  {metrics_text(metrics)}".rstrip()
        )

    def on_progress(self, progress: Progress) -> None:
        self._write_progress(progress)
        if progress.straggler and (text := self._notice(progress.straggler)):
            self._write(text)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(f"evaluation at step {step}: {metrics_text(metrics)}")

    def on_checkpoint(self, step: int, text: str) -> None:
        self._write(f"checkpoint at step {step} {text}")

    def on_export(self, step: int, text: str) -> None:
        self._write(f"export at step {step} {text}")

    def warn(self, text: str) -> None:
        self._write(f"WARNING: {text}")

    def _write_progress(self, progress: Progress) -> None:
        if self._has_bar:
            self._draw(progress)
            return
        now = self._clock()
        is_last = progress.step == progress.max_steps
        if not is_last and now - self._last_seconds < self._every_seconds:
            return
        self._last_seconds = now
        skipped = progress.skipped_updates
        self._write(
            f"step {progress.step}/{progress.max_steps}, "
            f"epoch {progress.epoch}/{progress.epochs}  "
            f"{metrics_text(progress.metrics)}  "
            f"{progress.samples_per_second:,.0f} samples/s  "
            f"{_duration(progress.seconds_left)} left"
            f"{f'  {skipped:,} updates left out' if skipped else ''}"
        )

    def _draw(self, progress: Progress) -> None:
        if self._bar is None:
            self._bar = tqdm.tqdm(
                total=progress.max_steps,
                file=self._file,
                unit="step",
                dynamic_ncols=True,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} {desc}",
            )
        self._bar.set_description_str(
            f"epoch {progress.epoch}/{progress.epochs}  "
            f"{metrics_text(progress.metrics)}  {progress.samples_per_second:,.0f} "
            f"samples/s  {_duration(progress.seconds_left)} left",
            refresh=False,
        )
        self._bar.update(progress.step - self._bar.n)
        self._bar.refresh()
        if progress.step == progress.max_steps:
            self._bar.close()

    def _write(self, line: str) -> None:
        if self._bar is not None and not self._bar.disable:
            self._bar.write(line, file=self._file)
        else:
            # In one write: the thread that writes checkpoints prints as well, and
            # would put its text between a line and its end.
            self._file.write(f"{line}\n")
            self._file.flush()


# More than the events of a report.
_NEEDED_BYTES = 1 << 20


class EventLog:
    """Writes TensorBoard's event files.

    A file is created by its first event. A job that is refused, since another one uses
    the directory, leaves none.

    Args:
        directory: the parent of the directories `train` and `test`.
        warn: receives a text when events could not be written, once.

    Raises:
        JobError: the files could not be written.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, warn: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._warn_once = WarnOnce(warn)
        self._writers: dict[str, tf.summary.SummaryWriter] = {}
        megabytes = _NEEDED_BYTES >> 20
        remedy = f"expected {megabytes} MB of free space: choose another --model_dir"
        with self._one_line_errors(remedy):
            for name in ("train", "test"):
                self._make_directory(name)
        # tf.summary.scalar would need the package tensorboard.
        self._metadata = tf.compat.v1.SummaryMetadata(data_class=1)
        self._metadata.plugin_data.plugin_name = "scalars"

    def on_progress(self, progress: Progress) -> None:
        values = {
            **progress.metrics,
            "learning_rate": progress.learning_rate,
            "samples_per_second": progress.samples_per_second,
        }
        for name in ("communication", "input_wait"):
            if not math.isnan(share := getattr(progress, name)):
                values[name] = share
        if progress.skipped_updates:
            values["skipped_updates"] = progress.skipped_updates
        if progress.straggler:
            values |= _straggler_values(progress.straggler)
        self._write("train", progress.step, values)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("test", step, metrics)

    def _write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        with (
            self._warn_once,
            self._one_line_errors("training continues, without events meanwhile"),
        ):
            # TensorBoard stops reading a file at a truncated event. A file is open only
            # as long as writing succeeds, and a new one is opened after a failure.
            writer = self._writers.pop(name, None) or tf.summary.create_file_writer(
                self._make_directory(name)
            )
            with writer.as_default(step=step):
                for tag, value in values.items():
                    value = tf.constant(value, tf.float32)
                    tf.summary.write(tag, value, metadata=self._metadata)
            writer.flush()
            self._writers[name] = writer

    def _make_directory(self, name: str) -> str:
        """Return a directory in which there is space."""
        directory = os.path.join(self._directory, name)
        if not os.path.lexists(directory):
            os.makedirs(directory)
        # Each attempt to open a log on a full disk would leave an empty file.
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, _NEEDED_BYTES)
        return directory

    def _one_line_errors(self, remedy: str) -> AbstractContextManager[None]:
        return one_line_errors(
            f"write TensorBoard's logs to {self._directory}",
            errors=(tf.errors.OpError, OSError),
            remedy=remedy,
            reason_of=error_reason,
        )


# Names of nodes and of the operation, which TensorFlow adds to a system's message.
_GRAPH_NAMES = re.compile(r"\{\{.*?\}\} | \[Op:.*")


def error_reason(error: tf.errors.OpError | OSError) -> str | None:
    """Return the operating system's message of an error."""
    if isinstance(error, OSError):
        return error.strerror
    text = _GRAPH_NAMES.sub("", error.message.splitlines()[0])
    return text.rpartition("; ")[2]


def _straggler_values(straggler: Straggler) -> dict[str, float]:
    values = {
        f"straggler/{name}": float(getattr(straggler, name))
        for name in ("rank", "delay", "last_share", "late_seconds", "waiting")
    }
    # Zeros as well: TensorBoard would draw a line across a gap.
    return values | {
        f"straggler/delay_by_cause/{cause}": straggler.delay_by_cause.get(cause, 0.0)
        for cause in (*CAUSES, OTHER)
    }


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return metrics as text, the loss first."""
    names = sorted(metrics, key=lambda name: (name != "loss", name))
    return "  ".join(f"{name} {metrics[name]:.4f}" for name in names)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
