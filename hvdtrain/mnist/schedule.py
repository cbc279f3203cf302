"""The length of a training, and its learning rate as a function of the global step."""

import dataclasses
import math

import keras

from hvdtrain.data import Sampler
from hvdtrain.job import JobError
from hvdtrain.keras.learning_rates import set_learning_rate, warmup_factor
from hvdtrain.training.specs import Plan

_DEFAULT_MAX_STEPS = 10_000


def count_steps(
    sampler: Sampler,
    *,
    size: int,
    epochs: int | None = None,
    max_steps: int | None = None,
    accumulation_steps: int = 1,
) -> int:
    """Return the number of batches that each rank takes, in full accumulation windows.

    Args:
        size: number of replicas that share `max_steps`.
        epochs: passes over the data.
        max_steps: without `epochs`, the batches of all ranks together.
        accumulation_steps: batches of a rank per update of the weights.

    Raises:
        JobError: the training is too short for one update.
    """
    window = accumulation_steps
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
            f"Received --max_steps={max_steps} for {size} replicas of the model with "
            f"--accumulation_steps={window}; expected {size * window} or more, "
            "for one update of the weights."
        )
    return steps


def check_warmup(warmup_epochs: float, *, epochs: float) -> None:
    """Raise `JobError` if the warm-up is longer than the training."""
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
        size: number of replicas; the warm-up starts from `learning_rate / size`.
        max_steps: steps of the training.
        warmup_steps: steps of the warm-up, 0 for none; may be a fraction.
        offset: added to each step, for a job whose global batch has changed: the steps
            that the samples until then take with the present batch, minus the steps
            that were taken.
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
    def is_constant(self) -> bool:
        """Whether all steps have one rate."""
        return not self.warmup_steps and self.decay == "none"

    def rate(self, step: int, end_step: int) -> float:
        """Return the rate of an execution, the steps from `step` to `end_step`.

        In the warm-up it is the rate of the last step, so that the warm-up reaches
        `learning_rate` for any number of steps per execution. In the decay it is the
        rate of the first step.
        """
        first, last = step + self.offset, end_step + self.offset
        if first < self.warmup_steps:
            factor = warmup_factor(last / self.warmup_steps, size=self.size)
            return self.learning_rate * factor
        if self.decay == "cosine":
            decay_steps = self.max_steps + self.offset - self.warmup_steps
            progress = (first - self.warmup_steps) / decay_steps
            return self.learning_rate * ((1 + math.cos(math.pi * progress)) / 2)
        return self.learning_rate


class LearningRateCallback(keras.callbacks.Callback):
    """Sets the learning rate of each execution, and logs it as `lr`."""

    def __init__(self, schedule: Schedule, plan: Plan) -> None:
        super().__init__()
        self._schedule = schedule
        self._plan = plan

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        # An execution does not cross the end of an epoch.
        end = min(batch + self._plan.steps_per_execution, self._plan.fit_epoch_steps)
        step = self._plan.step(self._epoch, batch)
        end_step = self._plan.step(self._epoch, end)
        rate = self._schedule.rate(step, end_step)
        set_learning_rate(self.model.optimizer, rate)

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate.numpy())
