"""Reduction of gradients: what the distributed optimizer and tape share."""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from hvdtrain.collectives import graph, ops, transport
from hvdtrain.collectives.dtypes import as_tensorflow, map_values
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    is_elastic,
    needs_communication,
    size_of,
)
from hvdtrain.collectives.transport import Adasum, Average, Reduction, Sum, op_name
from hvdtrain.keras.variables import Variable, variable_key
from hvdtrain.sharding.optimizer_checks import check_ranks
from hvdtrain.sharding.shards import has_summed_gradients, is_sharded

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
Gradients: TypeAlias = list[Gradient | None]
# A number of groups, or the variables of each group.
Groups: TypeAlias = int | list[Sequence[Variable]] | None

_ADDS_UP_ROWS = "_hvdtrain_adds_up_rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """How the gradients of a training step are reduced.

    Attributes:
        sparse_as_dense: convert `tf.IndexedSlices` to dense tensors first.
        groups: None for groups of some 16 MB, a number of groups, or a list of lists of
            variables; each variable that is in none of them is a group of its own.
        scale_local_gradients: divide the gradients of local variables by the number
            of ranks, as Horovod does, so that they weigh as much as averaged ones.
    """

    reduction: Reduction
    sparse_as_dense: bool
    groups: Groups
    scale_local_gradients: bool

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "GradientOptions":
        """Make options of the arguments of a function with Horovod's signature.

        Args:
            arguments: by name: `locals()` at the start of the function.

        Raises:
            ValueError: for an argument out of range, or arguments that exclude each
                other.
        """
        op, factor = arguments["op"], arguments["gradient_predivide_factor"]
        groups, num_groups = arguments["groups"], arguments.get("num_groups")
        _check_op(op)
        _check_predivide_factor(factor, op)
        if num_groups:
            # Level 3 is the line that calls the function with Horovod's signature.
            message = "num_groups is deprecated: use groups."
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            groups = num_groups if groups is None else groups
        _check_groups(groups)
        return cls(
            # Dividing before the sum prevents its overflow in float16.
            reduction=Reduction.from_arguments(
                arguments, prescale_factor=1.0 / factor, postscale_factor=factor
            ),
            sparse_as_dense=arguments["sparse_as_dense"],
            groups=groups,
            scale_local_gradients=arguments["scale_local_gradients"],
        )


class GradientReducer:
    """Combines the gradients of one training step over the ranks.

    A gradient is reduced over the ranks that hold a replica of its variable: the ranks
    of the process set, or this rank alone for a local variable and for a shard of a
    table over the same ranks. The gradient of such a shard is the sum over them already
    (`Sharding.sums_gradients`): the lookup's backward pass computes it. Gradients are
    reduced in groups, each in one communication, while the backward pass computes the
    gradients of the next group.

    Args:
        name: prefix of the operations' names; ranks are matched by it.

    Attributes:
        local_keys: the `variable_key`s of the local variables.
    """

    def __init__(self, name: str, options: GradientOptions) -> None:
        self.name = name
        self.options = options
        self.process_set: ProcessSet = options.reduction.process_set
        self.local_keys: set[object] = set()
        self._no_rank_has_local_variables: bool | None = None

    def reduce_densely(self) -> None:
        """Convert gradients of tables to dense tensors, as `sparse_as_dense` does."""
        self.options = dataclasses.replace(self.options, sparse_as_dense=True)

    def register_local(self, variable: Variable | tf.Tensor) -> None:
        """Leave the gradient of `variable` unreduced: no other rank has a replica."""
        self.local_keys.add(variable_key(variable))

    def is_local(self, variable: Variable | tf.Tensor) -> bool:
        """Return whether no other rank of the process set has a replica."""
        is_registered = variable_key(variable) in self.local_keys
        return is_registered or has_summed_gradients([variable])

    def differ_by_rank(self, variables: list[Variable]) -> bool:
        """Return whether any rank has variables without a replica on the others.

        In the first call a collective, so that ranks agree although only some of them
        may have local variables. In an elastic job it is this rank's own answer.
        """
        if is_sharded(variables):
            return True
        if self._no_rank_has_local_variables is None and not is_elastic():
            with tf.init_scope():
                self._no_rank_has_local_variables = bool(
                    ops.is_true_on_all_ranks(
                        not self.local_keys,
                        name="SharedVariables",
                        process_set=self.process_set,
                    )
                )
        return bool(self.local_keys) or self._no_rank_has_local_variables is False

    def check(
        self,
        variables: Iterable[Variable | tf.Tensor],
        axes: Sequence[ProcessSet] | None = None,
    ) -> None:
        """Raise a ValueError if variables are sharded over other ranks than reduced.

        Local variables are not checked; see `sharding.check_ranks` for `axes`.
        """
        reduced = [v for v in variables if variable_key(v) not in self.local_keys]
        check_ranks(reduced, self.process_set, axes)

    def __call__(self, gradients: Gradients, variables: list[Variable]) -> Gradients:
        """Return the combined gradients, in the order of `variables`.

        A collective: a gradient may be None on some ranks.

        Raises:
            ValueError: with `op=Sum`, for gradients that have been reduced before.
        """
        combined = list(gradients)
        if not needs_communication(self.process_set):
            # One rank updates as several do.
            return [g if g is None else self._densify(g) for g in combined]
        sent = self._prepare(gradients, variables)
        groups = split_into_groups(list(sent), variables, self.options.groups)
        # Gradients of the last layers are computed first: they can be reduced while
        # the backward pass goes on.
        for number, indices in reversed(list(enumerate(groups))):
            reduced = transport.allreduce(
                [sent[i] for i in indices],
                self.options.reduction,
                name=f"{self.name}_{number}",
            )
            for i, gradient in zip(indices, reduced, strict=True):
                if gradients[i] is None:
                    # Other ranks block in this group if it is pruned here.
                    graph.prevent_pruning(gradient)
                    continue
                gradient._reduced_over = self.process_set.process_set_id
                combined[i] = gradient
        return self.scale_local(combined, variables)

    def scale_local(self, gradients: Gradients, variables: list[Variable]) -> Gradients:
        return [
            self._divide_by_ranks(gradient)
            if gradient is not None and self._is_scaled(gradient, variable)
            else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def _prepare(
        self, gradients: Gradients, variables: list[Variable]
    ) -> dict[int, Gradient]:
        """Return what this rank sends for each variable that is not local, by index."""
        indices = [i for i, v in enumerate(variables) if not self.is_local(v)]
        return {
            i: _make_placeholder(number, variables[i])
            if gradients[i] is None
            else self._prepare_one(gradients[i])
            for number, i in enumerate(indices)
        }

    def _prepare_one(self, gradient: Gradient) -> Gradient:
        # The mean of equal gradients is harmless; their sum is too large by the number
        # of ranks. An operation on the gradient in between loses the attribute.
        if self.options.reduction.op == Sum and self._is_reduced(gradient):
            raise ValueError(
                "These gradients have been reduced over the ranks already, and op=Sum "
                "would add them up again. Use DistributedGradientTape with the plain "
                "optimizer, or DistributedOptimizer with tf.GradientTape."
            )
        return self._densify(gradient)

    def _densify(self, gradient: Gradient) -> Gradient:
        if self.options.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient

    def _is_scaled(self, gradient: Gradient, variable: Variable) -> bool:
        # A distributed tape has scaled it, and has set the attribute.
        if self._is_reduced(gradient):
            return False
        if has_summed_gradients([variable]):
            return self.options.reduction.op == Average
        return self.is_local(variable) and self.options.scale_local_gradients

    def _is_reduced(self, gradient: Gradient) -> bool:
        ranks = getattr(gradient, "_reduced_over", None)
        return ranks == self.process_set.process_set_id

    def _divide_by_ranks(self, gradient: Gradient) -> Gradient:
        size = size_of(self.process_set, gradient.dtype)
        scaled = map_values(lambda values: values / size, gradient)
        scaled._reduced_over = self.process_set.process_set_id
        return scaled


def update_rows_once(variable: keras.Variable) -> None:
    """Make `sum_duplicate_rows` apply to the gradients of a table.

    Keras' Adam, Adagrad and RMSprop square each of several gradients of one row, and
    add up the squares. The result would depend on where the gradients of one row were
    added up before: in a lookup, between ranks, or not at all.
    """
    # Also on the tf.Variable of a Keras variable: users pass either.
    for holder in (variable, as_tensorflow(variable)):
        setattr(holder, _ADDS_UP_ROWS, True)


def sum_duplicate_rows(gradients: Gradients, variables: list[Variable]) -> Gradients:
    """Return gradients that hold each row of a table once; see `update_rows_once`.

    Call it with reduced gradients. They hold a row repeatedly where several calls look
    up in a table, or several ranks that have replicas of it.
    """
    return [
        _sum_duplicates(gradient)
        if isinstance(gradient, tf.IndexedSlices) and hasattr(variable, _ADDS_UP_ROWS)
        else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _sum_duplicates(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    if _are_unique(gradient.indices):
        return gradient
    rows, segments = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, segments, tf.size(rows))
    summed = tf.IndexedSlices(values, rows, gradient.dense_shape)
    if hasattr(gradient, "_reduced_over"):
        summed._reduced_over = gradient._reduced_over
    return summed


def _are_unique(indices: tf.Tensor) -> bool:
    """Return whether the graph shows that indices are a result of `tf.unique`."""
    if not tf.is_symbolic_tensor(indices):
        return False
    source = indices.op
    # The gradient of a lookup in a sharded table reshapes its unique ids.
    if source.type == "Reshape":
        source = source.inputs[0].op
    return source.type == "Unique"


def _make_placeholder(number: int, variable: Variable) -> tf.Tensor:
    """Return what is sent for a gradient that is None: an empty tensor.

    Its shape encodes `number`. Ranks that lack the gradients of different variables
    send equally many tensors, and no two of equal shape: the negotiation fails, where
    else the gradient of one variable would be added to the gradient of another.
    """
    dtype = tf.as_dtype(variable.dtype)
    return tf.zeros([0, number + 1], dtype if dtype.is_floating else tf.float32)


def _check_op(op: int) -> None:
    if op not in (Average, Sum, Adasum):
        raise ValueError(
            "op must be hvd.Average or hvd.Sum, or with a tape hvd.Adasum. Received: "
            f"op=hvd.{op_name(op)}"
        )


def _check_predivide_factor(factor: float, op: int) -> None:
    if factor <= 0:
        raise ValueError(
            f"gradient_predivide_factor must be positive. Received: {factor}"
        )
    if factor != 1.0 and op != Average:
        raise ValueError(
            "gradient_predivide_factor splits the division of an average: it requires "
            f"op=hvd.Average. Received: {factor} with op=hvd.{op_name(op)}"
        )


# Smaller groups cost more barriers or negotiations; larger ones start later, and leave
# less of the backward pass to overlap with.
_GROUP_BYTES = 16 << 20
_FIRST_GROUP_BYTES = 4 << 20


def split_into_groups(
    indices: list[int], variables: list[Variable], groups: Groups
) -> list[list[int]]:
    """Split `indices` of `variables` into lists that are reduced together.

    See `GradientOptions` for `groups`.
    """
    if not indices:
        return []
    if groups is None:
        return _split_by_bytes(indices, variables)
    if isinstance(groups, int):
        count = min(groups, len(indices))
        bounds = [len(indices) * i // count for i in range(count + 1)]
        return [indices[a:b] for a, b in itertools.pairwise(bounds)]
    number_by_key = {
        variable_key(variable): number
        for number, group in enumerate(groups)
        for variable in group
    }
    by_group: dict[object, list[int]] = {}
    for i in indices:
        key = variable_key(variables[i])
        by_group.setdefault(number_by_key.get(key, key), []).append(i)
    return list(by_group.values())


def _split_by_bytes(indices: list[int], variables: list[Variable]) -> list[list[int]]:
    """Return groups of about equal bytes, decided from shapes and dtypes alone.

    The gradients of the first variables are computed last. No backward pass is left to
    hide their reduction, so their group is smaller.
    """
    sizes = [_gradient_bytes(variables[i]) for i in indices]
    if sum(sizes) <= _GROUP_BYTES:
        return [indices]
    groups: dict[int, list[int]] = {}
    starts = itertools.accumulate(sizes, initial=0)
    for i, start in zip(indices, starts, strict=False):
        number = 1 + (start - _FIRST_GROUP_BYTES) // _GROUP_BYTES
        groups.setdefault(number, []).append(i)
    return list(groups.values())


def group_bytes(variables: list[Variable]) -> list[int]:
    """Return the bytes of each group of gradients, in the order of their reduction."""
    groups = _split_by_bytes(list(range(len(variables))), variables)
    return [
        sum(_gradient_bytes(variables[i]) for i in indices)
        for indices in reversed(groups)
    ]


def _gradient_bytes(variable: Variable) -> int:
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def _check_groups(groups: Groups) -> None:
    is_count = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    is_nested = isinstance(groups, list) and all(
        isinstance(group, list | tuple) for group in groups
    )
    if groups is not None and not is_count and not is_nested:
        raise ValueError(
            "groups must be None, a positive number of groups, or a list of lists of "
            f"variables. Received: {groups!r}"
        )
