"""Batches whose loss or gradients are not finite, and which training leaves out."""

import functools
import math
from collections.abc import Callable

import keras
import tensorflow as tf

from hvdtrain.keras.replication import get_hook
from hvdtrain.keras.seams import replace


class Skipping:
    """Leaves out updates that are not finite, and counts them over the whole job.

    An update is left out on all ranks alike. A loss is left out of its mean on the rank
    that has computed it: one NaN would make the mean of the whole epoch NaN.

    Args:
        count: updates that earlier runs of the job have left out.
        model: a compiled and built model; None to leave out nothing.
    """

    def __init__(self, count: int = 0, model: keras.Model | None = None) -> None:
        self._count: int | tf.Variable = count
        self._means: list[keras.metrics.Mean] = []
        self.is_on = model is not None
        if model is not None:
            hook = get_hook(model.optimizer)
            assert hook, "train_and_evaluate makes every optimizer distributed"
            self._count = hook.skip_nonfinite()
            self._count.assign(count)
            self._skip_losses(model)

    @property
    def count(self) -> int:
        """Updates of the job that were left out."""
        return int(self._count)

    def begin_epoch(self) -> None:
        """Reset the means of losses that are not finite.

        To be called after the metrics were reset, or restored from a checkpoint: a run
        without this option may have written one that contains a NaN.
        """
        for mean in self._means:
            if not math.isfinite(float(mean.total)):
                mean.reset_state()

    def _skip_losses(self, model: keras.Model) -> None:
        self._is_training = False
        # The means of the loss of the whole model and of each output. `model.metrics`
        # has the metrics of `compile` inside of another metric, so not among these.
        for mean in [m for m in model.metrics if type(m) is keras.metrics.Mean]:
            update = functools.partial(self._update, mean, mean.update_state)
            replace(mean, "update_state", update, by=Skipping)
            # Without a sample Keras' mean is 0, which would be the best loss of all.
            replace(mean, "result", functools.partial(_result, mean), by=Skipping)
        step = functools.partial(self._train_step, model.train_step)
        replace(model, "train_step", step, by=Skipping)

    def _train_step(self, train_step: Callable, data: tuple) -> dict:
        # Evaluations use the same metrics, and a NaN in an evaluation is an error.
        self._is_training = True
        try:
            return train_step(data)
        finally:
            self._is_training = False

    def _update(
        self,
        mean: keras.metrics.Mean,
        update_state: Callable,
        values: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
    ) -> tf.Tensor | None:
        if not self._is_training:
            return update_state(values, sample_weight)
        # Noted here, since a user's `train_step` may not use it.
        if mean not in self._means:
            self._means.append(mean)
        return keras.ops.cond(
            keras.ops.all(keras.ops.isfinite(values)),
            lambda: update_state(values, sample_weight),
            lambda: None,
        )


def _result(mean: keras.metrics.Mean) -> tf.Tensor:
    return mean.total / mean.count
