"""Clipping by norms of the full model, whose variables are not replicas on all ranks.

A norm counts each element of the full model once: the squares of shards are added up
over the ranks that hold them. A global norm also adds up the squares of the stages of a
pipeline, and of the local variables of all ranks. Gradients are scaled by the formulas
of Keras.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import ProcessSet
from hvdtrain.keras.gradients import Gradient, GradientReducer
from hvdtrain.keras.variables import Optimizer, Variable
from hvdtrain.sharding.shards import (
    get_sharding,
    get_stages,
    is_sharded,
    is_split_over_ranks,
)

if TYPE_CHECKING:
    # parallel imports this package.
    from hvdtrain.parallel.mesh import Mesh


class Clipping:
    """Clips gradients as a Keras optimizer does, by the norms of the full model.

    The optimizer is not a `LossScaleOptimizer`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: GradientReducer,
        *,
        mesh: "Mesh | None" = None,
    ) -> None:
        self._optimizer = optimizer
        self._reducer = reducer
        # Variables are sharded over other ranks than gradients are reduced over.
        self._splits_model = bool(mesh and mesh.shape.splits_model)
        self._clip_locally = optimizer._clip_gradients

    def check(self) -> None:
        """Raise a ValueError for norms of variables whose ranks are not known."""
        is_global = self._optimizer.global_clipnorm and self._splits_model
        if is_global and self._reducer.local_keys:
            raise ValueError(
                "global_clipnorm does not support register_local_var where a mesh "
                "shards the model: which ranks have replicas of a local variable is "
                "not given. Use clipnorm or clipvalue."
            )

    def __call__(
        self, grads: list[Gradient], variables: list[Variable]
    ) -> list[Gradient]:
        """Clip reduced gradients. A collective where a norm spans several ranks."""
        if self._optimizer.global_clipnorm:
            return self._clip_by_global_norm(grads, variables)
        limit = self._optimizer.clipnorm
        if not limit or not is_sharded(variables):
            return self._clip_locally(grads)
        return [
            tf.convert_to_tensor(gradient) * limit / tf.maximum(tf.sqrt(square), limit)
            for gradient, square in zip(
                grads, self._squares(grads, variables), strict=True
            )
        ]

    def _clip_by_global_norm(
        self, grads: list[Gradient], variables: list[Variable]
    ) -> list[Gradient]:
        if self._splits_model and is_split_over_ranks(variables):
            square = _sum(self._squares(grads, variables))
            if (stages := get_stages(variables)) is not None:
                square = transport.combine(square, stages, name="StagesNorm")
            norm = tf.sqrt(square)
        elif not self._splits_model and self._reducer.differ_by_rank(variables):
            # Each rank's own norm would scale the replicated gradients by another
            # factor on each rank.
            norm = _norm_of_all_ranks(self._reducer, grads, variables)
        else:
            return self._clip_locally(grads)
        limit = self._optimizer.global_clipnorm
        # The last term turns the scale into NaN where the norm is not finite.
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [tf.convert_to_tensor(gradient) * scale for gradient in grads]

    def _squares(
        self, grads: list[Gradient], variables: list[Variable]
    ) -> list[tf.Tensor]:
        squares = [tf.reduce_sum(tf.square(tf.convert_to_tensor(g))) for g in grads]
        return _sum_over_shards(squares, variables)


def _sum_over_shards(
    squares: list[tf.Tensor], variables: list[Variable]
) -> list[tf.Tensor]:
    """Return the squared norms of full variables from the norms of their shards."""
    squares = list(squares)
    shardings = [get_sharding(variable) for variable in variables]
    # A shard may be a part of a shard.
    while any(shardings):
        by_ranks: dict[tuple[int, ...], tuple[ProcessSet, list[int]]] = {}
        for i, sharding in enumerate(shardings):
            if sharding:
                ranks = tuple(sharding.process_set.ranks)
                by_ranks.setdefault(ranks, (sharding.process_set, []))[1].append(i)
        # One reduction for each process set, not for each variable.
        for process_set, indices in by_ranks.values():
            total = transport.combine(
                tf.stack([squares[i] for i in indices]),
                process_set,
                name="DividedNorms",
            )
            for i, square in zip(indices, tf.unstack(total), strict=True):
                squares[i] = square
        shardings = [sharding and sharding.within for sharding in shardings]
    return squares


def _norm_of_all_ranks(
    reducer: GradientReducer,
    gradients: list[Gradient],
    variables: list[Variable],
) -> tf.Tensor:
    """Return the norm of the gradients of all ranks; a replicated one counts once."""
    local: list[tf.Tensor] = []
    replicated: list[tf.Tensor] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        square = tf.reduce_sum(tf.square(tf.convert_to_tensor(gradient)))
        (local if reducer.is_local(variable) else replicated).append(square)
    # A rank without local variables reduces a zero, or the other ranks would block.
    own = _sum([tf.zeros([], gradients[0].dtype), *([_sum(local)] if local else [])])
    total = transport.combine(own, reducer.process_set, name=f"{reducer.name}_norm")
    # The squares of replicated gradients are equal on all ranks: a reduction would
    # only round them again.
    return tf.sqrt(_sum([total, *replicated]))


def _sum(scalars: Iterable[tf.Tensor]) -> tf.Tensor:
    # Not add_n: TensorFlow's graph optimizer chooses its order, which may differ by
    # rank, and then the replicated weights differ in their last bit.
    return tf.reduce_sum(tf.stack(scalars))
