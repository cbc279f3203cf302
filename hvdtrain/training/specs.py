"""The arguments and the result of `train_and_evaluate`.

The names come from TensorFlow's Estimator, which TensorFlow removed in 2.16.
docs/training.md lists what differs.
"""

import dataclasses
import json
import math
import operator
import signal
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.checkpoint.header import Header, Position
from hvdtrain.events import RunStart
from hvdtrain.job import JobError
from hvdtrain.job.files import is_address, local_path, path_or_address
from hvdtrain.training.exporting import Exporter


def _check_numbers(spec: object, **lowest: float) -> None:
    for name, low in lowest.items():
        # Not `<`: NaN must fail too.
        if not getattr(spec, name) >= low:
            raise JobError(
                f"Received {name}={getattr(spec, name)}; expected {low} or more."
            )


def _check_integers(spec: object, **lowest: int) -> None:
    """Check fields, and make them `int`: NumPy's integers are not written as JSON."""
    for name, low in lowest.items():
        received = getattr(spec, name)
        # None is accepted where it is the default, which the class has.
        if received is None and getattr(type(spec), name, low) is None:
            continue
        try:
            value = operator.index(received)
        except TypeError:
            value = None
        if value is None or value < low:
            raise JobError(
                f"Received {name}={received}; expected {low} or more, an integer."
            )
        object.__setattr__(spec, name, value)


