"""Distributions on a mesh of ranks: weights that are sharded as their layouts say.

A mesh has the axis of the batch first, and at most one other axis, here called the
model axis. Ranks that differ in the latter alone get the same samples. In a layout

    (None, "model")     each of these ranks stores some columns of the weight
    ("model", None)     each of them stores some rows
    ("batch", None)     ranks with different samples store each a slice of its elements
    ("model", "batch")  these ranks store a slice each of the rows of their rank

A layer gathers its weights when it is called, or computes from blocks along the model
axis: see `block_calls`.
"""

import functools
import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from hvdtrain.collectives.dtypes import local_shard
from hvdtrain.collectives.objects import (
    allgather_object,
    group_by_value,
    name_values,
)
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.distribution import devices
from hvdtrain.distribution.block_calls import find_block_call
from hvdtrain.distribution.devices import Method
from hvdtrain.job.world import JobError
from hvdtrain.keras import sharded_models
from hvdtrain.parallel.creation import Shard, is_shardable
from hvdtrain.parallel.gathered_calls import (
    Gathering,
    flatten,
    gather_in_calls,
    weights_with_dtypes,
)
from hvdtrain.parallel.gathering import (
    FullyShardedVariable,
    find_sharded,
    flat_sharding,
    shard_variable,
)
from hvdtrain.parallel.mesh import Axes, Axis, Mesh
from hvdtrain.sharding.shards import Sharding

_GATHERING = Gathering(
    repeats=True,
    # Under a distribution it normalizes by the samples of all ranks.
    is_collective=lambda layer: isinstance(layer, keras.layers.BatchNormalization),
    remedy="Leave the weights of the layer out of the layout map.",
    find_block_call=find_block_call,
)


