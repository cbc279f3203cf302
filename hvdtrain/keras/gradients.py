"""Reduction of gradients: what the distributed optimizer and tape share."""

import itertools
import warnings

import tensorflow as tf

from hvdtrain.keras import reduction, wire
from hvdtrain.keras.reduction import Average, Sum, global_process_set
from hvdtrain.keras.wire import Compression


class GradientReducer:
    """Combines the gradients of one training step over all ranks.

    Calling it exchanges the gradients that every rank computed on its own batch
    and returns the same combined gradients on every rank. By default all dense
    gradients travel as one group: one communication a call.

    Args:
        name: prefix of the operations' names; ranks are matched by it.
        device_dense: device of the reduction of dense gradients; "" is the default.
        device_sparse: the same for `tf.IndexedSlices`.
        compression: how gradients travel, one of `Compression`.
        sparse_as_dense: turn `tf.IndexedSlices` into dense tensors first.
        op: `Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: with Average, gradients are divided by it before
            the sum and multiplied by it after; guards a sum in float16.
        groups: None for one group of all, a number of groups, or a list of lists of
            variables; variables that appear in none of them are groups of their own.
        process_set: the ranks that take part.
        scale_local_gradients: divide the gradients of local variables by the number
            of ranks, as Horovod does, so that they weigh as much as averaged ones.

    Raises:
        ValueError: for an argument out of range, or arguments that exclude
            each other.
    """

    def __init__(
        self,
        name,
        *,
        device_dense="",
        device_sparse="",
        compression=Compression.none,
        sparse_as_dense=False,
        op=Average,
        gradient_predivide_factor=1.0,
        groups=None,
        process_set=global_process_set,
        scale_local_gradients=True,
    ):
        _check_predivide_factor(gradient_predivide_factor, op)
        _check_groups(groups)
        self._name = name
        self._device_dense = device_dense
        self._device_sparse = device_sparse
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._op = op
        self._predivide_factor = gradient_predivide_factor
        self._groups = groups
        self._scale_local_gradients = scale_local_gradients
        self.local_keys = set()
        self.process_set = process_set

    def register_local(self, variable):
        """Leaves `variable`'s gradients to this rank: they are not reduced."""
        self.local_keys.add(variable_key(variable))

    def is_local(self, variable):
        """Whether `variable` was registered as local."""
        return variable_key(variable) in self.local_keys

    def __call__(self, gradients, variables):
        """Returns the combined gradients, in the order of `variables`.

        Args:
            gradients: list of tensors, `tf.IndexedSlices` or None.
            variables: list of the variables that they belong to; it decides which
                gradients are local and how they are grouped.

        Raises:
            ValueError: with `op=Sum`, for gradients that have been reduced before.
        """
        if not reduction.participates(self.process_set):
            return list(gradients)
        combined = list(gradients)
        shared = []
        for i, variable in enumerate(variables):
            if not self.is_local(variable):
                shared.append(i)
            elif gradients[i] is not None:
                combined[i] = self._scale_local(gradients[i])
        sent = {
            i: _absent(place, variables[i])
            if gradients[i] is None
            else self._prepared(gradients[i])
            for place, i in enumerate(shared)
        }
        groups = self._split(shared, variables)
        # Gradients of the last layers come first: they need not wait for the others.
        for number, members in reversed(list(enumerate(groups))):
            reduced = self._reduce([sent[i] for i in members], f"{self._name}_{number}")
            for i, gradient in zip(members, reduced, strict=True):
                if gradients[i] is None:
                    wire.keep(gradient)
                    continue
                gradient._reduced_over = self.process_set.process_set_id
                combined[i] = gradient
        return combined

    def _reduce(self, gradients, name):
        return reduction.grouped_allreduce(
            gradients,
            name=name,
            op=self._op,
            prescale_factor=1.0 / self._predivide_factor,
            postscale_factor=self._predivide_factor,
            compression=self._compression,
            device_dense=self._device_dense,
            device_sparse=self._device_sparse,
            process_set=self.process_set,
        )

    def _prepared(self, gradient):
        # The mean of equal gradients is harmless; their sum is too large by the number
        # of ranks. Seen unless something was computed with the gradients in between.
        reduced_over = getattr(gradient, "_reduced_over", None)
        if self._op == Sum and reduced_over == self.process_set.process_set_id:
            raise ValueError(
                "These gradients have been reduced over the ranks already, and op=Sum "
                "would add them up again. Use DistributedGradientTape with the plain "
                "optimizer, or DistributedOptimizer with tf.GradientTape."
            )
        if self._sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient

    def _scale_local(self, gradient):
        if not self._scale_local_gradients:
            return gradient
        size = reduction.process_set_size(self.process_set, gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(
                gradient.values / size, gradient.indices, gradient.dense_shape
            )
        return gradient / size

    def _split(self, places, variables):
        if not places:
            return []
        if self._groups is None:
            return [places]
        if isinstance(self._groups, int):
            count = min(self._groups, len(places))
            bounds = [len(places) * i // count for i in range(count + 1)]
            return [places[a:b] for a, b in itertools.pairwise(bounds)]
        group_of = {
            variable_key(variable): number
            for number, group in enumerate(self._groups)
            for variable in group
        }
        by_group = {}
        for i in places:
            key = variable_key(variables[i])
            by_group.setdefault(group_of.get(key, key), []).append(i)
        return list(by_group.values())


def _absent(place, variable):
    """What travels for a gradient that is None: nothing, in a shape that tells so.

    Ranks that lack gradients of different variables send equally many tensors, and no
    two that agree: the gradient of one is never added to that of another.
    """
    dtype = tf.as_dtype(variable.dtype)
    return tf.zeros([0, place + 1], dtype if dtype.is_floating else tf.float32)


def groups_argument(groups, num_groups):
    """The argument `groups`, also where it was given by its deprecated name."""
    if num_groups:
        # Of whoever called the function that has these arguments.
        warnings.warn(
            "num_groups is deprecated: use groups.", DeprecationWarning, stacklevel=3
        )
    return groups if groups is not None else num_groups or None


def variable_key(variable):
    """A hashable that is equal for a Keras variable and the TensorFlow one in it."""
    return wire.native(variable).ref()


def _check_predivide_factor(factor, op):
    if factor <= 0:
        raise ValueError(
            f"gradient_predivide_factor must be positive. Received: {factor}"
        )
    if factor != 1.0 and op != Average:
        raise ValueError(
            "gradient_predivide_factor splits the division of an average: it goes "
            f"with op=Average only. Received: {factor} with "
            f"op={'Sum' if op == Sum else op}"
        )


def _check_groups(groups):
    is_count = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    if groups is not None and not is_count and not isinstance(groups, list):
        raise ValueError(
            "groups must be None, a positive number of groups, or a list of lists of "
            f"variables. Received: {groups!r}"
        )
