"""Train and evaluate a Keras model on all ranks: `fit` is the loop."""

import dataclasses
import math
import warnings
from collections.abc import Callable

import keras
import tensorflow as tf

from hvdtrain.job import JobError
from hvdtrain.keras import callbacks as hvd_callbacks
from hvdtrain.keras import metrics
from hvdtrain.progress import Watch, check_loss

# Python looks at a step that takes a millisecond only once in so many steps, ...
_MAX_STEPS_PER_EXECUTION = 20
# ... and at each step of more multiply-adds than this.
_LONG_STEP = 200_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """What to train on, and how long.

    Attributes:
        input_fn: `input_fn(start_step, end_step)` returns a `tf.data.Dataset` of
            the batches of this rank for these steps.
        max_steps: batches that each rank takes; the same on all ranks.
        epoch_steps: batches per pass over the data; training metrics start anew
            about that often.
        local_batch_size: samples in a batch of one rank.
        callbacks: `callbacks(plan)` returns more Keras callbacks, for the `Plan`.
        steps_per_execution: steps between two looks of Python, None to choose.
    """

    input_fn: Callable
    max_steps: int
    epoch_steps: int
    local_batch_size: int
    callbacks: Callable = lambda plan: ()
    steps_per_execution: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """What to evaluate on, and when besides at the end.

    Attributes:
        input_fn: returns a `tf.data.Dataset` of this rank's part of the test set.
        every_epochs: evaluate also after so many epochs, 0 for at the end only.
    """

    input_fn: Callable
    every_epochs: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What `train_and_evaluate` returns, the same on all ranks but for the times.

    Attributes:
        model: the trained model.
        train_metrics: by name, over the samples of all ranks in the last epoch.
        test_metrics: by name, over the whole test set.
        train_seconds: in `fit`, evaluation left out.
        samples_per_second: of all ranks, the first execution (tracing) left out.
    """

    model: keras.Model
    train_metrics: dict
    test_metrics: dict
    train_seconds: float
    samples_per_second: float


def train_and_evaluate(model, train_spec, eval_spec, *, world, observers=()):
    """Train a model on all ranks, then evaluate it over the whole test set.

    Args:
        model: a compiled model whose optimizer is distributed.
        train_spec: a `TrainSpec`.
        eval_spec: an `EvalSpec`.
        world: the `World`.
        observers: objects that are told on the chief how it goes. They have
            `on_progress(progress)`, called with a `Progress` every few seconds, and
            `on_evaluation(step, metrics)`, called after each evaluation.

    Returns:
        A `Result`.

    Raises:
        JobError: on all ranks, when the loss is not finite.
    """
    plan = Plan.of(train_spec, weights=model.count_params())
    model.steps_per_execution = plan.steps_per_execution
    observers = observers if world.is_chief else ()
    evaluation = _Evaluation(eval_spec, plan, observers)
    watch = Watch(plan, train_spec.local_batch_size * world.size, world, observers)
    history = _fit(
        model,
        train_spec.input_fn(0, plan.max_steps),
        plan,
        callbacks=[
            hvd_callbacks.BroadcastGlobalVariablesCallback(0),
            hvd_callbacks.MetricAverageCallback(),
            *train_spec.callbacks(plan),
            watch,
            evaluation,
        ],
    )
    return Result(
        model=model,
        train_metrics={name: float(values[-1]) for name, values in history.items()},
        test_metrics=evaluation.metrics,
        train_seconds=watch.seconds,
        samples_per_second=watch.samples_per_second,
    )


def _fit(model, batches, plan, *, callbacks):
    # Keras asks for the number of batches; an unbatched data set does not know it.
    batches = batches.apply(tf.data.experimental.assert_cardinality(plan.max_steps))
    with warnings.catch_warnings():
        # The last epoch may be shorter than the others: that is the plan.
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        try:
            return model.fit(
                batches,
                epochs=plan.epochs,
                steps_per_epoch=plan.epoch_steps,
                callbacks=callbacks,
                shuffle=False,
                verbose=0,
            ).history
        except hvd_callbacks.DesynchronizedError as error:
            raise JobError(str(error)) from None


def evaluate(model, batches):
    """Return the model's metrics over the samples of all ranks, by name.

    Args:
        model: a compiled model, the same on all ranks.
        batches: a `tf.data.Dataset` of this rank's samples; ranks may have
            different numbers of them.
    """
    model.evaluate(batches, verbose=0)
    return metrics.reduce_metrics(model.metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How `fit` goes through the steps of a `TrainSpec`.

    Attributes:
        max_steps: steps in all.
        epochs: epochs of `fit`.
        epoch_steps: steps of an epoch but the last, which may have fewer: the
            multiple of `steps_per_execution` that comes close to a pass over the
            data and makes the epochs about equal.
        steps_per_execution: steps between two looks of Python.
    """

    max_steps: int
    epochs: int
    epoch_steps: int
    steps_per_execution: int

    @classmethod
    def of(cls, spec, *, weights):
        """Return the plan for a `TrainSpec` and a model of so many weights."""
        execution = spec.steps_per_execution or _steps_per_execution(
            spec.max_steps, multiply_adds=weights * spec.local_batch_size
        )
        epochs = max(1, round(spec.max_steps / spec.epoch_steps))
        epoch_steps = math.ceil(spec.max_steps / epochs / execution) * execution
        return cls(
            max_steps=spec.max_steps,
            epochs=math.ceil(spec.max_steps / epoch_steps),
            epoch_steps=epoch_steps,
            steps_per_execution=execution,
        )


def _steps_per_execution(max_steps, *, multiply_adds):
    # Short runs look more often, to have something to show.
    return max(
        1,
        min(_MAX_STEPS_PER_EXECUTION, _LONG_STEP // multiply_adds, max_steps // 5),
    )


class _Evaluation(keras.callbacks.Callback):
    """Evaluates over all ranks after the last epoch, and every so many epochs."""

    def __init__(self, spec, plan, observers):
        super().__init__()
        self.metrics = {}
        self._spec = spec
        self._plan = plan
        self._observers = observers

    def on_epoch_end(self, epoch, logs=None):
        done = epoch + 1
        every = self._spec.every_epochs
        if done < self._plan.epochs and not (every and done % every == 0):
            return
        self.metrics = evaluate(self.model, self._spec.input_fn())
        step = min(done * self._plan.epoch_steps, self._plan.max_steps)
        # What the last steps before it did to the weights shows here first.
        check_loss(self.metrics["loss"], step)
        for observer in self._observers:
            observer.on_evaluation(step, self.metrics)
