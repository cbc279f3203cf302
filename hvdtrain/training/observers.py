"""Observers of a training: the console, and TensorBoard's logs.

hvdtrain/log.py has a third one, which writes log.jsonl.
"""

import dataclasses
import math
import os
import re
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import tqdm

from hvdtrain.job import launchers
from hvdtrain.job.files import local_path, one_line_errors
from hvdtrain.log import JsonLog, WarnOnce


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStart:
    """The start of a run of a job.

    Attributes:
        step: the step that it continues from, 0 for a new job.
        max_steps: steps of the whole job.
        ranks: number of ranks.
        global_batch_size: samples of a step of the whole job.
    """

    step: int
    max_steps: int
    ranks: int
    global_batch_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of the training of the whole job.

    Attributes:
        step: steps taken.
        max_steps: steps to take.
        metrics: results by name, over all ranks and the steps since the last report of
            the epoch. Those of a user's metric with states of its own are over the
            steps since the epoch began.
        learning_rate: at this step; that of a schedule of Keras is for the next step.
        communication: share of the time since the last report in which ranks reduced
            gradients, or waited for another rank to do so: the mean over the ranks.
            Their computation may go on meanwhile. NaN where it is not measured: on one
            rank, and where Horovod reduces.
        input_wait: share of the same time in which ranks waited for a batch: the mean
            over the ranks. NaN without the native library.
        samples_per_second: of all ranks since the last report.
        seconds_left: estimate for the rest of the training.
        skipped_updates: those of the job that were left out, as their gradients were
            not finite.
    """

    step: int
    max_steps: int
    metrics: dict
    learning_rate: float
    communication: float
    input_wait: float
    samples_per_second: float
    seconds_left: float
    skipped_updates: int = 0


def notify(observers: Sequence, method: str, *arguments: object) -> None:
    """Call a method of all observers that have it; see `train_and_evaluate`."""
    for observer in observers:
        if call := getattr(observer, method, None):
            call(*arguments)


def scalars(metrics):
    """Return the metrics that are numbers, as floats, without those that are arrays."""
    return {name: float(v) for name, v in metrics.items() if np.ndim(v) == 0}


# TensorFlow's own additions to the reason of an error.
_GRAPH_NAMES = re.compile(r"\{\{.*?\}\} | \[Op:.*")
# More than the events of a report.
_NEEDED_BYTES = 1 << 20


def make_observers(file, *, model_dir=None):
    """Return the observers of a program.

    They are a `Console` on `file`; with a `model_dir` also the two logs in it, whose
    warnings the console prints.

    Raises:
        JobError: the logs cannot be written.
    """
    # Launchers connect their ranks to a pseudo terminal, also where their own output
    # is a file. A bar would fill that file with control characters.
    has_bar = file.isatty() and not launchers.launch().launcher
    console = Console(file, has_bar=has_bar)
    if not model_dir:
        return [console]
    model_dir = local_path(model_dir)
    return [
        console,
        *(log(model_dir, warn=console.warn) for log in (JsonLog, EventLog)),
    ]


class Console:
    """Prints a progress bar, or a line every few seconds.

    Args:
        file: the text file to print to.
        has_bar: draw a bar, for terminals.
        every_seconds: pause between lines.
        clock: returns seconds.
    """

    def __init__(self, file, *, has_bar, every_seconds=5.0, clock=time.monotonic):
        self._file = file
        self._has_bar = has_bar
        self._every_seconds = every_seconds
        self._clock = clock
        self._last_seconds = -math.inf
        self._bar = None

    def on_start(self, start):
        """Prints nothing: the banner of the program has it."""

    def on_progress(self, progress):
        """Moves the bar, or prints a line if the last one is old enough."""
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
            f"step {progress.step}/{progress.max_steps}  "
            f"{metrics_text(progress.metrics)}  "
            f"{progress.samples_per_second:,.0f} samples/s  "
            f"{_duration(progress.seconds_left)} left"
            f"{f'  {skipped:,} updates left out' if skipped else ''}"
        )

    def on_evaluation(self, step, metrics):
        """Prints a line."""
        self._write(f"evaluation at step {step}: {metrics_text(metrics)}")

    def on_checkpoint(self, step, text):
        """Prints a line."""
        self._write(f"checkpoint at step {step} {text}")

    def on_export(self, step, text):
        """Prints a line."""
        self._write(f"export at step {step} {text}")

    def warn(self, text):
        """Prints a line."""
        self._write(f"WARNING: {text}")

    def _draw(self, progress):
        if self._bar is None:
            self._bar = tqdm.tqdm(
                total=progress.max_steps,
                file=self._file,
                unit="step",
                dynamic_ncols=True,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} {desc}",
            )
        self._bar.set_description_str(
            f"{metrics_text(progress.metrics)}  {progress.samples_per_second:,.0f} "
            f"samples/s  {_duration(progress.seconds_left)} left",
            refresh=False,
        )
        self._bar.update(progress.step - self._bar.n)
        self._bar.refresh()
        if progress.step == progress.max_steps:
            self._bar.close()

    def _write(self, line):
        if self._bar is not None and not self._bar.disable:
            self._bar.write(line, file=self._file)
        else:
            # In one write: a thread prints as well.
            self._file.write(f"{line}\n")
            self._file.flush()


class EventLog:
    """Writes TensorBoard's event files, from the first event on.

    A job that is refused, as another one uses the directory, has none.

    Args:
        directory: the parent of the directories `train` and `test`.
        warn: receives a text when events could not be written, once.

    Raises:
        JobError: the files could not be written.
    """

    def __init__(self, directory, *, warn):
        self._directory = directory
        self._warn_once = WarnOnce(warn)
        self._writers = {}
        with self._one_line_errors("choose another --model_dir"):
            for part in ("train", "test"):
                self._try(part)
        # tf.summary.scalar would need the package tensorboard.
        self._metadata = tf.compat.v1.SummaryMetadata(data_class=1)
        self._metadata.plugin_data.plugin_name = "scalars"

    def on_start(self, start):
        """Writes nothing: TensorBoard finds restarts by their steps."""

    def on_progress(self, progress):
        """Writes training metrics, learning rate, shares of the time, and speed."""
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
        self._write("train", progress.step, values)

    def on_evaluation(self, step, metrics):
        """Writes the test metrics."""
        self._write("test", step, metrics)

    def on_checkpoint(self, step, text):
        """Writes nothing: it is no number."""

    def on_export(self, step, text):
        """Writes nothing: it is no number."""

    def _write(self, part, step, values):
        with (
            self._warn_once,
            self._one_line_errors("training continues, without events meanwhile"),
        ):
            # A file ends for TensorBoard where an event is cut off: it is opened only
            # while it can be written, and another one after a failure.
            writer = self._writers.pop(part, None) or self._open(part)
            with writer.as_default(step=step):
                for name, value in values.items():
                    value = tf.constant(value, tf.float32)
                    tf.summary.write(name, value, metadata=self._metadata)
            writer.flush()
            self._writers[part] = writer

    def _try(self, part: str) -> str:
        """Return the directory of a part, in which there is space."""
        directory = os.path.join(self._directory, part)
        if not os.path.lexists(directory):
            os.makedirs(directory)
        # An empty file would be left behind by each attempt on a full disk.
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, _NEEDED_BYTES)
        return directory

    def _open(self, part: str) -> tf.summary.SummaryWriter:
        return tf.summary.create_file_writer(self._try(part))

    def _one_line_errors(self, remedy):
        return one_line_errors(
            f"write TensorBoard's logs to {self._directory}",
            errors=(tf.errors.OpError, OSError),
            remedy=remedy,
            reason_of=reason_of,
        )


def reason_of(error):
    """Return the reason of an `OpError` or `OSError`, in the system's words."""
    if isinstance(error, OSError):
        return error.strerror
    text = _GRAPH_NAMES.sub("", error.message.splitlines()[0])
    return text.rpartition("; ")[2]


def metrics_text(metrics):
    """Return metrics as text, the loss first."""
    names = sorted(metrics, key=lambda name: (name != "loss", name))
    return "  ".join(f"{name} {metrics[name]:.4f}" for name in names)


def _duration(seconds):
    minutes, seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
