"""Global steps and epochs of `fit`: the only place that converts them."""

import dataclasses
import math

# An execution is one call of the compiled train function. Python's part of it costs
# about as much as a step of a small model, ...
_MAX_STEPS_PER_EXECUTION = 20
# ... and nothing is reported before its end, so that long steps take fewer.
_SAMPLES_PER_EXECUTION = 2560
# Short runs still report a few times.
_MIN_EXECUTIONS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How `fit` goes through the steps of a `TrainSpec`.

    An epoch of `fit` is the multiple of `steps_per_execution` that is close to a pass
    over the data and gives epochs of about equal length.

    Attributes:
        max_steps: steps in all.
        epochs: epochs of `fit`.
        fit_epoch_steps: steps of every epoch of `fit`; the last may have fewer.
        steps_per_execution: steps per call of the compiled train function.
    """

    max_steps: int
    epochs: int
    fit_epoch_steps: int
    steps_per_execution: int

    @classmethod
    def of(cls, spec):
        """Return the plan for a `TrainSpec`."""
        execution = spec.steps_per_execution or _steps_per_execution(spec)
        epochs = max(1, round(spec.max_steps / spec.pass_steps))
        executions = math.ceil(spec.max_steps / epochs / execution)
        fit_epoch_steps = executions * execution
        return cls(
            max_steps=spec.max_steps,
            epochs=math.ceil(spec.max_steps / fit_epoch_steps),
            fit_epoch_steps=fit_epoch_steps,
            steps_per_execution=execution,
        )

    def step(self, epoch, batch=0):
        """Return the number of steps before `batch` of this epoch of `fit`."""
        return min(epoch * self.fit_epoch_steps + batch, self.max_steps)


def _steps_per_execution(spec):
    return max(
        1,
        min(
            _MAX_STEPS_PER_EXECUTION,
            _SAMPLES_PER_EXECUTION // spec.local_batch_size,
            spec.max_steps // _MIN_EXECUTIONS,
        ),
    )
