"""Fully sharded weights (ZeRO stage 3) of a model that is not changed for it.

Rajbhandari et al. (2020, arXiv:1910.02054) shard weights, gradients and the optimizer's
state over the ranks that process different samples. The names are those of PyTorch's
`torch.distributed.fsdp.fully_shard`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from hvdtrain.collectives.objects import (
    allgather_object,
    group_by_value,
    name_values,
)
from hvdtrain.collectives.process_sets import ProcessSet, needs_communication
from hvdtrain.keras import sharded_models
from hvdtrain.keras.layers import SyncBatchNormalization
from hvdtrain.keras.seams import replace
from hvdtrain.parallel.creation import is_shardable, sharding_created
from hvdtrain.parallel.gathering import (
    FullyShardedVariable,
    find_sharded,
    find_unread,
    gather,
    reading,
    shard_value,
    shard_variable,
)
from hvdtrain.parallel.mesh import Mesh, data_axis
from hvdtrain.parallel.recomputation import is_remat, recompute
from hvdtrain.sharding.shards import get_sharding

# These layers call a layer inside in each of the steps of a series: they gather for it.
_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed)
# A call of these layers is not repeated: the loop of an RNN may have states, and the
# other has a collective.
_NOT_REPEATED = (keras.layers.RNN, SyncBatchNormalization)
_KEEP = "Pass reshard_after_forward=False to fully_shard."


def fully_shard(
    model: keras.Model | Callable[[], keras.Model],
    *,
    mesh: Mesh | None = None,
    reshard_after_forward: bool = True,
    min_size: int = 1024,
) -> keras.Model:
    """Shard the weights of a model over ranks, in place; return the model.

        model = parallel.fully_shard(build_model)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), loss)

    Each rank stores 1/N of each weight, of its gradient and of its slots. The call of a
    layer gathers the weights of the layer, and releases them. In the backward pass, the
    layer gathers them again, computes its outputs again, and the ranks reduce the
    gradients to their shards of them (`reshard_after_forward=True`). Layers inside of a
    layer of `parallel.remat` are gathered with it.

    A function that builds the model is called with each weight sharded as soon as it is
    created or loaded, so that no rank ever stores the full model. Instead of the
    function, it takes a model that is built, whose weights a rank then stores in full
    until it shards them.

    All ranks call it, with the same model, before or after `compile`, and before the
    optimizer is built. They get the weights of the first rank. A rank computes what it
    computes with replicated weights, to the rounding of sums.

    Weights that stay replicated: those with fewer than `min_size` elements or with a
    constraint, integers, and states such as moving statistics. Layers whose call is not
    repeated keep their weights gathered until their backward pass: an RNN,
    `SyncBatchNormalization`, layers with layers inside and weights of their own, and
    calls with sparse or ragged tensors.

    Args:
        model: a function without arguments that returns a model that is built, or
            such a model.
        mesh: the ranks along its axis data share the weights; by default the active
            mesh, or all ranks.
        reshard_after_forward: release gathered weights after the forward pass. False
            keeps them until the backward pass, and gathers once in a step.
        min_size: the least number of elements of a weight that is sharded.

    Raises:
        ValueError: for a model that is not built, is fully sharded already, contains a
            layer that is sharded over the same ranks, or has an optimizer that is
            built.
        RuntimeError: in an elastic job.
    """
    ranks = data_axis(mesh).process_set
    created: list[keras.Variable] = []
    options = {"reshard_after_forward": reshard_after_forward, "min_size": min_size}
    if not isinstance(model, keras.Model):
        _check_alike(options, ranks)
        model, created = _create(model, ranks, min_size)
    _check(model, created)
    if not needs_communication(ranks):
        return model
    shapes = [tuple(variable.shape) for variable in model.variables]
    _check_alike(f"{options} and weights of the shapes {shapes}", ranks)
    sharded_models.install()
    for variable, dtype in _weights(model):
        if isinstance(variable, FullyShardedVariable):
            variable.gathered_dtype = dtype
        elif is_shardable(variable, min_size):
            shard_variable(variable, ranks, dtype)
    for layer in _flatten(model):
        _gather_in_call(layer, reshard_after_forward)
    model.train_function = model.test_function = model.predict_function = None
    return model


def _check_alike(received: object, ranks: ProcessSet) -> None:
    """Raise a ValueError unless all ranks have equal arguments. A collective."""
    if not needs_communication(ranks):
        return
    groups = group_by_value(
        allgather_object(str(received), name="FullyShard", process_set=ranks)
    )
    if len(groups) > 1:
        raise ValueError(
            "All ranks call fully_shard with the same model and options. Received: "
            f"{name_values(groups, str)}."
        )


def _create(
    build: Callable[[], keras.Model], ranks: ProcessSet, min_size: int
) -> tuple[keras.Model, list[keras.Variable]]:
    """Return the model of a function, and its weights that are sharded already."""
    if isinstance(build, keras.layers.Layer) or not callable(build):
        raise ValueError(
            "fully_shard takes a keras.Model, or a function that returns one. "
            f"Received: {build!r}."
        )
    if not needs_communication(ranks):
        return build(), []
    sharded_models.install()
    with sharding_created(ranks, min_size) as created:
        model = build()
    for variable in created:
        if variable.constraint is not None:
            raise ValueError(
                f"{variable.path} got a constraint after it was created and sharded. "
                "Pass the constraint to the layer, or the built model to fully_shard."
            )
    return model, created


def _check(model: keras.Model, created: Sequence[keras.Variable]) -> None:
    if not isinstance(model, keras.Model):
        raise ValueError(
            "fully_shard takes a keras.Model, or a function that returns one. Received "
            f"from the function: {model!r}."
        )
    if not model.built or not model.variables:
        raise ValueError(
            f"fully_shard takes a model that is built. Received: {model.name!r}, which "
            "has no weights yet. Build it first, with keras.Input or "
            "model.build(input_shape)."
        )
    new = set(map(id, created))
    others = [variable for variable in model.variables if id(variable) not in new]
    if find_sharded(others):
        raise ValueError(
            f"The model {model.name!r} is fully sharded already. Call fully_shard once."
        )
    for variable in others:
        sharding = get_sharding(variable)
        if sharding and sharding.sums_gradients:
            raise ValueError(
                f"fully_shard shards weights over the ranks over which {variable.path} "
                "is sharded already. Use keras.layers.Embedding in place of "
                "ShardedEmbedding, or shard its table alone, without fully_shard."
            )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise ValueError(
            f"fully_shard precedes the first step: the {type(optimizer).__name__} of "
            f"{model.name!r} is built for full weights. Call it before optimizer.build "
            "and fit, or compile the model with a new optimizer."
        )


def _flatten(model: keras.Model) -> list[keras.layers.Layer]:
    """Return all layers, each once."""
    return list({id(layer): layer for layer in model._flatten_layers()}.values())


def _weights(model: keras.Model) -> Iterator[tuple[keras.Variable, str]]:
    """Yield each weight of layers, and the dtype in which it is gathered."""
    dtypes: dict[int, set[str]] = {}
    found: dict[int, keras.Variable] = {}
    for layer in _flatten(model):
        for variable in layer._trainable_variables:
            is_cast = layer.autocast and variable._autocast
            dtype = layer.compute_dtype if is_cast else variable.dtype
            dtypes.setdefault(id(variable), set()).add(dtype)
            found[id(variable)] = variable
    for number, variable in found.items():
        # Layers of several dtypes may read it.
        (dtype, *others) = dtypes[number]
        yield variable, variable.dtype if others else dtype


def _gather_in_call(layer: keras.layers.Layer, reshard_after_forward: bool) -> None:
    """Make the call of a layer gather its weights, if they are sharded."""
    is_whole = isinstance(layer, (*_LOOPS, *_NOT_REPEATED))
    found = layer.variables if is_whole else layer._trainable_variables
    weights = find_sharded(found)
    # A layer of `remat` gathers its weights in each of its passes.
    if not weights or is_remat(layer):
        return
    inside = list(layer._flatten_layers())
    is_repeated = is_whole or all(found is layer for found in inside)
    is_repeated &= not any(isinstance(found, _NOT_REPEATED) for found in inside)
    wrapper = _call_again if reshard_after_forward and is_repeated else _call_once
    call = functools.partial(wrapper, layer, layer.call, weights)
    functools.update_wrapper(call, layer.call)
    replace(layer, "call", call, by=fully_shard)


def _call_again(
    layer: keras.layers.Layer,
    call: Callable[..., Any],
    weights: list[FullyShardedVariable],
    *args: Any,
    **kwargs: Any,
) -> Any:
    tensors = filter(tf.is_tensor, tf.nest.flatten((args, kwargs)))
    is_dense = all(isinstance(tensor, tf.Tensor) for tensor in tensors)
    if is_dense and find_unread(weights):
        return recompute(layer, call, _KEEP, *args, **kwargs)
    return _call_once(layer, call, weights, *args, **kwargs)


def _call_once(
    layer: keras.layers.Layer,
    call: Callable[..., Any],
    weights: list[FullyShardedVariable],
    *args: Any,
    **kwargs: Any,
) -> Any:
    # A layer outside may have gathered them.
    weights = find_unread(weights)
    if backend.in_stateless_scope() or not weights:
        return call(*args, **kwargs)
    tensors = filter(tf.is_symbolic_tensor, tf.nest.flatten((args, kwargs)))
    with tf.control_dependencies(tensors):
        full = gather(weights, [shard_value(weight) for weight in weights])
    with reading(weights, full):
        return call(*args, **kwargs)
