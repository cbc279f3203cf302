"""Layers that compute from a block of a weight, on ranks with the same samples.

With a kernel that is sharded along an axis of the outputs, each rank computes its part
of them, and the ranks gather the parts. Along an axis over which the layer sums, each
rank computes one term of the sum, and the ranks add up the terms (Shoeybi et al. 2019,
arXiv:1909.08053). The results are those of the layer with the full weight, to the
rounding of sums.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from hvdtrain.parallel import mappings
from hvdtrain.parallel.gathered_calls import BlockCall
from hvdtrain.parallel.gathering import FullyShardedVariable
from hvdtrain.sharding.shards import Sharding


def find_block_call(layer: keras.layers.Layer) -> BlockCall | None:
    """Return how a layer computes from blocks; None if it needs full weights."""
    entry = _CALLS.get(type(layer))
    is_changed = getattr(layer, "lora_enabled", False) or getattr(
        layer, "quantization_mode", None
    )
    if entry is None or is_changed or not layer.built:
        return None
    name, call, has_blocks = entry
    weight = getattr(layer, name)
    is_sharded = isinstance(weight, FullyShardedVariable)
    axis = weight.axis_sharding if is_sharded else None
    if axis is None or not has_blocks(layer, axis):
        return None
    return BlockCall(functools.partial(call, layer, axis), (weight,))


def _call_dense(
    layer: keras.layers.Dense,
    axis: Sharding,
    inputs: tf.Tensor,
    training: bool | None = None,
) -> tf.Tensor:
    last = dataclasses.replace(axis, axis=len(inputs.shape) - 1)
    if axis.axis == 0:
        x = ops.matmul(mappings.scatter(inputs, last), layer.kernel)
        x = mappings.reduce(x, axis)
    else:
        x = ops.matmul(mappings.copy(inputs, axis), layer.kernel)
        x = mappings.gather(x, last)
    return _finish(layer, x)


def _call_einsum_dense(
    layer: keras.layers.EinsumDense,
    axis: Sharding,
    inputs: tf.Tensor,
    training: bool | None = None,
) -> tf.Tensor:
    read, weights, written = _labels(layer)
    label = weights[axis.axis]
    if label in read:
        place = _position(read, label, len(inputs.shape))
        shard = mappings.scatter(inputs, dataclasses.replace(axis, axis=place))
        x = ops.einsum(layer.equation, shard, layer.kernel)
        x = mappings.reduce(x, axis)
    else:
        x = ops.einsum(layer.equation, mappings.copy(inputs, axis), layer.kernel)
        place = _position(written, label, len(x.shape))
        x = mappings.gather(x, dataclasses.replace(axis, axis=place))
    return _finish(layer, x)


def _finish(layer: Any, x: tf.Tensor) -> tf.Tensor:
    if layer.bias is not None:
        x = ops.add(x, layer.bias)
    return x if layer.activation is None else layer.activation(x)


def _labels(layer: keras.layers.EinsumDense) -> tuple[str, str, str]:
    operands, written = layer.equation.replace(" ", "").split("->")
    read, weights = operands.split(",")
    return read, weights, written


def _position(labels: str, label: str, rank: int) -> int:
    """Return which axis of a tensor has a label; "..." stands for any axes."""
    before, _, after = labels.partition("...")
    if label in before:
        return before.index(label)
    return rank - len(after) + after.index(label)


def _is_summed_or_written(layer: keras.layers.EinsumDense, axis: Sharding) -> bool:
    """Return whether inputs or outputs have the axis of the kernel, and not both."""
    read, weights, written = _labels(layer)
    if "..." in weights:
        return False
    label = weights[axis.axis]
    return (label in read) != (label in written)


def _call_embedding(
    layer: keras.layers.Embedding, axis: Sharding, inputs: tf.Tensor
) -> tf.Tensor:
    is_integer = inputs.dtype in (tf.int32, tf.int64)
    ids = inputs if is_integer else tf.cast(inputs, tf.int32)
    if axis.axis == 1:
        rows = ops.take(layer.embeddings, ids, axis=0)
        rows = mappings.gather(rows, dataclasses.replace(axis, axis=len(ids.shape)))
    else:
        # As in Keras, -1 is the last row; other ids outside of the table are errors.
        ids = tf.where(ids < 0, ids + axis.size, ids)
        local = ids - axis.local_slice.start
        is_local = (local >= 0) & (local < axis.sizes[axis.rank])
        tf.debugging.assert_less(ids, tf.constant(axis.size, ids.dtype), layer.name)
        rows = ops.take(layer.embeddings, ops.where(is_local, local, 0), axis=0)
        rows = ops.where(is_local[..., tf.newaxis], rows, ops.zeros_like(rows))
        rows = mappings.reduce(rows, axis)
    return ops.cast(rows, layer.compute_dtype)


def _always(layer: keras.layers.Layer, axis: Sharding) -> bool:
    return True


# By class: the name of the weight, the call, and whether it has blocks along an axis.
# Not for subclasses, whose calls may differ.
_CALLS: dict[type, tuple[str, Callable[..., tf.Tensor], Callable[..., bool]]] = {
    keras.layers.Dense: ("kernel", _call_dense, _always),
    keras.layers.EinsumDense: ("kernel", _call_einsum_dense, _is_summed_or_written),
    keras.layers.Embedding: ("embeddings", _call_embedding, _always),
}
