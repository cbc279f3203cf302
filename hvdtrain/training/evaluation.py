"""Evaluation over the whole test set, each rank on its part."""

import contextlib

import keras

from hvdtrain.keras import metrics
from hvdtrain.keras.moving_statistics import average_moving_statistics
from hvdtrain.training.progress import check_loss


def evaluate(model, batches, *, steps=None):
    """Return the model's metrics over the samples of all ranks, by name.

    Args:
        model: a compiled model, the same on all ranks.
        batches: a `tf.data.Dataset` of this rank's samples; ranks may have
            different numbers of them.
        steps: batches that are evaluated, None for all.
    """
    model.evaluate(batches, steps=steps, verbose=0)
    return metrics.reduce_metrics(model.metrics)


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
    variables = [*model.weights, *metrics.metric_variables(model.metrics)]
    before = metrics.local_states(variables)
    average_moving_statistics(model, steps=steps)
    # Without use_ema it does nothing.
    model.optimizer.finalize_variable_values(model.trainable_variables)
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


class EvaluationCallback(keras.callbacks.Callback):
    """Evaluates over all ranks when it is due, and after the last epoch.

    Args:
        spec: the `EvalSpec`.
        plan: the `Plan` of the training.
        is_due: an `Every`.
        observers: see `train_and_evaluate`.
        results: the list of the job's evaluations, to which each is appended.
        exports: the `Exports` on the chief; None elsewhere, and without exporters.
    """

    def __init__(self, spec, plan, is_due, observers, *, results, exports=None):
        super().__init__()
        self._exports = exports
        self._results = results
        self._spec = spec
        self._plan = plan
        self._is_due = is_due
        self._observers = observers
        self._is_pending = False

    def on_epoch_begin(self, epoch, logs=None):
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        """Evaluates if it is due, unless the epoch ends here as well."""
        step = self._plan.step(self._epoch, batch + 1)
        self._is_pending |= self._is_due(step)
        if self._is_pending and not self._plan.is_epoch_end(step):
            self._evaluate(step, steps=batch + 1)

    def on_epoch_end(self, epoch, logs=None):
        """Evaluates if it is due."""
        done = epoch + 1
        every = self._spec.every_epochs
        is_last = done == self._plan.epochs
        if is_last or self._is_pending or (every and done % every == 0):
            self._evaluate(self._plan.step(done), steps=None)

    def _evaluate(self, step, *, steps):
        self._is_pending = False
        with evaluated_weights(self.model, steps=steps):
            batches = self._spec.input_fn()
            found = evaluate(self.model, batches, steps=self._spec.steps)
            # The loss of a training step is computed before its update: only here does
            # an update that broke the weights in the last steps become visible.
            check_loss(found["loss"], step)
            self._results.append({"step": step, "metrics": found})
            for observer in self._observers:
                observer.on_evaluation(step, found)
            if self._exports:
                is_last = step == self._plan.max_steps
                self._exports.write(self.model, self._results, is_last=is_last)