def _as_python(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _as_in_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return values as they are after they were written as JSON and read."""
    try:
        return json.loads(json.dumps(values, default=_as_python))
    except (TypeError, ValueError) as error:
        raise JobError(
            f"Received unchanged={values}; expected values that JSON can hold: {error}."
        ) from None


def _check_dataset(spec: object, received: object) -> tf.data.Dataset:
    if not isinstance(received, tf.data.Dataset):
        raise JobError(
            f"Received {type(received).__name__} from {type(spec).__name__}.input_fn; "
            "expected a tf.data.Dataset, such as data.batches(source, ...) or "
            "tf.data.Dataset.from_tensor_slices(arrays)."
        )
    return received


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """What to train on, and how long.

    Attributes:
        input_fn: `input_fn(start_step, end_step)` returns a `tf.data.Dataset` of
            the batches of this rank for these steps. Batches after them are not read.
        max_steps: global steps of the whole job, over all its runs: batches that each
            rank takes. `optimizer.iterations` counts the same without gradient
            accumulation; with `gradient_accumulation_steps`, it counts updates.
        pass_steps: batches in a pass over the data, which is an epoch of `fit`.
        local_batch_size: samples in a batch of this rank. Where ranks have different
            numbers, each rank's gradient is weighted by its samples.
        callbacks: `callbacks(plan)` returns more Keras callbacks, for the `Plan`.
        steps_per_execution: steps between two calls of callbacks, 0 for as many as make
            short steps fast. By default 1 if there are `callbacks`, and otherwise 0.
        repeat: where the input of a rank ends, take it from its start again, as the
            next pass over the data. By default an early end is an error.
        scale_from: the `Position` from which `input_fn` and `max_steps` are computed.
            With it each rank keeps its batch when the number of ranks changes: the
            global batch and the learning rate follow it. None keeps the global batch.
        check_input: at each start of a job that can continue, check that `input_fn` is
            a function of the steps, by the batches of its first two. False for an
            input that draws without a seed: a job that continues then takes other
            batches than the uninterrupted one.
    """

    input_fn: Callable[[int, int], tf.data.Dataset]
    max_steps: int
    pass_steps: int
    local_batch_size: int
    callbacks: Callable[["Plan"], Sequence[keras.callbacks.Callback]] | None = None
    steps_per_execution: int | None = None
    repeat: bool = False
    scale_from: Position | None = None
    check_input: bool = True

    def __post_init__(self) -> None:
        _check_integers(
            self, max_steps=1, pass_steps=1, local_batch_size=1, steps_per_execution=0
        )
        if self.repeat and self.scale_from:
            raise JobError(
                "Received repeat and scale_from; expected one of them: an input that "
                "repeats has no positions of samples. Use hvdtrain.data.Sampler."
            )

    def batches(self, start_step: int, end_step: int) -> tf.data.Dataset:
        if not self.repeat:
            return _check_dataset(self, self.input_fn(start_step, end_step))
        # The length of a pass is not known: a job that continues reads it again.
        one_pass = _check_dataset(self, self.input_fn(0, self.max_steps))
        return one_pass.repeat().skip(start_step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """What to evaluate on, and when. There is always an evaluation at the end.

    Attributes:
        input_fn: returns a `tf.data.Dataset` of this rank's samples of the test set.
            Each sample of the test set is on one rank. None for no evaluation:
            `Result.test_metrics` is empty then.
        steps: batches of each rank that are evaluated, None for all.
        every_epochs: evaluate also after so many epochs of `fit`, 0 for never.
        throttle_steps: evaluate also after so many steps, 0 for never.
        throttle_seconds: evaluate also after so many seconds, 0 for never.
        exporters: see `exporters`; they write the model that was evaluated to
            `RunConfig.model_dir`.
    """

    input_fn: Callable[[], tf.data.Dataset] | None
    steps: int | None = None
    every_epochs: int = 0
    throttle_steps: int = 0
    throttle_seconds: float = 0.0
    exporters: Sequence[Exporter] = ()

    def __post_init__(self) -> None:
        _check_integers(self, steps=1, every_epochs=0, throttle_steps=0)
        _check_numbers(self, throttle_seconds=0)

    def batches(self) -> tf.data.Dataset | None:
        if self.input_fn is None:
            return None
        dataset = _check_dataset(self, self.input_fn())
        is_infinite = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        if is_infinite and self.steps is None:
            raise JobError(
                "Received a dataset without end from EvalSpec.input_fn; expected one "
                "pass over the test set: leave out repeat(), or set EvalSpec.steps."
            )
        return dataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the state of a job is kept.

    Attributes:
        model_dir: directory of the checkpoints, on a file system that rank 0 sees, or
            an address in an object store, such as s3://bucket/run. The job continues
            from the newest valid one there. ~ is expanded. None for no checkpoints.
        local_dir: for a model_dir in a store, a directory of rank 0's host where
            checkpoints are written first. Some of them are uploaded, see
            `upload_every_steps`; a job continues from the newest of both. By default
            each checkpoint is uploaded at once.
        seed: of initial weights and of random layers, set before `model_fn` is called;
            None for the seed of `job.start`.
        save_every_steps: steps between checkpoints, 0 for none.
        save_every_seconds: seconds between checkpoints, 0 for none. There is always
            one at the end.
        upload_every_steps: with a local_dir, steps between uploaded checkpoints, 0 for
            none. A checkpoint is uploaded when it is written to local_dir. The last one
            of a run always is.
        upload_every_seconds: the same in seconds.
        stop_on_failed_save: stop the job if a checkpoint cannot be written. By default
            this is reported, and training goes on.
        skip_nonfinite: leave out, on all ranks, updates whose gradients are not finite,
            and count them. By default such a loss ends the job.
        max_minutes: the job stops after so many minutes, so that it can be continued;
            0 for no limit.
        commit_every_steps: in an elastic job, steps between copies into memory, 0 for
            none; the steps since the last one are taken again when a worker is lost.
        commit_every_seconds: the same in seconds.
        stop_signals: signals that stop the job in the same way, on any rank. Only with
            a model_dir: without one, they end the job at once.
        keep_max: number of the newest checkpoints that are kept, in local_dir, too.
        keep_every_hours: in addition, one of every so many hours; 0 for none.
        unchanged: values by name with which a job has to be continued, such as the
            name of the data set, and the seed of the order of its samples.
    """

    model_dir: str | None = None
    local_dir: str | None = None
    seed: int | None = None
    save_every_steps: int = 0
    save_every_seconds: float = 600.0
    upload_every_steps: int = 0
    upload_every_seconds: float = 600.0
    stop_on_failed_save: bool = False
    skip_nonfinite: bool = False
    max_minutes: float = 0.0
    commit_every_steps: int = 0
    commit_every_seconds: float = 5.0
    stop_signals: tuple[signal.Signals, ...] = (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )
    keep_max: int = 5
    keep_every_hours: float = 0.0
    unchanged: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_integers(
            self,
            seed=0,
            save_every_steps=0,
            upload_every_steps=0,
            commit_every_steps=0,
            keep_max=1,
        )
        _check_numbers(
            self,
            save_every_seconds=0,
            upload_every_seconds=0,
            max_minutes=0,
            commit_every_seconds=0,
            keep_every_hours=0,
        )
        if self.model_dir is not None:
            object.__setattr__(self, "model_dir", path_or_address(self.model_dir))
        if self.local_dir is not None:
            object.__setattr__(self, "local_dir", local_path(self.local_dir))
            if not (self.model_dir and is_address(self.model_dir)):
                raise JobError(
                    f"Received local_dir={self.local_dir} and model_dir="
                    f"{self.model_dir}; expected a model_dir in a store, such as "
                    "s3://bucket/run: leave out local_dir."
                )
        object.__setattr__(self, "unchanged", _as_in_json(self.unchanged))
        if self.max_minutes and not self.model_dir:
            raise JobError(
                f"Received max_minutes={self.max_minutes:g} without model_dir; "
                "expected a directory for the checkpoint from which the job continues."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of `train_and_evaluate`, the same on all ranks except for the times.

    Attributes:
        history: the metrics of each epoch over the samples of all ranks, as lists by
            name, from the start of the job.
        test_metrics: by name, over the whole test set.
        start: what this run consists of, and from which step it has continued.
        step: the last step of the model and of its metrics.
        train_seconds: in `fit`, without evaluation, of all runs of the job.
        samples_per_second: of all ranks in this run, without the first execution
            (tracing); 0 if it had nothing to train.
        skipped_updates: left out by `RunConfig.skip_nonfinite`, in all runs of the job.
    """

    model: keras.Model
    start: RunStart
    history: dict[str, list[Any]]
    test_metrics: dict[str, Any]
    step: int
    train_seconds: float
    samples_per_second: float
    skipped_updates: int

    @property
    def start_step(self) -> int:
        """The step that this run has continued from, 0 for a new job."""
        return self.start.step

    @property
    def train_metrics(self) -> dict[str, float]:
        """The metrics of the last epoch by name, except metrics that are arrays."""
        last = {name: values[-1] for name, values in self.history.items()}
        return {
            name: float(value) for name, value in last.items() if np.ndim(value) == 0
        }


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
        global_batch_size: samples of a step of the whole job.
        start_step: steps of earlier runs of the job, whose global batch may have had
            another size.
        start_sample: samples that these steps took.
    """

    max_steps: int
    epochs: int
    fit_epoch_steps: int
    steps_per_execution: int
    global_batch_size: int
    start_step: int = 0
    start_sample: int = 0

    @classmethod
    def of(cls, spec: TrainSpec, *, global_batch_size: int) -> "Plan":
        execution = spec.steps_per_execution
        if execution is None and spec.callbacks:
            # Callbacks may count batches.
            execution = 1
        execution = execution or fast_steps_per_execution(
            local_batch_size=spec.local_batch_size, max_steps=spec.max_steps
        )
        return cls(
            max_steps=spec.max_steps,
            epochs=math.ceil(spec.max_steps / spec.pass_steps),
            fit_epoch_steps=spec.pass_steps,
            steps_per_execution=execution,
            global_batch_size=global_batch_size,
        )

    def continued_from(self, header: Header) -> "Plan":
        """Return the plan with the start and the epochs of a checkpoint.

        Another number of ranks, or of steps, would give epochs of another length.
        """
        steps = header.fit_epoch_steps
        return dataclasses.replace(
            self,
            epochs=math.ceil(self.max_steps / steps),
            fit_epoch_steps=steps,
            steps_per_execution=header.steps_per_execution,
            start_step=header.step,
            start_sample=header.sample,
        )

    def samples(self, step: int) -> int:
        """Return the number of samples that all ranks have taken before `step`."""
        return self.start_sample + (step - self.start_step) * self.global_batch_size

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
