"""Global steps and epochs of `fit`: the only place that converts them."""

import dataclasses
import math

from hvdtrain.training.checkpoint.header import Header
from hvdtrain.training.specs import TrainSpec

# An execution is the work between two calls of callbacks. Python's part of it costs
# about as much as a step of a small model.
_MAX_STEPS_PER_EXECUTION = 20
_SAMPLES_PER_EXECUTION = 2560
# Short runs still report a few times.
_MIN_EXECUTIONS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How `fit` goes through the steps of a `TrainSpec`.

    An epoch of `fit` is a pass over the data. It consists of executions, of which the
    last may have fewer steps than the others. They depend on the `TrainSpec` only: what
    is a function of an execution, such as a learning rate, depends neither on the speed
    of the machine nor on the step at which a job continues.

    Attributes:
        fit_epoch_steps: steps of every epoch of `fit`; the last may have fewer.
        steps_per_execution: steps between two calls of callbacks.
    """

    max_steps: int
    epochs: int
    fit_epoch_steps: int
    steps_per_execution: int

    @classmethod
    def of(cls, spec: TrainSpec) -> "Plan":
        execution = spec.steps_per_execution or (
            # Callbacks may count batches.
            1
            if spec.callbacks
            else fast_steps_per_execution(
                local_batch_size=spec.local_batch_size, max_steps=spec.max_steps
            )
        )
        return cls(
            max_steps=spec.max_steps,
            epochs=math.ceil(spec.max_steps / spec.pass_steps),
            fit_epoch_steps=spec.pass_steps,
            steps_per_execution=execution,
        )

    def with_epochs_of(self, header: Header) -> "Plan":
        """Return the plan with the epochs of the run that wrote a checkpoint.

        Another number of ranks, or of steps, would give epochs of another length.
        """
        steps = header.fit_epoch_steps
        return dataclasses.replace(
            self,
            epochs=math.ceil(self.max_steps / steps),
            fit_epoch_steps=steps,
            steps_per_execution=header.steps_per_execution,
        )

    def execution(self, step: int) -> tuple[int, int]:
        """Return the bounds of the execution that contains `step`, in steps."""
        epoch, offset = divmod(step, self.fit_epoch_steps)
        first = step - offset % self.steps_per_execution
        return first, min(first + self.steps_per_execution, self.step(epoch + 1))

    def is_epoch_end(self, step: int) -> bool:
        """Return whether an epoch of `fit` ends after `step` steps."""
        return step == self.max_steps or step % self.fit_epoch_steps == 0

    def step(self, epoch: int, batch: int = 0) -> int:
        """Return the number of steps before `batch` of this epoch of `fit`."""
        return min(epoch * self.fit_epoch_steps + batch, self.max_steps)


def fast_steps_per_execution(*, local_batch_size: int, max_steps: int) -> int:
    """Return the steps of an execution that make short steps fast."""
    steps = min(
        _MAX_STEPS_PER_EXECUTION,
        _SAMPLES_PER_EXECUTION // local_batch_size,
        max_steps // _MIN_EXECUTIONS,
    )
    return max(1, steps)
