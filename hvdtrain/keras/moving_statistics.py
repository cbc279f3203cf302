"""Weights that layers update from the batches of a rank, combined over the ranks."""

import warnings
from typing import ClassVar

import keras
import numpy as np

from hvdtrain.collectives import ops, transport
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Reduction, Sum
from hvdtrain.keras.callbacks import fit_start
from hvdtrain.keras.callbacks.joining import JoinCallback
from hvdtrain.keras.consistency import find_differing
from hvdtrain.keras.layers import (
    averaged_weights,
    local_normalizations,
    undeclared_weights,
)
from hvdtrain.keras.replication import get_local_keys, get_process_set


def average_moving_statistics(model: keras.Model, *, steps: int | None = None) -> None:
    """Replace the moving statistics of each rank by statistics of all ranks' batches.

    Weights that a layer of the user adds with `aggregation="mean"` become their mean
    over the ranks.

    Every rank of the optimizer's process set must call it. A model without these
    weights and `keras.layers.BatchNormalization` costs no communication; all others
    cost one reduction. Local layers keep their statistics; the statistics of
    `SyncBatchNormalization` are equal already.

    The moving mean becomes the mean over the ranks. This is the moving mean of one
    process with all ranks' batches, to rounding, if local batches have equal size.

    The moving variance becomes the mean over the ranks, plus the variance of the
    moving means between the ranks divided by 1 - momentum**steps. One process adds up
    the variance between the ranks' batches step by step. The moving means only hold
    its constant part: differences between ranks that change from step to step
    cancel. Hence:

    - The result is exact after one step, or if the ranks' batch means differ by the
      same amount in each step.
    - Otherwise it is too low: for shuffled data on average by less than 1/n of the
      variance, with n samples in a local batch.
    - Without `steps` it is lower, by the factor 1 - momentum**steps in the variance
      between ranks.

    No reduction of moving statistics is exact in general, since the variance of the
    big batch contains products of the means of different ranks. Nor do gradients equal
    the gradients of the big batch. `SyncBatchNormalization` is exact in both.

    Args:
        model: is built; it may be compiled.
        steps: training steps since the statistics were equal on all ranks; None if
            unknown. Ranks may differ: their mean counts.
    """
    optimizer = getattr(model, "optimizer", None)
    process_set = get_process_set(optimizer)
    local_keys = get_local_keys(optimizer)
    layers = local_normalizations(model, process_set, local_keys)
    weights = averaged_weights(model, process_set, local_keys)
    if not (layers or weights) or not needs_communication(process_set):
        return
    values = [np.asarray(weight.numpy(), "float64") for weight in weights]
    totals = transport.allreduce(
        [np.array([steps or 0], "float64"), *map(_moments, layers), *values],
        Reduction(op=Sum, process_set=process_set),
        name="MovingStatistics",
    )
    (steps,), *means = [total.numpy() / process_set.size() for total in totals]
    for layer, moment in zip(layers, means[: len(layers)], strict=True):
        _assign(layer, moment, steps)
    for weight, mean in zip(weights, means[len(layers) :], strict=True):
        weight.assign(mean)


def share_undeclared_weights(model: keras.Model) -> None:
    """Give all ranks the first rank's values of weights that nothing combines.

    A weight that a layer updates from the batch, without a collective in its call and
    without a declaration, differs by rank after the first steps. An evaluation would
    mix the models of the ranks. Call it on all ranks, after the broadcast of all
    weights. Costs a small reduction if layers have weights made with `trainable=False`.
    """
    optimizer = getattr(model, "optimizer", None)
    process_set = get_process_set(optimizer)
    if not needs_communication(process_set):
        return
    weights = undeclared_weights(model, process_set, get_local_keys(optimizer))
    if not weights:
        return
    differing = find_differing(weights, process_set)
    if not differing:
        return
    root_rank = process_set.ranks[0]
    ops.broadcast_variables(differing, root_rank, process_set=process_set)
    names = [w.path for w in differing if w.aggregation != "only_first_replica"]
    if names and process_set.rank() == 0:
        more = f" and {len(names) - 1} more weights" if names[1:] else ""
        warnings.warn(
            f"The ranks hold different values of {names[0]}{more}, which a layer "
            "updates from the batches of its own rank: evaluations and saved models "
            f"have the values of rank {root_rank}. Reduce what the layer adds in its "
            'call, by hvd.allreduce; or make the weight with aggregation="mean", of '
            'which the mean over the ranks is evaluated and saved, or with "only_first_'
            'replica".',
            stacklevel=3,
        )


def _moments(layer: keras.layers.BatchNormalization) -> np.ndarray:
    # Squares of float32 are exact in float64: the difference of the mean square and
    # the squared mean is 0 for equal means, and a second call changes nothing.
    mean = np.asarray(layer.moving_mean.numpy(), "float64")
    variance = np.asarray(layer.moving_variance.numpy(), "float64")
    return np.stack([mean, variance, mean**2])


def _assign(
    layer: keras.layers.BatchNormalization, moments: np.ndarray, steps: float
) -> None:
    mean, variance, square = moments
    between_ranks = np.maximum(square - mean**2, 0.0)
    # The weight of these steps in the moving averages. It is 0 if the number of steps
    # is not known, or the momentum is 1.
    weight = (1.0 - layer.momentum**steps) or 1.0
    layer.moving_mean.assign(mean)
    layer.moving_variance.assign(variance + between_ranks / weight)
    if getattr(layer, "renorm", False):
        # The next step derives moving_variance from moving_stddev.
        layer.moving_stddev.assign(np.sqrt(layer.moving_variance + layer.epsilon))


class AverageMovingStatisticsCallback(fit_start.SharedCallback):
    """Combines the moving statistics of `BatchNormalization` over the ranks.

    Each rank updates moving mean and variance from its own batches. Without this
    callback, validation and the model that rank 0 saves depend on the rank. With it
    the statistics are combined once per epoch, before validation, or at the end of an
    epoch without one: see `average_moving_statistics` for what is computed, and for
    its error. `SyncBatchNormalization` needs no such callback, and is exact.

    Put it on every rank: a rank without it leaves the others blocked in the
    reduction. Put it before `MetricAverageCallback` and callbacks that evaluate or
    save at the end of an epoch, and after `JoinCallback`, whose broadcast replaces
    all statistics by the statistics of the rank with the most steps. A model that is
    saved within an epoch holds the statistics of its rank.
    """

    belongs_after: ClassVar = (JoinCallback,)

    def __init__(self) -> None:
        super().__init__()
        self._is_due = False
        self._steps = 0

    def on_train_begin(self, logs: dict | None = None) -> None:
        # Count steps from where the statistics are equal. A model that is not yet built
        # on all ranks becomes equal in its first batch.
        if ops.is_true_on_all_ranks(
            fit_start.is_built(self.model),
            name="MovingStatisticsBuilt",
            process_set=get_process_set(self.model.optimizer),
        ):
            average_moving_statistics(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._is_due = True
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        # The last batch of the execution, from 0 on in its epoch.
        self._steps = batch + 1

    def on_test_begin(self, logs: dict | None = None) -> None:
        # Before `fit` validates.
        self._average()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self._average()

    def _average(self) -> None:
        # One reduction per epoch on every rank, also if only some ranks validate.
        if self._is_due:
            average_moving_statistics(self.model, steps=self._steps)
            share_undeclared_weights(self.model)
        self._is_due = False
