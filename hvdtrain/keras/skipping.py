"""Updates that are left out because their gradients are not finite."""

import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.collectives.transport import Sum


class UpdateSkipping:
    """Leaves out updates of an optimizer whose gradients are not finite.

    Keras' `apply` goes on around them: it resets the accumulated gradients, and counts
    the iteration. The methods by which it changes weights, slots and moving averages
    are replaced on the instance.

    Args:
        optimizer: a Keras optimizer, not a `LossScaleOptimizer`.

    Attributes:
        count: a variable with the number of updates that were left out. It is none of
            the optimizer's: a saved model loads without this package.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.count = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._count_before = None
        self._replace("_apply_weight_decay", self._is_kept)
        self._replace("_backend_update_step", self._is_kept)
        self._replace("_update_model_variables_moving_average", self._is_averaged)

    def begin(self):
        """Is called before Keras' `apply`."""
        self._count_before = self.count.read_value()

    def note(self, is_finite):
        """Counts the update that follows if `is_finite`, a tensor, is false."""
        self.count.assign_add(tf.cast(tf.logical_not(is_finite), tf.int64))

    def _replace(self, name, is_due):
        method = getattr(self._optimizer, name)

        def method_if_due(*args):
            # No collective is in it: whether it is due is equal on all ranks anyway.
            tf.cond(is_due(), lambda: method(*args), lambda: None)

        setattr(self._optimizer, name, method_if_due)

    def _is_kept(self):
        # From the variable, since Keras completes a window in a branch, whose tensors
        # cannot be read outside of it.
        return tf.equal(self.count, self._count_before)

    def _is_averaged(self):
        # In the first iteration, Keras gives the moving averages their first values.
        is_first = tf.equal(tf.convert_to_tensor(self._optimizer.iterations), 0)
        return tf.logical_or(self._is_kept(), is_first)


def all_finite(gradients):
    """Returns whether all values of a list of dense or sparse gradients are finite."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values])


def is_true_on_all(ranks, value, name):
    """Returns a boolean tensor: whether `value`, one too, is true on all ranks.

    Args:
        ranks: a process set.
        value: a scalar boolean tensor.
        name: of the collective.
    """
    if not needs_communication(ranks):
        return value
    # Values that are false are counted, not the others: a rank that has joined
    # contributes zeros.
    count = ops.allreduce(
        tf.cast(tf.logical_not(value), tf.int32), name=name, op=Sum, process_set=ranks
    )
    return tf.equal(count, 0)
