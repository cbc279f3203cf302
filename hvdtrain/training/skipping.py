"""Batches with a loss or gradients that are not finite, and are left out."""

import functools
import math

import keras

from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import get_hook


class Skipping:
    """Leaves out what is not finite, and counts the updates of the job left out.

    An update is left out on all ranks alike. A loss is left out of its mean on the rank
    that has computed it: one NaN would make the mean of the whole epoch NaN.

    Args:
        count: updates that earlier runs of the job have left out.
        model: a compiled and built model; None to leave out nothing.
    """

    def __init__(self, count=0, model=None):
        self._count = count
        self._means = []
        self.is_on = model is not None
        if self.is_on:
            self._count = get_hook(model.optimizer).skip_nonfinite()
            self._count.assign(count)
            self._skip_losses(model)

    @property
    def count(self):
        """Updates of the job that were left out."""
        return int(self._count)

    def begin_epoch(self):
        """Is called after the metrics were reset, or restored from a checkpoint."""
        for mean in self._means:
            # Of a run without this option.
            if not math.isfinite(float(mean.total)):
                mean.reset_state()

    def _skip_losses(self, model):
        self._is_training = False
        # Those of the whole model and of its outputs. Metrics of `compile` are in
        # another one that contains them.
        for mean in [m for m in model.metrics if type(m) is keras.metrics.Mean]:
            update = functools.partial(self._update, mean, mean.update_state)
            replace(mean, "update_state", update, by=Skipping)
            # Keras' mean of nothing is 0, the best loss of all.
            replace(mean, "result", functools.partial(_result, mean), by=Skipping)
        step = functools.partial(self._train_step, model.train_step)
        replace(model, "train_step", step, by=Skipping)

    def _train_step(self, train_step, data):
        # The metrics are those of evaluations, too, which a NaN has to end.
        self._is_training = True
        try:
            return train_step(data)
        finally:
            self._is_training = False

    def _update(self, mean, update_state, values, sample_weight=None):
        if not self._is_training:
            return update_state(values, sample_weight)
        # A `train_step` of the user's own may not use it.
        if mean not in self._means:
            self._means.append(mean)
        return keras.ops.cond(
            keras.ops.all(keras.ops.isfinite(values)),
            lambda: update_state(values, sample_weight),
            lambda: None,
        )


def _result(mean):
    return mean.total / mean.count
