"""Clipping by norms of a dense model whose variables are not copies on all ranks.

A norm counts each element of the dense model once: the squares of the slices are added
up over their ranks, and those of a global norm over the stages of a pipeline, and over
the ranks that hold local variables. The formulas are those of Keras.
"""

import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import size_of
from hvdtrain.sharding.shards import (
    get_sharding,
    get_stages,
    is_sharded,
    is_split_over_ranks,
)


class Clipping:
    """Clips gradients as a Keras optimizer does, by the norms of the dense model.

    Args:
        optimizer: a Keras optimizer, not a `LossScaleOptimizer`.
        reducer: the `GradientReducer` that has reduced the gradients.
        mesh: the `parallel.Mesh` over which the model is divided, or None.
        sharded_state: the `ShardedState` of the optimizer, or None.
    """

    def __init__(self, optimizer, reducer, *, mesh=None, sharded_state=None):
        self._optimizer = optimizer
        self._reducer = reducer
        # Variables are divided over other ranks than those of the reduction.
        self._divides_model = bool(mesh and mesh.shape.splits_model)
        self._sharded_state = sharded_state
        self._clip_whole = optimizer._clip_gradients

    def check(self):
        """Raises a ValueError for norms of variables whose ranks are not known."""
        is_global = self._optimizer.global_clipnorm and self._divides_model
        if is_global and self._reducer.has_unshared_variables:
            raise ValueError(
                "global_clipnorm does not support register_local_var where a mesh "
                "divides the model: which ranks have copies of a local variable is not "
                "given. Use clipnorm or clipvalue."
            )

    def __call__(self, grads, variables):
        """Returns clipped gradients.

        Args:
            grads: list of reduced gradients, without None.
            variables: list of the variables that they belong to.
        """
        if self._optimizer.global_clipnorm:
            return self._clip_by_global_norm(grads, variables)
        limit = self._optimizer.clipnorm
        if not limit or not (self._is_scattered or is_sharded(variables)):
            return self._clip_whole(grads)
        return [
            tf.convert_to_tensor(gradient) * limit / tf.maximum(tf.sqrt(square), limit)
            for gradient, square in zip(
                grads, self._squares(grads, variables), strict=True
            )
        ]

    def _clip_by_global_norm(self, grads, variables):
        if self._is_scattered or (
            self._divides_model and is_split_over_ranks(variables)
        ):
            squares = self._squares(grads, variables)
            norm = tf.sqrt(_over_stages(_sum(squares), variables))
        elif not self._divides_model and self._reducer.some_are_unshared(variables):
            # Each rank's own norm would scale the shared gradients by another factor
            # on each rank.
            norm = _norm_over_copies(self._reducer, grads, variables)
        else:
            return self._clip_whole(grads)
        limit = self._optimizer.global_clipnorm
        # The last term turns the scale into NaN where the norm is not finite.
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [tf.convert_to_tensor(gradient) * scale for gradient in grads]

    def _squares(self, grads, variables):
        squares = [tf.reduce_sum(tf.square(tf.convert_to_tensor(g))) for g in grads]
        if self._is_scattered:
            squares = self._sharded_state.sum_squares(squares, variables)
        return _dense_squares(squares, variables)

    @property
    def _is_scattered(self):
        return self._sharded_state is not None and self._sharded_state.is_scattered


def _dense_squares(squares, variables):
    """Returns the squared norm of each dense variable from those of its slices."""
    squares = list(squares)
    by_ranks = {}
    for i, variable in enumerate(variables):
        if sharding := get_sharding(variable):
            over = sharding.process_set
            by_ranks.setdefault(tuple(over.ranks), (over, []))[1].append(i)
    for over, places in by_ranks.values():
        total = transport.combine(
            tf.stack([squares[i] for i in places]), over, name="DividedNorms"
        )
        for i, square in zip(places, tf.unstack(total), strict=True):
            squares[i] = square
    return squares


def _over_stages(square, variables):
    stages = get_stages(variables)
    if stages is None:
        return square
    return transport.combine(square, stages, name="StagesNorm")


def _norm_over_copies(reducer, gradients, variables):
    """Returns the norm of the gradients of all variables of all ranks.

    Every copy of a variable is counted in proportion to the number of its copies, so
    that a variable counts once, and each rank's local variables count as well.
    """
    by_copies = {}
    for gradient, variable in zip(gradients, variables, strict=True):
        square = tf.reduce_sum(tf.square(tf.convert_to_tensor(gradient)))
        ranks = reducer.process_set_of(variable)
        key = None if ranks is None else ranks.process_set_id
        by_copies.setdefault(key, (ranks, []))[1].append(square)
    # Equal on all ranks already: not to be rounded again by a reduction.
    _, shared = by_copies.pop(reducer.process_set.process_set_id, (None, []))
    own = [
        _sum(held) / (1 if ranks is None else size_of(ranks, held[0].dtype))
        for ranks, held in by_copies.values()
    ]
    zero = tf.zeros([], gradients[0].dtype)
    # Also with no gradients of its own: the other ranks have some.
    total = transport.combine(
        _sum([zero, *own]), reducer.process_set, name=f"{reducer.name}_norm"
    )
    return tf.sqrt(_sum([total, *shared]))


def _sum(scalars):
    # Not add_n: TensorFlow's graph optimizer chooses its order, which may differ by
    # rank, and with it the last bit of the replicated weights.
    return tf.reduce_sum(tf.stack(scalars))
