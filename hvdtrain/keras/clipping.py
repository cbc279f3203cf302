"""Clipping by norms of dense variables that are divided over ranks.

A norm counts each element of the dense model once: the squares of the slices are added
up over their ranks. The formulas are those of Keras.
"""

import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.transport import Reduction, Sum
from hvdtrain.keras.partition import partition_of


def clip(optimizer, grads, variables):
    """Clips as `optimizer` does, with the norms of the dense variables.

    Args:
        optimizer: a Keras optimizer.
        grads: list of gradients, without None.
        variables: list of the variables that they belong to, some of them divided.
    """
    grads = [tf.convert_to_tensor(gradient) for gradient in grads]
    if limit := optimizer.clipnorm:
        squares = dense_squares(grads, variables)
        return [
            gradient * limit / tf.maximum(tf.sqrt(square), limit)
            for gradient, square in zip(grads, squares, strict=True)
        ]
    limit = optimizer.global_clipnorm
    # Not add_n: TensorFlow's graph optimizer chooses its order, which may differ by
    # rank, and with it the last bit of the replicated weights.
    norm = tf.sqrt(tf.reduce_sum(tf.stack(dense_squares(grads, variables))))
    # The last term turns the scale into NaN where the norm is not finite.
    scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    return [gradient * scale for gradient in grads]


def dense_squares(grads, variables):
    """Returns the squared norm of the gradient of each dense variable."""
    squares = [tf.reduce_sum(tf.square(gradient)) for gradient in grads]
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
