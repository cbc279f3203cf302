"""Evaluation over the whole test set, each rank on its part."""

import contextlib
import itertools

import keras

from hvdtrain.job.world import SharedJobError
from hvdtrain.keras import Sum, allreduce, metrics
from hvdtrain.keras.moving_statistics import average_moving_statistics
from hvdtrain.keras.ranks import process_set_of
from hvdtrain.training.events import notify, scalars
from hvdtrain.training.progress import check_loss
from hvdtrain.training.stepping import StepCallback


def evaluate(model, batches, *, steps=None):
    """Return the model's metrics over the samples of all ranks, by name.

    Args:
        model: a compiled model, the same on all ranks.
        batches: a `tf.data.Dataset` of this rank's samples; ranks may have
            different numbers of them.
        steps: batches that are evaluated, None for all.

    Raises:
        SharedJobError: on all ranks, if no rank has a sample.
    """
    count = itertools.count()
    counter = keras.callbacks.LambdaCallback(
        on_test_batch_end=lambda batch, logs: next(count)
    )
    model.evaluate(batches, steps=steps, verbose=0, callbacks=[counter])
    if not int(allreduce(next(count), name="EvaluatedBatches", op=Sum)):
        raise SharedJobError(
            "Received no sample to evaluate on any rank; expected a test set."
        )
    process_set = process_set_of(model.optimizer)
    return metrics.reduce_metrics(model.metrics, process_set=process_set)


@contextlib.contextmanager
def evaluated_weights(model, *, steps):
    """Give the model the weights that are evaluated and exported. A collective.

    In the block, moving statistics are those of all ranks, and the weights are their
    moving averages where the optimizer keeps them (`use_ema`). At its end all are
    restored, and the metrics of the epoch as well.

    Args:
        model: a compiled and built model.
        steps: steps since the moving statistics were equal on all ranks.
    """
    # With the seeds of layers that draw in evaluations, too.
    variables = [*model.variables, *metrics.metric_variables(model.metrics)]
    before = metrics.local_states(variables)
    average_moving_statistics(model, steps=steps)
    # Without use_ema it does nothing.
    model.optimizer.finalize_variable_values(model.trainable_variables)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


class EvaluationCallback(StepCallback):
    """Evaluates over all ranks when it is due, and at the end of the training.

    Args:
        spec: the `EvalSpec`.
        plan: the `Plan` of the training.
        is_due: an `Every`.
        observers: see `train_and_evaluate`.
        results: the list of the job's evaluations, to which each is appended.
        exports: the `Exports` on the chief; None elsewhere, and without exporters.
        left_out: a context manager in which each evaluation is run.
    """

    def __init__(
        self, spec, plan, is_due, observers, *, results, exports=None, left_out
    ):
        super().__init__(plan)
        self._left_out = left_out
        self._exports = exports
        self._results = results
        self._spec = spec
        self._is_due = is_due
        self._observers = observers
        self._is_pending = False

    def note_step(self):
        """Asks whether it is due."""
        self._is_pending |= self._is_due(self.step)

    def act(self, *, is_epoch_end):
        """Evaluates if it is due."""
        every = self._spec.every_epochs
        is_epoch_due = every and (self._epoch + 1) % every == 0
        if self._is_pending or (is_epoch_end and (self.is_last or is_epoch_due)):
            self._is_pending = False
            # At the end of an epoch the moving statistics are equal already.
            steps = None if is_epoch_end else self.epoch_steps
            with self._left_out(), evaluated_weights(self.model, steps=steps):
                self._evaluate()

    def _evaluate(self):
        batches = self._spec.batches()
        found = evaluate(self.model, batches, steps=self._spec.steps)
        # The loss of a training step is computed before its update: only here does
        # an update that broke the weights in the last steps become visible.
        check_loss(found["loss"], self.step)
        self._results.append({"step": self.step, "metrics": found})
        notify(self._observers, "on_evaluation", self.step, scalars(found))
        if self._exports:
            self._exports.write(self.model, self._results, is_last=self.is_last)
