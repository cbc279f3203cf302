"""Reduction of gradients: what the distributed optimizer and tape share."""

import dataclasses
import itertools
import math
import warnings

import keras
import tensorflow as tf

from hvdtrain.collectives import graph, ops, transport
from hvdtrain.collectives.dtypes import Compression, as_tensorflow
from hvdtrain.collectives.process_sets import (
    global_process_set,
    is_elastic,
    needs_communication,
    size_of,
)
from hvdtrain.collectives.transport import Adasum, Average, Sum, op_name
from hvdtrain.keras.variables import variable_key
from hvdtrain.sharding.shards import check_ranks, has_summed_gradients, is_sharded

_ADDS_UP_ROWS = "_hvdtrain_adds_up_rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """How the gradients of a training step are reduced.

    Attributes:
        device_dense: device of the reduction of dense gradients; "" is the default.
        device_sparse: the same for `tf.IndexedSlices`.
        compression: dtype on the wire, one of `Compression`.
        sparse_as_dense: convert `tf.IndexedSlices` to dense tensors first.
        op: `Average`, `Sum` or `Adasum`.
        gradient_predivide_factor: with Average, gradients are divided by it before
            the sum and multiplied by it after; prevents an overflow in float16.
        groups: None for groups of some 16 MB, a number of groups, or a list of lists of
            variables; variables that appear in none of them are groups of their own.
        process_set: the ranks that take part.
        scale_local_gradients: divide the gradients of local variables by the number
            of ranks, as Horovod does, so that they weigh as much as averaged ones.

    Raises:
        ValueError: for an attribute out of range, or attributes that exclude
            each other.
    """

    device_dense: str = ""
    device_sparse: str = ""
    compression: type = Compression.none
    sparse_as_dense: bool = False
    op: object = Average
    gradient_predivide_factor: float = 1.0
    groups: int | list | None = None
    process_set: object = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self):
        """Checks the attributes."""
        transport.check_compression(self.compression)
        _check_op(self.op)
        _check_predivide_factor(self.gradient_predivide_factor, self.op)
        check_groups(self.groups)

    def reduction(self, process_set):
        """Returns these options as the `Reduction` over a process set."""
        return transport.Reduction(
            op=self.op,
            prescale_factor=1.0 / self.gradient_predivide_factor,
            postscale_factor=self.gradient_predivide_factor,
            compression=self.compression,
            device_dense=self.device_dense,
            device_sparse=self.device_sparse,
            process_set=process_set,
        )


class GradientReducer:
    """Combines the gradients of one training step over the ranks.

    The process set belongs to the variable: a gradient is reduced over the ranks that
    hold a copy of its variable. By default these are the ranks of
    `options.process_set`; a local variable has none but this rank, and so has a slice
    of a table that is divided over these ranks. The gradient of such a slice is the sum
    over them already (`Sharding.sums_gradients`): its exchange computes it. The
    gradients of a process set are divided into groups, each reduced in one
    communication while the backward pass computes the gradients of the next.

    Args:
        name: prefix of the operations' names; ranks are matched by it.
        options: `GradientOptions`.
    """

    def __init__(self, name, options):
        self.name = name
        self.options = options
        self._process_sets = {}
        self._all_are_shared = None

    @property
    def process_set(self):
        """The ranks that train: those of every variable without ranks of its own."""
        return self.options.process_set

    @property
    def local_keys(self):
        """The `variable_key`s of the local variables."""
        return {key for key, ranks in self._process_sets.items() if ranks is None}

    def register_local(self, variable):
        """Leaves the gradient of `variable` unreduced: no other rank has a copy."""
        self._process_sets[variable_key(variable)] = None

    def is_local(self, variable):
        """Whether no other rank holds a copy of `variable`."""
        return self.process_set_of(variable) is None

    @property
    def has_unshared_variables(self):
        """Whether some variables are not held by all ranks of the process set."""
        return bool(self._process_sets)

    def some_are_unshared(self, variables):
        """Whether any rank has variables that not all ranks of the process set hold.

        All ranks get the same answer, also those whose own `variables` are shared: it
        is a collective, once. In an elastic job it is this rank's own answer.
        """
        if is_sharded(variables):
            return True
        if self._all_are_shared is None and not is_elastic():
            with tf.init_scope():
                self._all_are_shared = bool(
                    ops.is_true_on_all_ranks(
                        not self.has_unshared_variables,
                        name="SharedVariables",
                        process_set=self.process_set,
                    )
                )
        return self.has_unshared_variables or self._all_are_shared is False

    def process_set_of(self, variable):
        """The ranks that hold a copy of `variable`; None for a local variable."""
        default = None if has_summed_gradients([variable]) else self.process_set
        return self._process_sets.get(variable_key(variable), default)

    def check(self, variables, axes=None):
        """Raises a ValueError if these variables are not divided as reduced.

        Args:
            variables: list of variables or tensors.
            axes: process sets of a mesh; see `sharding.check_ranks`.
        """
        shared = [v for v in variables if variable_key(v) not in self._process_sets]
        check_ranks(shared, self.process_set, axes)

    def __call__(self, gradients, variables):
        """Returns the combined gradients, in the order of `variables`.

        Args:
            gradients: list of tensors, `tf.IndexedSlices` or None.
            variables: list of the variables that they belong to.

        Raises:
            ValueError: with `op=Sum`, for gradients that have been reduced before.
        """
        combined = list(gradients)
        if not needs_communication(self.process_set):
            return combined
        sent = self._prepare(gradients, variables)
        groups = self.split(list(sent), variables)
        # Gradients of the last layers are computed first: they can be reduced while
        # the backward pass goes on.
        for number, members in reversed(list(enumerate(groups))):
            process_set = self.process_set_of(variables[members[0]])
            reduced = transport.allreduce(
                [sent[i] for i in members],
                self.options.reduction(process_set),
                name=f"{self.name}_{number}",
            )
            for i, gradient in zip(members, reduced, strict=True):
                if gradients[i] is None:
                    graph.prevent_pruning(gradient)
                    continue
                gradient._reduced_over = process_set.process_set_id
                combined[i] = gradient
        return self.scale_local(combined, variables)

    def scale_local(self, gradients, variables):
        """Returns a list of gradients in which those of local variables are scaled."""
        return [
            self._divide_by_ranks(gradient)
            if gradient is not None and self._is_scaled(gradient, variable)
            else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def _prepare(self, gradients, variables):
        """Returns what is sent for each shared variable, by its place."""
        shared = [i for i, v in enumerate(variables) if not self.is_local(v)]
        return {
            i: _placeholder(place, variables[i])
            if gradients[i] is None
            else self._prepare_one(gradients[i], variables[i])
            for place, i in enumerate(shared)
        }

    def _prepare_one(self, gradient, variable):
        # The mean of equal gradients is harmless; their sum is too large by the number
        # of ranks. An operation on the gradient in between loses the mark.
        ranks = self.process_set_of(variable)
        if self.options.op == Sum and _is_reduced(gradient, ranks):
            raise ValueError(
                "These gradients have been reduced over the ranks already, and op=Sum "
                "would add them up again. Use DistributedGradientTape with the plain "
                "optimizer, or DistributedOptimizer with tf.GradientTape."
            )
        if self.options.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
        return gradient

    def _is_scaled(self, gradient, variable):
        # A tape has scaled it, as the mean of replicated ones that a tape has reduced.
        if _is_reduced(gradient, self.process_set):
            return False
        if has_summed_gradients([variable]):
            return self.options.op == Average
        return self.is_local(variable) and self.options.scale_local_gradients

    def _divide_by_ranks(self, gradient):
        size = size_of(self.process_set, gradient.dtype)
        if isinstance(gradient, tf.IndexedSlices):
            scaled = tf.IndexedSlices(
                gradient.values / size, gradient.indices, gradient.dense_shape
            )
        else:
            scaled = gradient / size
        scaled._reduced_over = self.process_set.process_set_id
        return scaled

    def split(self, places, variables):
        """Returns lists of places that are reduced together: one process set each."""
        by_process_set = {}
        for i in places:
            ranks = self.process_set_of(variables[i]).process_set_id
            by_process_set.setdefault(ranks, []).append(i)
        return [
            group
            for members in by_process_set.values()
            for group in split(members, variables, self.options.groups)
        ]


def update_rows_once(variable: keras.Variable) -> None:
    """Notes that `add_up_rows` adds up what a gradient holds of one row of a table.

    Keras' Adam, Adagrad and RMSprop square each of several gradients of one row, and
    add up the squares. The result would depend on where the gradients of one row were
    added up before: in a lookup, between ranks, or not at all.

    Args:
        variable: a Keras variable.
    """
    # Also on the TensorFlow variable of one of Keras: users pass either.
    for each in (variable, as_tensorflow(variable)):
        setattr(each, _ADDS_UP_ROWS, True)


def add_up_rows(gradients: list, variables: list) -> list:
    """Returns gradients of which those of noted tables have each row once.

    Call it with reduced gradients. They hold a row repeatedly where a table is looked
    up in by several calls, or by several ranks that have copies of it.

    Args:
        gradients: list of tensors, `tf.IndexedSlices` or None.
        variables: list of the variables that they belong to.
    """
    return [
        _distinct(gradient)
        if isinstance(gradient, tf.IndexedSlices) and hasattr(variable, _ADDS_UP_ROWS)
        else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _distinct(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    if _are_distinct(gradient.indices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    added = tf.IndexedSlices(values, rows, gradient.dense_shape)
    if hasattr(gradient, "_reduced_over"):
        added._reduced_over = gradient._reduced_over
    return added


def _are_distinct(indices: tf.Tensor) -> bool:
    """Whether the graph shows that indices are the result of `tf.unique`.

    So are those of one lookup in a divided table, which TensorFlow reshapes.
    """
    if not tf.is_symbolic_tensor(indices):
        return False
    source = indices.op
    if source.type == "Reshape":
        source = source.inputs[0].op
    return source.type == "Unique"


def _is_reduced(gradient, process_set):
    ranks = process_set.process_set_id
    return getattr(gradient, "_reduced_over", None) == ranks


def _placeholder(place, variable):
    """Returns what is sent for a gradient that is None: an empty tensor.

    Its shape holds its place. Ranks that lack the gradients of different variables
    send equally many tensors, and no two of equal shape: the negotiation fails, where
    else the gradient of one variable would be added to that of another.
    """
    dtype = tf.as_dtype(variable.dtype)
    return tf.zeros([0, place + 1], dtype if dtype.is_floating else tf.float32)


def _check_op(op):
    if op not in (Average, Sum, Adasum):
        raise ValueError(
            "op must be hvd.Average or hvd.Sum, or with a tape hvd.Adasum. Received: "
            f"op=hvd.{op_name(op)}"
        )


def _check_predivide_factor(factor, op):
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


def split(places, variables, groups):
    """Returns the groups of some variables, as lists of their places.

    Args:
        places: places in `variables`.
        variables: list of variables.
        groups: see `GradientOptions`.
    """
    if groups is None:
        return _split_by_bytes(places, variables)
    if isinstance(groups, int):
        count = min(groups, len(places))
        bounds = [len(places) * i // count for i in range(count + 1)]
        return [places[a:b] for a, b in itertools.pairwise(bounds)]
    group_of = {
        variable_key(variable): number
        for number, group in enumerate(groups)
        for variable in group
    }
    by_group = {}
    for i in places:
        key = variable_key(variables[i])
        by_group.setdefault(group_of.get(key, key), []).append(i)
    return list(by_group.values())


def _split_by_bytes(places, variables):
    """Returns groups of about equal bytes, decided from shapes and dtypes alone.

    The gradients of the first variables are computed last. No backward pass is left to
    hide their reduction, so their group is smaller.
    """
    sizes = [_gradient_bytes(variables[i]) for i in places]
    if sum(sizes) <= _GROUP_BYTES:
        return [places]
    groups = {}
    starts = itertools.accumulate(sizes, initial=0)
    for i, start in zip(places, starts, strict=False):
        number = 1 + (start - _FIRST_GROUP_BYTES) // _GROUP_BYTES
        groups.setdefault(number, []).append(i)
    return list(groups.values())


def group_bytes(variables):
    """Returns the bytes of each group of gradients, in the order of their reduction."""
    by_place = _split_by_bytes(range(len(variables)), variables)
    return [
        sum(_gradient_bytes(variables[i]) for i in places)
        for places in reversed(by_place)
    ]


def _gradient_bytes(variable):
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def groups_argument(groups, num_groups):
    """Returns the argument `groups`, also where its deprecated name was used."""
    if num_groups:
        # The line of the caller of the function that has these arguments.
        warnings.warn(
            "num_groups is deprecated: use groups.", DeprecationWarning, stacklevel=3
        )
    return groups if groups is not None else num_groups or None


def check_groups(groups):
    """Raises a ValueError for an argument `groups` of no meaning."""
    is_count = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    is_nested = isinstance(groups, list) and all(
        isinstance(group, list | tuple) for group in groups
    )
    if groups is not None and not is_count and not is_nested:
        raise ValueError(
            "groups must be None, a positive number of groups, or a list of lists of "
            f"variables. Received: {groups!r}"
        )
