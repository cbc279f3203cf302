"""The length of a run, and its learning rate as a function of the global step."""

import dataclasses
import math

import keras

from hvdtrain.job import JobError
from hvdtrain.keras.learning_rates import set_learning_rate

_DEFAULT_MAX_STEPS = 10_000


def steps_of_run(
    sampler, *, size=None, epochs=None, max_steps=None, accumulation_steps=1
):
    """Return the number of batches that each rank takes: whole accumulation windows.

    Args:
        sampler: a `Sampler`.
        size: number of ranks that share `max_steps`; by default those of the shard.
        epochs: passes over the data, or None.
        max_steps: without `epochs`, the batches of all ranks together.
        accumulation_steps: batches of a rank per update of the weights.

    Raises:
        JobError: the run is too short for one update.
    """
    window, size = accumulation_steps, size or sampler.size
    if epochs:
        steps = sampler.steps(epochs)
        if window > steps:
            raise JobError(
                f"Received --accumulation_steps={window} for a run of {steps} steps; "
                "expected no more than these, for one update of the weights."
            )
        return math.ceil(steps / window) * window
    max_steps = max_steps or _DEFAULT_MAX_STEPS
    steps = max_steps // (size * window) * window
    if not steps:
        raise JobError(
            f"Received --max_steps={max_steps} for {size} ranks with "
            f"--accumulation_steps={window}; expected {size * window} or more, "
            "for one update of the weights."
        )
    return steps


def check_warmup(warmup_epochs, *, epochs):
    """Raise `JobError` if the warm-up is longer than the run."""
    if warmup_epochs > epochs:
        raise JobError(
            f"Received --warmup_epochs={warmup_epochs:g} for a run of {epochs:.3g} "
            "epochs; expected no more than these: the learning rate would never reach "
            "its full size."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate with linear warm-up and decay.

    Attributes:
        learning_rate: the rate after the warm-up.
        size: number of ranks; the warm-up starts from `learning_rate / size`.
        max_steps: steps of the run.
        warmup_steps: steps of the warm-up, 0 for none; may be a fraction.
        offset: added to each step, where the global batch was another one before: the
            steps that the samples before would take with this one, less those taken.
        decay: "none", or "cosine" for a decay to 0 (Loshchilov and Hutter 2017,
            arXiv:1608.03983, without restarts).
    """

    learning_rate: float
    size: int
    max_steps: int
    warmup_steps: float = 0.0
    decay: str = "none"
    offset: float = 0.0

    @property
    def is_constant(self):
        """Whether all steps have one rate."""
        return not self.warmup_steps and self.decay == "none"

    def rate(self, step, end_step):
        """Return the rate of an execution, the steps from `step` to `end_step`.

        The warm-up has the value of the last of them, and so reaches `learning_rate`
        for any number of steps per execution. The decay has the value of the first.
        """
        step, end_step = step + self.offset, end_step + self.offset
        if step < self.warmup_steps:
            progress = min(1.0, end_step / self.warmup_steps)
            return self.learning_rate * ((1 + (self.size - 1) * progress) / self.size)
        if self.decay == "cosine":
            decay_steps = self.max_steps + self.offset - self.warmup_steps
            progress = (step - self.warmup_steps) / decay_steps
            return self.learning_rate * ((1 + math.cos(math.pi * progress)) / 2)
        return self.learning_rate


class LearningRateCallback(keras.callbacks.Callback):
    """Sets the learning rate of each execution, and logs it as `lr`.

    Args:
        schedule: a `Schedule`.
        plan: the `Plan` of the training.
    """

    def __init__(self, schedule, plan):
        super().__init__()
        self._schedule = schedule
        self._plan = plan

    def on_epoch_begin(self, epoch, logs=None):
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        """Sets the rate, and scales the momentum with it."""
        # An execution does not cross the end of an epoch.
        end = min(batch + self._plan.steps_per_execution, self._plan.fit_epoch_steps)
        step = self._plan.step(self._epoch, batch)
        end_step = self._plan.step(self._epoch, end)
        rate = self._schedule.rate(step, end_step)
        set_learning_rate(self.model.optimizer, rate)

    def on_epoch_end(self, epoch, logs=None):
        """Logs the rate."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate.numpy())
