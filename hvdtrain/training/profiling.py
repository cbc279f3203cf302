"""TensorFlow's profiler for some steps of a training."""

import os
import warnings
from collections.abc import Callable

import keras
import tensorflow as tf

from hvdtrain.job import JobError
from hvdtrain.training.specs import Plan


def check_profile_steps(steps: tuple[int, int] | None, max_steps: int) -> None:
    """Raise `JobError` unless the steps are within the run."""
    if steps and steps[1] > max_steps:
        raise JobError(
            f"Received --profile_steps={steps[0]},{steps[1]} for a run of {max_steps} "
            "steps; expected steps within it."
        )


class ProfileCallback(keras.callbacks.Callback):
    """Profiles this rank, once, where TensorBoard's plugin `profile` finds it.

    `keras.callbacks.TensorBoard` counts executions instead of steps, and from the
    start of each run.

    Args:
        directory: the parent of `plugins/profile`.
        steps: global steps taken before the first and after the last profiled step.
            The executions that contain them are profiled to their ends.
    """

    def __init__(
        self, directory: str | os.PathLike[str], plan: Plan, *, steps: tuple[int, int]
    ) -> None:
        super().__init__()
        self._directory = str(directory)
        self._plan = plan
        self._first, self._last = steps
        self._is_running = False

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        step = self._plan.step(self._epoch, batch)
        end = step + self._plan.steps_per_execution
        if end > self._first and step < self._last and not self._is_running:
            self._is_running = self._try(
                tf.profiler.experimental.start, self._directory
            )

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self._plan.step(self._epoch, batch + 1) >= self._last:
            self._stop()

    def on_train_end(self, logs: dict | None = None) -> None:
        # The training may end before the last step to profile.
        self._stop()

    def _stop(self) -> None:
        if self._is_running:
            self._is_running = False
            self._try(tf.profiler.experimental.stop)

    def _try(self, function: Callable[..., None], *arguments: str) -> bool:
        try:
            function(*arguments)
        except tf.errors.OpError as error:
            # Only warn, as for the logs: the training is worth more than its profile.
            reason = error.message.splitlines()[0]
            warnings.warn(f"No profile in {self._directory}: {reason}", stacklevel=2)
            return False
        return True
