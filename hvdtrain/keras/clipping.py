"""Clipping by norms of a dense model that is divided over ranks.

A norm counts each element of the dense model once: the squares of the slices are added
up over their ranks, and those of a global norm over the stages of a pipeline. The
formulas are those of Keras.
"""

import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.transport import Reduction, Sum
from hvdtrain.keras.partition import (
    is_divided,
    is_part_of_model,
    partition_of,
    stages_of,
)


def is_over_ranks(optimizer, variables, scattered=None):
    """Returns whether `optimizer` clips by a norm of which this rank has a part."""
    if optimizer.global_clipnorm:
        return scattered is not None or is_part_of_model(variables)
    return bool(optimizer.clipnorm) and (scattered is not None or is_divided(variables))


def clip(optimizer, grads, variables, scattered=None):
    """Clips as `optimizer` does, with the norms of the dense variables.

    Args:
        optimizer: a Keras optimizer.
        grads: list of gradients, without None.
        variables: list of the variables that they belong to.
        scattered: the `ShardedState` to which parts of the gradients were reduced;
            None where each rank has the gradients of its whole variables.
    """
    grads = [tf.convert_to_tensor(gradient) for gradient in grads]
    squares = [tf.reduce_sum(tf.square(gradient)) for gradient in grads]
    if scattered:
        squares = scattered.sum_squares(squares, variables)
    squares = _dense_squares(squares, variables)
    if limit := optimizer.clipnorm:
        return [
            gradient * limit / tf.maximum(tf.sqrt(square), limit)
            for gradient, square in zip(grads, squares, strict=True)
        ]
    limit = optimizer.global_clipnorm
    # Not add_n: TensorFlow's graph optimizer chooses its order, which may differ by
    # rank, and with it the last bit of the replicated weights.
    norm = tf.sqrt(_over_stages(tf.reduce_sum(tf.stack(squares)), variables))
    # The last term turns the scale into NaN where the norm is not finite.
    scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    return [gradient * scale for gradient in grads]


def _dense_squares(squares, variables):
    """Returns the squared norm of each dense variable from those of its slices."""
    squares = list(squares)
    by_ranks = {}
    for i, variable in enumerate(variables):
        if partition := partition_of(variable):
            ranks = partition.process_set
            by_ranks.setdefault(tuple(ranks.ranks), (ranks, []))[1].append(i)
    for ranks, places in by_ranks.values():
        if ranks.size() == 1:
            continue
        (total,) = transport.allreduce(
            [tf.stack([squares[i] for i in places])],
            Reduction(op=Sum, process_set=ranks),
            name="DividedNorms",
        )
        for i, square in zip(places, tf.unstack(total), strict=True):
            squares[i] = square
    return squares


def _over_stages(square, variables):
    ranks = stages_of(variables)
    if ranks is None or ranks.size() == 1:
        return square
    reduction = Reduction(op=Sum, process_set=ranks)
    return transport.allreduce([square], reduction, name="StagesNorm")[0]
