"""Calls of layers that gather their fully sharded weights, and release them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src import backend

from hvdtrain.keras.layers import normalizes_over_ranks
from hvdtrain.keras.seams import replace
from hvdtrain.parallel.gathering import (
    FullyShardedVariable,
    find_sharded,
    find_unread,
    gather,
    reading,
    shard_value,
)
from hvdtrain.parallel.recomputation import is_remat, recompute

# These layers call a layer inside in each of the steps of a series: they gather for it.
_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed)
_MARK = "_hvdtrain_gathers"


class BlockCall(NamedTuple):
    """How a layer computes from blocks of its weights, in place of full values.

    Attributes:
        call: takes the arguments of the layer's call, and returns the same results.
        blocks: the weights of which it reads this rank's blocks.
    """

    call: Callable[..., Any]
    blocks: tuple[FullyShardedVariable, ...]


class Gathering(NamedTuple):
    """How the calls of the layers of a model gather.

    Attributes:
        repeats: whether gathered weights are released after the forward pass, and the
            call is repeated in the backward pass.
        remedy: the end of the error where a call cannot be repeated.
        is_collective: whether a layer exchanges in its call: it is not repeated.
        find_block_call: returns how a layer computes from blocks, or None.
    """

    repeats: bool
    remedy: str
    is_collective: Callable[[keras.layers.Layer], bool] = normalizes_over_ranks
    find_block_call: Callable[[keras.layers.Layer], BlockCall | None] = lambda _: None


def gather_in_calls(model: keras.Model, gathering: Gathering) -> None:
    """Make the layers of a model gather their weights that are fully sharded."""
    for variable, dtype in weights_with_dtypes(model):
        if isinstance(variable, FullyShardedVariable):
            variable.gathered_dtype = dtype
    for layer in flatten(model):
        _gather_in_call(layer, gathering)


def flatten(model: keras.Model) -> list[keras.layers.Layer]:
    """Return all layers, each once."""
    return list({id(layer): layer for layer in model._flatten_layers()}.values())


def weights_with_dtypes(model: keras.Model) -> Iterator[tuple[keras.Variable, str]]:
    """Yield each weight of layers, and the dtype in which it is gathered."""
    dtypes: dict[int, set[str]] = {}
    found: dict[int, keras.Variable] = {}
    for layer in flatten(model):
        for variable in layer._trainable_variables:
            is_cast = layer.autocast and variable._autocast
            dtype = layer.compute_dtype if is_cast else variable.dtype
            dtypes.setdefault(id(variable), set()).add(dtype)
            found[id(variable)] = variable
    for number, variable in found.items():
        # Layers of several dtypes may read it.
        (dtype, *others) = dtypes[number]
        yield variable, variable.dtype if others else dtype


def _gather_in_call(layer: keras.layers.Layer, gathering: Gathering) -> None:
    """Make the call of a layer gather its weights, if they are sharded."""
    is_whole = isinstance(layer, _LOOPS) or gathering.is_collective(layer)
    weights = find_sharded(layer.variables if is_whole else layer._trainable_variables)
    # A layer of `remat` gathers its weights in each of its passes.
    if not weights or is_remat(layer) or hasattr(layer.call, _MARK):
        return
    inside = list(layer._flatten_layers())
    is_repeated = is_whole or all(inner is layer for inner in inside)
    # The loop of an RNN may have states.
    is_repeated &= not any(
        isinstance(inner, keras.layers.RNN) or gathering.is_collective(inner)
        for inner in inside
    )
    gathering = gathering._replace(repeats=gathering.repeats and is_repeated)
    call = functools.partial(_gather_and_call, layer, layer.call, weights, gathering)
    functools.update_wrapper(call, layer.call)
    setattr(call, _MARK, True)
    replace(layer, "call", call, by=gather_in_calls)


def _gather_and_call(
    layer: keras.layers.Layer,
    call: Callable[..., Any],
    weights: list[FullyShardedVariable],
    gathering: Gathering,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # A layer outside may have gathered them.
    weights = find_unread(weights)
    if backend.in_stateless_scope() or not weights:
        return call(*args, **kwargs)
    tensors = [x for x in tf.nest.flatten((args, kwargs)) if tf.is_tensor(x)]
    is_dense = all(isinstance(tensor, tf.Tensor) for tensor in tensors)
    by_blocks = gathering.find_block_call(layer) if is_dense else None
    blocks: tuple[FullyShardedVariable, ...] = ()
    if by_blocks and len(find_unread(by_blocks.blocks)) == len(by_blocks.blocks):
        call, blocks = by_blocks
    if gathering.repeats and is_dense:
        return recompute(layer, call, gathering.remedy, blocks, *args, **kwargs)
    shards = [shard_value(weight) for weight in weights]
    with tf.control_dependencies(filter(tf.is_symbolic_tensor, tensors)):
        full = gather(weights, shards, blocks=blocks)
    with reading(weights, full):
        return call(*args, **kwargs)
