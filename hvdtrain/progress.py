"""Watches `fit`: times it, tells how it goes, and stops it when the loss breaks."""

import dataclasses
import math
import time

import keras
import numpy as np

from hvdtrain.job import JobError
from hvdtrain.keras import reduction

_REPORT_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the training of the whole job stands.

    Attributes:
        step: steps taken.
        max_steps: steps to take.
        metrics: means over all ranks and the steps since the last report, by name.
        samples_per_second: of all ranks since the last report.
        seconds_left: estimate for the rest of the training.
    """

    step: int
    max_steps: int
    metrics: dict
    samples_per_second: float
    seconds_left: float


def check_loss(loss, step):
    """Raise `JobError` if `loss`, a mean over all ranks, is not finite."""
    if not math.isfinite(loss):
        raise JobError(
            f"The loss became {loss} before step {step}: training has diverged. Lower "
            "--learning_rate, or add --warmup_epochs."
        )


class Watch(keras.callbacks.Callback):
    """Measures training; tells observers on the chief every few seconds.

    Now and then all ranks average what their metrics show, so that the numbers are
    those of the job, and a loss that is not finite stops all ranks at one step. In
    the same message the chief, whose clock decides, says at which step the next one
    is due: no rank decides by a clock of its own.

    Args:
        plan: the `Plan` of the training.
        global_batch_size: samples of a step of the whole job.
        world: the `World`.
        observers: see `train_and_evaluate`.
        clock: returns seconds.
    """

    def __init__(
        self, plan, global_batch_size, world, observers, *, clock=time.perf_counter
    ):
        super().__init__()
        self._plan = plan
        self._global_batch_size = global_batch_size
        self._world = world
        self._observers = observers
        self._clock = clock
        self._next_step = 0
        self._steps = self._first_steps = self._told_steps = 0
        self._seconds = self._first_seconds = self._told_seconds = 0.0

    @property
    def seconds(self):
        """Seconds in the steps so far; without the ends of epochs: evaluations."""
        return self._seconds

    @property
    def samples_per_second(self):
        """Of all ranks, without the first execution, in which TensorFlow traces."""
        steps, seconds = self._steps, self._seconds
        if steps > self._first_steps:
            steps, seconds = steps - self._first_steps, seconds - self._first_seconds
        return steps * self._global_batch_size / seconds

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock."""
        self._epoch_start_step = epoch * self._plan.epoch_steps
        self._epoch_start_clock = self._clock() - self._seconds
        self._told_means = None

    def on_train_batch_end(self, batch, logs=None):
        """Reads the clock, and tells when it is time."""
        steps = self._epoch_start_step + batch + 1
        self._steps = min(steps, self._plan.max_steps)
        self._seconds = self._clock() - self._epoch_start_clock
        if not self._first_steps:
            self._first_steps, self._first_seconds = self._steps, self._seconds
            self._told_steps, self._told_seconds = self._steps, self._seconds
            self._next_step = self._steps + 1
        if self._steps >= min(self._next_step, self._plan.max_steps):
            self._tell({name: float(value) for name, value in (logs or {}).items()})

    def _tell(self, means):
        recent = self._average(self._since_last(means))
        check_loss(recent["loss"], self._steps)
        samples_left = (self._plan.max_steps - self._steps) * self._global_batch_size
        progress = Progress(
            step=self._steps,
            max_steps=self._plan.max_steps,
            metrics=recent,
            samples_per_second=self._recent_speed() * self._global_batch_size,
            seconds_left=samples_left / self.samples_per_second,
        )
        self._told_steps, self._told_seconds = self._steps, self._seconds
        for observer in self._observers:
            observer.on_progress(progress)

    def _recent_speed(self):
        """Steps per second since the last report."""
        steps, seconds = self._steps, self._seconds
        if steps > self._told_steps:
            steps, seconds = steps - self._told_steps, seconds - self._told_seconds
        return steps / seconds

    def _since_last(self, means):
        """Turn means since the start of the epoch into means since the last report."""
        count = self._steps - self._epoch_start_step
        before, self._told_means = self._told_means, (count, means)
        if before is None:
            return means
        count_before, means_before = before
        return {
            name: (mean * count - means_before[name] * count_before)
            / (count - count_before)
            for name, mean in means.items()
        }

    def _average(self, values):
        """Average over the ranks, and learn from the chief when to do it again."""
        pause = max(1, int(self._recent_speed() * _REPORT_SECONDS))
        if self._world.size > 1:
            sent = [*values.values(), pause if self._world.is_chief else 0]
            sums = reduction.allreduce(
                np.array(sent, "float64"), name="Progress", op=reduction.Sum
            )
            *totals, pause = sums.numpy().tolist()
            means = [total / self._world.size for total in totals]
            values = dict(zip(values, means, strict=True))
        self._next_step = self._steps + int(pause)
        return values
