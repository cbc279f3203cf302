"""TensorFlow's profiler for some steps of a training."""

import warnings

import keras
import tensorflow as tf

from hvdtrain.job import JobError


def check_profile_steps(steps, max_steps):
    """Raise `JobError` unless `steps`, a pair or None, are within the run."""
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
        plan: the `Plan` of the training.
        steps: the global steps before the first and after the last profiled one; the
            executions that contain them are profiled whole.
    """

    def __init__(self, directory, plan, *, steps):
        super().__init__()
        self._directory = str(directory)
        self._plan = plan
        self._first, self._last = steps
        self._is_running = False

    def on_epoch_begin(self, epoch, logs=None):
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the profiler before the execution that contains the first step."""
        step = self._plan.step(self._epoch, batch)
        end = step + self._plan.steps_per_execution
        if end > self._first and step < self._last and not self._is_running:
            self._is_running = self._try(
                tf.profiler.experimental.start, self._directory
            )

    def on_train_batch_end(self, batch, logs=None):
        """Stops it after the execution that contains the last step."""
        if self._plan.step(self._epoch, batch + 1) >= self._last:
            self._stop()

    def on_train_end(self, logs=None):
        """Stops it if the training ends before."""
        self._stop()

    def _stop(self):
        if self._is_running:
            self._is_running = False
            self._try(tf.profiler.experimental.stop)

    def _try(self, function, *arguments):
        try:
            function(*arguments)
        except tf.errors.OpError as error:
            # As with the logs: the training is worth more than its profile.
            reason = error.message.splitlines()[0]
            warnings.warn(f"No profile in {self._directory}: {reason}", stacklevel=2)
            return False
        return True
