"""Fully sharded weights (ZeRO stage 3) of a model that is not changed for it.

Rajbhandari et al. (2020, arXiv:1910.02054) shard weights, gradients and the optimizer's
state over the ranks that process different samples. The names are those of PyTorch's
`torch.distributed.fsdp.fully_shard`.
"""

from collections.abc import Callable, Sequence

import keras

from hvdtrain.collectives.objects import (
    allgather_object,
    group_by_value,
    name_values,
)
from hvdtrain.collectives.process_sets import ProcessSet, needs_communication
from hvdtrain.keras import sharded_models
from hvdtrain.parallel.creation import is_shardable, shard_when_created
from hvdtrain.parallel.gathered_calls import (
    Gathering,
    gather_in_calls,
    weights_with_dtypes,
)
from hvdtrain.parallel.gathering import find_sharded, flat_sharding, shard_variable
from hvdtrain.parallel.mesh import Mesh, data_axis
from hvdtrain.sharding.shards import get_sharding

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
    for variable, dtype in weights_with_dtypes(model):
        if is_shardable(variable, min_size):
            _shard(variable, ranks, dtype)
    gather_in_calls(model, Gathering(reshard_after_forward, _KEEP))
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
    created: list[keras.Variable] = []

    def shard(variable: keras.Variable) -> None:
        # Their dtype of computation is known when the model is complete.
        _shard(variable, ranks, variable._dtype)
        created.append(variable)

    stop = shard_when_created(
        lambda variable: shard if is_shardable(variable, min_size) else None
    )
    try:
        model = build()
    finally:
        stop()
    for variable in created:
        if variable.constraint is not None:
            raise ValueError(
                f"{variable.path} got a constraint after it was created and sharded. "
                "Pass the constraint to the layer, or the built model to fully_shard."
            )
    return model, created


def _shard(variable: keras.Variable, ranks: ProcessSet, dtype: str) -> None:
    sharding = flat_sharding(variable.shape, ranks)
    shard_variable(variable, sharding, dtype, process_set=ranks)


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
