"""The arguments and the result of `train_and_evaluate`."""

import dataclasses
from collections.abc import Callable

import keras


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """What to train on, and how long.

    Attributes:
        input_fn: `input_fn(start_step, end_step)` returns a `tf.data.Dataset` of
            the batches of this rank for these steps.
        max_steps: batches that each rank takes; the same on all ranks.
        pass_steps: batches in a pass over the data. Training metrics are reset about
            that often.
        local_batch_size: samples in a batch of one rank.
        callbacks: `callbacks(plan)` returns more Keras callbacks, for the `Plan`.
        steps_per_execution: steps per call of the compiled train function, None for
            a default.
    """

    input_fn: Callable
    max_steps: int
    pass_steps: int
    local_batch_size: int
    callbacks: Callable = lambda plan: ()
    steps_per_execution: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """What to evaluate on, and when. There is always an evaluation at the end.

    Attributes:
        input_fn: returns a `tf.data.Dataset` of this rank's part of the test set.
        every_epochs: evaluate also after so many epochs of `fit`, 0 for never.
    """

    input_fn: Callable
    every_epochs: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of `train_and_evaluate`, the same on all ranks except for the times.

    Attributes:
        model: the trained model.
        train_metrics: by name, over the samples of all ranks in the last epoch.
        test_metrics: by name, over the whole test set.
        train_seconds: in `fit`, without evaluation.
        samples_per_second: of all ranks, without the first execution (tracing).
    """

    model: keras.Model
    train_metrics: dict
    test_metrics: dict
    train_seconds: float
    samples_per_second: float