def make_distribution(init: Method, self: Any, *args: Any, **kwargs: Any) -> None:
    """Set the mesh of ranks of a distribution. For several axes a collective.

    Raises:
        JobError: for a distribution that these ranks do not have.
    """
    init(self, *args, **kwargs)
    ranks = devices.to_backend_mesh(self.device_mesh)
    is_several = devices.num_processes() > 1
    if isinstance(self, keras.distribution.DataParallel):
        if is_several:
            every_rank = Axis("data", hvd.size(), hvd.rank(), global_process_set)
            self._hvdtrain_mesh = Axes(data=every_rank)
        return
    if not isinstance(self, keras.distribution.ModelParallel):
        raise JobError(
            f"Received {type(self).__name__}; expected DataParallel or ModelParallel."
        )
    names = list(self.device_mesh.axis_names)
    is_ordered = np.array_equal(ranks.flatten(), np.arange(ranks.size))
    if len(names) > 2 or names[0] != self.batch_dim_name or not is_ordered:
        raise JobError(
            f"Received a mesh of the shape {tuple(ranks.shape)} and axes {names} with "
            f"batch_dim_name={self.batch_dim_name!r} and the ranks "
            f"{ranks.flatten().tolist()}; expected the axis of the batch first, "
            "at most one other axis, and the ranks in their order."
        )
    if is_several:
        sharded_models.install()
        try:
            self._hvdtrain_mesh = Mesh(model=ranks.size // len(ranks))
        except RuntimeError as error:
            raise JobError(
                "Call keras.distribution.initialize() before any other function that "
                f"starts Horovod, such as hvd.init(): {error}"
            ) from None


def choose_shard(variable: keras.Variable) -> Shard | None:
    """Return what shards a new weight under the active distribution, if anything."""
    distribution = devices.active()
    if not isinstance(distribution, keras.distribution.ModelParallel):
        return None
    if not devices.has_ranks() or not is_shardable(variable, hvd.size()):
        return None
    sharding = _sharding_of(variable, distribution)
    return functools.partial(_shard, sharding=sharding) if sharding else None


def _shard(variable: keras.Variable, sharding: Sharding) -> None:
    """Store a shard of a weight. A collective: all ranks create the same weights."""
    created = f"{variable.path} of the shape {tuple(variable.shape)}"
    groups = group_by_value(allgather_object(created, name="CreatedWeight"))
    if len(groups) > 1:
        raise JobError(
            "Under keras.distribution.ModelParallel all ranks create the same weights "
            f"in the same order. Received: {name_values(groups, str)}."
        )
    # The dtype of computation is known when the model is complete.
    shard_variable(variable, sharding, variable._dtype, process_set=global_process_set)


def _sharding_of(
    variable: keras.Variable, distribution: keras.distribution.ModelParallel
) -> Sharding | None:
    """Return the sharding of a weight, or None if its layout replicates it."""
    mesh, batch = distribution._hvdtrain_mesh, distribution.batch_dim_name
    names = distribution.get_variable_layout(variable).axes
    shape = tuple(variable.shape)
    axes = [i for i, name in enumerate(names) if name not in (None, batch)]
    parts = mesh.model.size
    is_right = len(names) == len(shape) and len(axes) <= 1
    if not is_right or any(shape[i] % parts for i in axes):
        raise JobError(
            f"Received the layout {tuple(names)} for {variable.path} of the shape "
            f"{shape}, on {parts} ranks along the model axis; expected one name or "
            "None for each axis, the model axis once at most, and a size that these "
            "ranks divide. Correct this layout in the layout map."
        )
    along = None
    if axes and parts > 1:
        along = Sharding(
            axis=axes[0],
            size=shape[axes[0]],
            num_shards=parts,
            rank=mesh.model.index,
            process_set=mesh.model.process_set,
        )
    if batch not in names or mesh.data.size == 1:
        return along
    block = along.shard_shape(shape) if along else shape
    return flat_sharding(block, mesh.data.process_set, within=along)


def prepare(model: keras.Model) -> None:
    """Make a built model compute with sharded weights. A collective.

    It has weights that are not sharded yet if it was built outside of the distribution,
    or while a function was traced, as models are that have no input shape.
    """
    is_split = isinstance(devices.active(), keras.distribution.ModelParallel)
    if not is_split or not devices.has_ranks():
        return
    for variable, _ in weights_with_dtypes(model):
        if shard := choose_shard(variable):
            shard(variable)
    if find_sharded(model.variables):
        gather_in_calls(model, _GATHERING)
    if hvd.rank() == 0 and not hasattr(model, "_hvdtrain_layouts"):
        _report(model)


def _report(model: keras.Model) -> None:
    """Print the table of a model's weights, as `model.summary` does its own."""
    model._hvdtrain_layouts = layouts_text(model)
    print(model._hvdtrain_layouts, flush=True)
    if model.variables and not find_sharded(model.variables):
        warnings.warn(
            f"The layout map shards no weight of {model.name}: expected keys that "
            f"match whole paths such as {model.variables[0].path!r}.",
            stacklevel=2,
        )


def layouts_text(model: keras.Model) -> str:
    """Return a table of the weights of a model by layout and by what their layers do.

    "blocks": the layer computes with this rank's block along the model axis.
    "gathered": the ranks gather the weight for the call. "replicated": as it is.
    """
    groups: dict[tuple[str, str, str], list[keras.Variable]] = {}
    for layer, variable in _weights_once(model):
        layout = devices.layout_of(variable)
        axes = str(tuple(layout.axes if layout else ()))
        key = type(layer).__name__, axes, _describe(layer, variable)
        groups.setdefault(key, []).append(variable)
    rows: list[tuple] = [
        ("layer", "layout", "weights", "elements", "of rank 0", "computes with")
    ]
    for name, axes, how in sorted(groups):
        group = groups[name, axes, how]
        stored = _elements(map(local_shard, group))
        rows.append((name, axes, len(group), _elements(group), stored, how))
    lines = [
        f"{row[0]:<20} {row[1]:<24} {row[2]:>7} {row[3]:>12} {row[4]:>12}  {row[5]}"
        for row in rows
    ]
    return "\n".join([f"keras.distribution: the weights of {model.name}", *lines])


def _elements(variables: Iterable[keras.Variable]) -> str:
    return f"{sum(math.prod(variable.shape) for variable in variables):,}"


def _weights_once(
    model: keras.Model,
) -> Iterator[tuple[keras.layers.Layer, keras.Variable]]:
    seen: set[int] = set()
    for layer in flatten(model):
        for variable in layer._trainable_variables + layer._non_trainable_variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                yield layer, variable


def _describe(layer: keras.layers.Layer, variable: keras.Variable) -> str:
    if not isinstance(variable, FullyShardedVariable):
        return "replicated"
    call = find_block_call(layer)
    has_block = call is not None and any(each is variable for each in call.blocks)
    return "blocks" if has_block else "gathered"
