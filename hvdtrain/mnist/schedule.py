"""The length of a training, and its learning rate as a function of the global step."""

import dataclasses
import math

import keras

from hvdtrain.job import JobError
from hvdtrain.keras.learning_rates import set_learning_rate, warmup_factor
from hvdtrain.mnist.options import ClassifierOptions
from hvdtrain.training.specs import Plan

_DEFAULT_MAX_STEPS = 10_000


def count_steps(options: ClassifierOptions, num_samples: int, ranks: int) -> int:
    """Return the number of batches of each rank, in full accumulation windows.

    Args:
        num_samples: of the training set.
        ranks: number of ranks, or of replicas of a sharded model.

    Raises:
        JobError: the training is too short for one update, or for its warm-up.
    """
    window = options.accumulation_steps
    global_batch_size = options.batch_size * ranks
    if options.epochs:
        steps = -(-options.epochs * num_samples // global_batch_size)
        if window > steps:
            raise JobError(
                f"Received --accumulation_steps={window} for a run of {steps} steps; "
                "expected no more than these, for one update of the weights."
            )
        steps = math.ceil(steps / window) * window
    else:
        max_steps = options.max_steps or _DEFAULT_MAX_STEPS
        steps = max_steps // (ranks * window) * window
        if not steps:
            raise JobError(
                f"Received --max_steps={max_steps} for {ranks} replicas of the model "
                f"with --accumulation_steps={window}; expected {ranks * window} or "
                "more, for one update of the weights."
            )
    epochs = options.epochs or steps * global_batch_size / num_samples
    if options.warmup_epochs > epochs:
        raise JobError(
            f"Received --warmup_epochs={options.warmup_epochs:g} for a run of "
            f"{epochs:.3g} epochs; expected no more than these: the learning rate "
            "would never reach its full size."
        )
    return steps


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

    @classmethod
    def of(cls, options: ClassifierOptions, num_samples: int, plan: Plan) -> "Schedule":
        """Return the schedule of a training, by its flags."""
        ranks = plan.global_batch_size // options.batch_size
        pass_steps = math.ceil(num_samples / plan.global_batch_size)
        return cls(
            learning_rate=options.local_learning_rate * ranks,
            size=ranks,
            max_steps=plan.max_steps,
            warmup_steps=options.warmup_epochs * pass_steps,
            decay=options.decay,
            offset=plan.samples(0) / plan.global_batch_size,
        )

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
