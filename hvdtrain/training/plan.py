"""Global steps and epochs of `fit`: the only place that converts them."""

import dataclasses
import math

# An execution is one call of the compiled train function. Python's part of it costs
# about as much as a step of a small model.
_MAX_STEPS_PER_EXECUTION = 20
# Nothing is reported before its end, so that long steps take fewer.
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
        execution = spec.steps_per_execution or (
            # Callbacks may count batches.
            1
            if spec.callbacks
            else fast_steps_per_execution(
                local_batch_size=spec.local_batch_size, max_steps=spec.max_steps
            )
        )
        epochs = max(1, round(spec.max_steps / spec.pass_steps))
        executions = math.ceil(spec.max_steps / epochs / execution)
        fit_epoch_steps = executions * execution
        return cls(
            max_steps=spec.max_steps,
            epochs=math.ceil(spec.max_steps / fit_epoch_steps),
            fit_epoch_steps=fit_epoch_steps,
            steps_per_execution=execution,
        )

    def as_before(self, metadata):
        """Return the plan with the epochs of the run that wrote a checkpoint.

        Another number of ranks, or of steps, would give epochs of another length.

        Args:
            metadata: of the checkpoint; empty for a new job.
        """
        if not metadata:
            return self
        steps = metadata["fit_epoch_steps"]
        return dataclasses.replace(
            self,
            epochs=math.ceil(self.max_steps / steps),
            fit_epoch_steps=steps,
            steps_per_execution=metadata["steps_per_execution"],
        )

    def segments(self, start_step):
        """Return the calls of `fit` for the steps from `start_step` to `max_steps`.

        Where that is within an epoch of `fit`, the rest of this epoch is a call of its
        own: all epochs of one call have the same number of steps.
        """
        epoch, offset = divmod(start_step, self.fit_epoch_steps)
        found = []
        if offset:
            end = self.step(epoch + 1)
            found.append(Segment(start_step, end, epoch, epoch + 1, end - start_step))
            epoch += 1
        if epoch < self.epochs:
            steps = self.fit_epoch_steps
            start = self.step(epoch)
            found.append(Segment(start, self.max_steps, epoch, self.epochs, steps))
        return found

    def is_epoch_end(self, step):
        """Whether an epoch of `fit` ends after `step` steps."""
        return step == self.max_steps or step % self.fit_epoch_steps == 0

    def step(self, epoch, batch=0):
        """Return the number of steps before `batch` of this epoch of `fit`."""
        return min(epoch * self.fit_epoch_steps + batch, self.max_steps)


@dataclasses.dataclass(frozen=True)
class Segment:
    """The arguments of one call of `fit`.

    Attributes:
        start_step: steps before it.
        end_step: steps after it.
        first_epoch: number of its first epoch.
        end_epoch: number of the epoch after its last.
        epoch_steps: steps of each of its epochs; the last may have fewer.
    """

    start_step: int
    end_step: int
    first_epoch: int
    end_epoch: int
    epoch_steps: int


def fast_steps_per_execution(*, local_batch_size, max_steps):
    """Return the steps of an execution that make short steps fast."""
    steps = min(
        _MAX_STEPS_PER_EXECUTION,
        _SAMPLES_PER_EXECUTION // local_batch_size,
        max_steps // _MIN_EXECUTIONS,
    )
    return max(1, steps)
