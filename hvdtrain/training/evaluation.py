"""Evaluation over the whole test set, each rank on its part."""

import keras

from hvdtrain.keras import metrics
from hvdtrain.training.progress import check_loss


def evaluate(model, batches):
    """Return the model's metrics over the samples of all ranks, by name.

    Args:
        model: a compiled model, the same on all ranks.
        batches: a `tf.data.Dataset` of this rank's samples; ranks may have
            different numbers of them.
    """
    model.evaluate(batches, verbose=0)
    return metrics.reduce_metrics(model.metrics)


class EvaluationCallback(keras.callbacks.Callback):
    """Evaluates over all ranks after the last epoch, and every so many epochs.

    Args:
        spec: the `EvalSpec`.
        plan: the `Plan` of the training.
        observers: see `train_and_evaluate`.
    """

    def __init__(self, spec, plan, observers):
        super().__init__()
        self.metrics = {}
        self._spec = spec
        self._plan = plan
        self._observers = observers

    def on_epoch_end(self, epoch, logs=None):
        """Evaluates if it is due."""
        done = epoch + 1
        every = self._spec.every_epochs
        if done < self._plan.epochs and not (every and done % every == 0):
            return
        self.metrics = evaluate(self.model, self._spec.input_fn())
        step = self._plan.step(done)
        # The loss of a training step is computed before its update: only here does
        # an update that broke the weights in the last steps become visible.
        check_loss(self.metrics["loss"], step)
        for observer in self._observers:
            observer.on_evaluation(step, self.metrics)
