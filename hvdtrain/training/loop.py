"""Train and evaluate a Keras model on all ranks. The loop is Keras' `fit`."""

import warnings

import tensorflow as tf

from hvdtrain.job import JobError
from hvdtrain.keras import callbacks as hvd_callbacks
from hvdtrain.training.evaluation import EvaluationCallback
from hvdtrain.training.plan import Plan
from hvdtrain.training.progress import ProgressCallback
from hvdtrain.training.specs import Result


def train_and_evaluate(model, train_spec, eval_spec, *, world, observers=()):
    """Train a model on all ranks, then evaluate it over the whole test set.

    Args:
        model: a compiled model whose optimizer is distributed.
        train_spec: a `TrainSpec`.
        eval_spec: an `EvalSpec`.
        world: the `World`.
        observers: objects whose methods are called on the chief:
            `on_progress(progress)` with a `Progress` about every second, and
            `on_evaluation(step, metrics)` after each evaluation.

    Returns:
        A `Result`.

    Raises:
        JobError: on all ranks, when the loss is not finite.
    """
    plan = Plan.of(train_spec)
    model.steps_per_execution = plan.steps_per_execution
    observers = observers if world.is_chief else ()
    evaluation = EvaluationCallback(eval_spec, plan, observers)
    global_batch_size = train_spec.local_batch_size * world.size
    progress = ProgressCallback(plan, global_batch_size, world, observers)
    history = _fit(
        model,
        train_spec.input_fn(0, plan.max_steps),
        plan,
        callbacks=[
            hvd_callbacks.BroadcastGlobalVariablesCallback(0),
            hvd_callbacks.AverageMovingStatisticsCallback(),
            hvd_callbacks.MetricAverageCallback(),
            *train_spec.callbacks(plan),
            progress,
            evaluation,
        ],
    )
    return Result(
        model=model,
        train_metrics={name: float(values[-1]) for name, values in history.items()},
        test_metrics=evaluation.metrics,
        train_seconds=progress.seconds,
        samples_per_second=progress.samples_per_second,
    )


def _fit(model, batches, plan, *, callbacks):
    # Keras needs the cardinality, which a dataset after `flat_map` does not have.
    batches = batches.apply(tf.data.experimental.assert_cardinality(plan.max_steps))
    with warnings.catch_warnings():
        # The plan makes the last epoch shorter than the others.
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        try:
            return model.fit(
                batches,
                epochs=plan.epochs,
                steps_per_epoch=plan.fit_epoch_steps,
                callbacks=callbacks,
                shuffle=False,
                verbose=0,
            ).history
        except hvd_callbacks.DesynchronizedError as error:
            raise JobError(str(error)) from None
