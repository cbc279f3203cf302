"""Layers that normalize over the batches of all ranks.

These are `SyncBatchNormalization`, and Keras' own `BatchNormalization(
synchronized=True)`, in which Keras reduces over the devices of a strategy: its method
for the moments is replaced when this module is imported, since a training loop calls
its layers before anything else of the package.
"""

import functools
from collections.abc import Iterable, Sequence, Set
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    needs_communication,
)
from hvdtrain.collectives.transport import Reduction, Sum
from hvdtrain.keras.seams import replace
from hvdtrain.keras.variables import variable_key
from hvdtrain.sharding.shards import is_replicated


@keras.saving.register_keras_serializable(package="hvdtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation over the batches of all ranks together.

    In training, mean and variance are computed from the samples of all ranks, each
    sample counted once: local batches may be unequal, or empty on some ranks. Forward
    and backward pass equal one process with the global batch. In inference the layer is
    `keras.layers.BatchNormalization`.

    The moments are computed on each rank around its own mean and combined as in
    Chan, Golub and LeVeque (1979), which does not cancel as E[x²] - E[x]² does. It
    costs one gather in the forward pass and one reduction in the backward pass.

    Args:
        fused: Horovod's argument: anything but False is an error.
        process_set: the ranks whose batches are normalised together. It is not
            saved with the layer: a layer that is loaded uses all ranks.
        **kwargs: as for `keras.layers.BatchNormalization`.
    """

    def __init__(
        self,
        fused: bool = False,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        if fused is not False:
            raise ValueError(
                f"SyncBatchNormalization cannot be fused. Received: fused={fused}"
            )
        super().__init__(**kwargs)
        self.process_set = process_set


def normalizing_ranks(layer: keras.layers.Layer) -> ProcessSet | None:
    """Return the ranks whose batches a layer normalizes together; None if its own."""
    if isinstance(layer, SyncBatchNormalization):
        return layer.process_set
    is_batch = isinstance(layer, keras.layers.BatchNormalization)
    return global_process_set if is_batch and layer.synchronized else None


def normalizes_over_ranks(layer: keras.layers.Layer) -> bool:
    """Return whether a layer exchanges the moments of its batches in training."""
    return normalizing_ranks(layer) is not None


def synchronize_moments() -> None:
    """Make the layers of Keras compute their moments over their `normalizing_ranks`."""
    local_moments = keras.layers.BatchNormalization._moments

    @functools.wraps(local_moments)
    def moments(
        self: keras.layers.BatchNormalization,
        inputs: tf.Tensor,
        mask: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        ranks = normalizing_ranks(self)
        if ranks is None or not needs_communication(ranks):
            return local_moments(self, inputs, mask)
        return moments_over_ranks(self, inputs, mask, ranks)

    replace(
        keras.layers.BatchNormalization, "_moments", moments, by=synchronize_moments
    )


synchronize_moments()


def moments_over_ranks(
    layer: keras.layers.BatchNormalization,
    inputs: tf.Tensor,
    mask: tf.Tensor | None,
    process_set: ProcessSet,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return `layer._moments(inputs, mask)` of the inputs of all ranks."""
    axes = layer._reduction_axes
    if mask is None:
        return global_moments(inputs, axes, process_set)
    weights = tf.cast(tf.cast(mask, tf.bool)[..., tf.newaxis], inputs.dtype)
    weights = tf.broadcast_to(weights, tf.shape(inputs))
    return global_moments(inputs, axes, process_set, weights=weights)


def global_moments(
    inputs: tf.Tensor,
    axes: Sequence[int],
    process_set: ProcessSet,
    *,
    weights: tf.Tensor | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance over all ranks, with their exact gradients.

    With n elements in all (n + ε with weights, as Keras has it), the gradient of the
    loss of all ranks is (Ḡ_mean + 2 (x - mean) Ḡ_variance) / n, where Ḡ sums a
    gradient over the ranks.

    Args:
        inputs: floating point; the axes that are not reduced agree on all ranks.
        axes: the axes to reduce.
        weights: of `inputs`' shape: ones, and zeros for elements that do not count.
    """
    name = "SyncBatchNormalization"
    epsilon = 0.0 if weights is None else keras.config.epsilon()

    @tf.custom_gradient
    def moments(x: tf.Tensor) -> tuple:
        statistics = _local_statistics(x, weights, axes)
        (statistics_by_rank,) = transport.allgather(
            [tf.stack(statistics)[tf.newaxis]], name=name, process_set=process_set
        )
        total, mean, variance = _combine(statistics_by_rank, epsilon)

        def gradient(*upstream: tf.Tensor) -> tf.Tensor:
            (total_upstream,) = transport.allreduce(
                [tf.stack(upstream)],
                Reduction(op=Sum, process_set=process_set),
                name=f"{name}_gradient",
            )
            by_mean, by_variance = tf.unstack(total_upstream)
            distance = _masked(x - _expand(mean, axes), weights)
            constant = _masked(tf.ones_like(x) * _expand(by_mean, axes), weights)
            slope = constant + 2 * distance * _expand(by_variance, axes)
            return slope / _expand(total, axes)

        return (mean, variance), gradient

    return moments(inputs)


def _local_statistics(
    x: tf.Tensor, weights: tf.Tensor | None, axes: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    # A rank may have no samples at all: its mean is 0 then, not NaN.
    counted = tf.ones_like(x) if weights is None else weights
    count = tf.reduce_sum(counted, axes)
    mean = tf.math.divide_no_nan(tf.reduce_sum(_masked(x, weights), axes), count)
    distance = _masked(x - _expand(mean, axes), weights)
    return count, mean, tf.reduce_sum(tf.square(distance), axes)


def _combine(
    statistics_by_rank: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    counts, means, squares = tf.unstack(statistics_by_rank, axis=1)
    total = tf.reduce_sum(counts, 0) + epsilon
    mean = tf.reduce_sum(counts * means, 0) / total
    squares += counts * tf.square(means - mean)
    return total, mean, tf.reduce_sum(squares, 0) / total


def _masked(x: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    return x if weights is None else tf.where(weights > 0, x, tf.zeros_like(x))


def _expand(statistic: tf.Tensor, axes: Iterable[int]) -> tf.Tensor:
    for axis in sorted(axes):
        statistic = tf.expand_dims(statistic, axis)
    return statistic


def local_normalizations(
    model: keras.Model, process_set: ProcessSet, local_keys: Set[object]
) -> list[keras.layers.BatchNormalization]:
    """Return the layers that update moving statistics from the batches of a rank."""
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.built
        and not _is_synchronized(layer, process_set)
        and not any(variable_key(weight) in local_keys for weight in layer.weights)
    ]


def _is_synchronized(layer: keras.layers.Layer, process_set: ProcessSet) -> bool:
    ranks = normalizing_ranks(layer)
    return ranks is not None and {*process_set.ranks} <= {*ranks.ranks}


def check_synchronized(model: keras.Model, process_set: ProcessSet) -> None:
    """Raise a ValueError if a layer would block, as not all ranks train the model."""
    for layer in model._flatten_layers():
        ranks = normalizing_ranks(layer)
        if ranks is global_process_set and process_set.size() < ranks.size():
            raise ValueError(
                f"{type(layer).__name__} {layer.name} normalizes over all ranks, and "
                f"only the ranks {list(process_set.ranks)} train the model: they would "
                "block. Use hvd.SyncBatchNormalization(process_set=...) with the "
                "process set of the optimizer."
            )


def averaged_weights(
    model: keras.Model, process_set: ProcessSet, local_keys: Set[object]
) -> list[keras.Variable]:
    """Return the weights of layers that are declared with `aggregation="mean"`."""
    return [
        weight
        for weight in model.non_trainable_weights
        if weight.aggregation == "mean"
        and is_replicated(weight, process_set)
        and variable_key(weight) not in local_keys
    ]


def undeclared_weights(
    model: keras.Model, process_set: ProcessSet, local_keys: Set[object]
) -> list[keras.Variable]:
    """Return weights that layers made with `trainable=False`, and may update.

    They must be equal on all ranks. Moving statistics, and what `averaged_weights`
    returns, are left out. So are weights of frozen layers: no step changes them, and
    to compare them in each evaluation would take seconds for a large model.
    """
    averaged = averaged_weights(model, process_set, local_keys)
    normalizations = local_normalizations(model, process_set, local_keys)
    known = {variable_key(w) for layer in normalizations for w in layer.weights}
    known |= local_keys | {variable_key(weight) for weight in averaged}
    return [
        weight
        for key, weight in made_untrained(model).items()
        if key not in known and is_replicated(weight, process_set)
    ]


def made_untrained(model: keras.Model) -> dict[object, keras.Variable]:
    """Return the weights that layers made with `trainable=False`, by `variable_key`."""
    return {
        variable_key(weight): weight
        for layer in model._flatten_layers()
        for weight in layer._non_trainable_variables
    }
