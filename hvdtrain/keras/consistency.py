"""Detection of ranks whose variables differ although they must be equal."""

import contextlib
import contextvars
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.dtypes import as_tensorflow
from hvdtrain.collectives.objects import (
    allgather_object,
    group_by_value,
    name_values,
)
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    is_elastic,
    needs_communication,
)
from hvdtrain.collectives.transport import Sum
from hvdtrain.keras.gradients import Gradients
from hvdtrain.keras.unlisted import INITIAL, Unlisted
from hvdtrain.keras.variables import Variable
from hvdtrain.output import name_ranks
from hvdtrain.sharding.shards import get_stages

CHECK_SETUP = (
    "Check that the optimizer is a DistributedOptimizer and that "
    "BroadcastGlobalVariablesCallback(0) is the first callback, and pass variables "
    "that are meant to differ as local_variables. A weight that a layer updates in its "
    "call needs a reduction there, by hvd.allreduce, or is made with "
    'aggregation="mean", for AverageMovingStatisticsCallback.'
)
BROADCAST_FIRST = (
    "Before the first step the ranks need equal weights and optimizer state: make "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) the first callback of fit, or "
    "call hvd.broadcast_variables for model.variables, whose seeds of random layers "
    "stay different by rank, and for optimizer.variables. "
    "Register variables that are meant to differ as local ones."
)
BROADCAST_AGAIN = (
    "They have been changed in different ways since the last fit. Change them on every "
    "rank, or pass a new hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit on "
    "every rank, which gives all of them the state of rank 0. Register variables that "
    "are meant to differ as local ones."
)
# The attribute of a tf.Variable that holds the check of its first step.
_CHECK = "_hvdtrain_first_step"
_is_unchecked = contextvars.ContextVar("is_unchecked", default=False)
# Path, shape and checksum of a variable.
_Description: TypeAlias = tuple[str, tuple[int, ...], int]


class DesynchronizedError(RuntimeError):
    """Variables that must be equal on all ranks are not."""

    # AutoGraph replaces an exception by one of its own unless it has this constructor.
    __init__ = Exception.__init__


def check_consistency(
    variables: Sequence[Variable],
    unlisted: Sequence[Unlisted] = (),
    *,
    process_set: ProcessSet = global_process_set,
    remedy: str = CHECK_SETUP,
    precedes_broadcast: bool = False,
) -> None:
    """Raise an error on every rank unless `variables` are equal on all of them.

    So must be the values of `unlisted`, which are in no variable. If this
    `precedes_broadcast`, ranks may have initial ones of a layer. A collective.

    Raises:
        DesynchronizedError: names the first variable that differs, which ranks hold
            equal values of it, and the `remedy`.
    """
    if not needs_communication(process_set):
        return
    checksums = [_checksum(variable) for variable in variables]
    texts = [zlib.crc32(value.text.encode()) for value in unlisted]
    if _is_equal_on_all_ranks(checksums + texts, process_set):
        return
    paths = [getattr(variable, "path", variable.name) for variable in variables]
    shapes = [tuple(variable.shape) for variable in variables]
    described = list(zip(paths, shapes, checksums, strict=True))
    descriptions_by_rank, unlisted_by_rank = zip(
        *allgather_object(
            (described, list(unlisted)),
            name="ConsistencyDetails",
            process_set=process_set,
        ),
        strict=True,
    )
    if explanation := _explain(descriptions_by_rank, process_set.ranks):
        raise DesynchronizedError(f"{explanation} {remedy}")
    if explanation := _explain_unlisted(
        unlisted_by_rank, process_set.ranks, precedes_broadcast
    ):
        raise DesynchronizedError(explanation)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Compare no first step in the block, which traces a step that is never run."""
    token = _is_unchecked.set(True)
    try:
        yield
    finally:
        _is_unchecked.reset(token)


def is_checked() -> bool:
    """Return whether this is no block of `unchecked`."""
    return not _is_unchecked.get()


def trains_stages(process_set: ProcessSet, weights: Iterable[keras.Variable]) -> bool:
    """Return whether several of these ranks train stages, which differ in layers."""
    stages = get_stages(weights)
    return stages is not None and len({*process_set.ranks} & {*stages.ranks}) > 1


def check_first_step(
    variables: Sequence[Variable],
    unlisted: Sequence[Unlisted],
    *,
    process_set: ProcessSet,
) -> None:
    """Raise an error on every rank unless all start with equal `variables`.

    Call it while the first step is traced, or executed eagerly: each rank does this
    once, before its first reduction. In an elastic job it does nothing, since ranks
    that join later trace a step that the others have traced before.

    Raises:
        DesynchronizedError: with the remedy.
    """
    if is_elastic():
        return
    # Compare values now, outside of the graph that is being traced.
    with tf.init_scope():
        check_consistency(
            variables, unlisted, process_set=process_set, remedy=BROADCAST_FIRST
        )


def check_first_steps(
    gradients: Gradients, variables: Iterable[Variable], *, process_set: ProcessSet
) -> Gradients:
    """Raise an error unless `variables` are equal in the first or second step.

    This is the check of a tape, whose users broadcast variables themselves: Horovod's
    examples do so after their first step. So where the ranks differ in the first step,
    they are compared again in the second.

    Each variable is compared in the first call that has it.

    Returns:
        `gradients`, which a graph evaluates after the comparison.

    Raises:
        DesynchronizedError: with the remedy; in a graph as TensorFlow's error.
    """
    if is_elastic() or _is_unchecked.get() or not needs_communication(process_set):
        return gradients
    # The tf.Variable holds the check, because loops make a tape for every step.
    variables = [as_tensorflow(variable) for variable in variables]
    new = [variable for variable in variables if not hasattr(variable, _CHECK)]
    if new:
        check = _TwoSteps(new, process_set)
        for variable in new:
            setattr(variable, _CHECK, check)
    checks = [getattr(variable, _CHECK) for variable in variables]
    for check in dict.fromkeys(checks):
        gradients = check(gradients)
    return gradients


class _TwoSteps:
    """Compares variables in the first step, and if they differ, in the second."""

    def __init__(self, variables: list[tf.Variable], process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._steps = 0
        with tf.init_scope():
            # Variables that a tf.function creates have no value while it is traced.
            variables = [v for v in variables if bool(v.is_initialized())]
            checksums = [_checksum(variable) for variable in variables]
            is_equal = _is_equal_on_all_ranks(checksums, process_set)
        self._variables = [] if is_equal else variables

    def __call__(self, gradients: Gradients) -> Gradients:
        if not self._variables:
            return gradients
        if tf.executing_eagerly():
            self._step()
            return gradients
        # Compare after the gradients, which read the result of the step before, and
        # before the update, which depends on the tensors that are returned.
        tensors = tf.nest.flatten(gradients, expand_composites=True)
        # A variable that the loss does not use has the gradient None.
        with tf.control_dependencies([t for t in tensors if t is not None]):
            step = tf.py_function(self._step, [], [])
        with tf.control_dependencies([step]):
            return tf.nest.map_structure(
                lambda g: g if g is None else tf.identity(g),
                gradients,
                expand_composites=True,
            )

    def _step(self) -> None:
        self._steps += 1
        if self._steps == 2:
            variables, self._variables = self._variables, []
            check_consistency(
                variables, process_set=self._process_set, remedy=BROADCAST_FIRST
            )


def compute_checksum(variables: Iterable[Variable]) -> int:
    """Return a checksum of this rank's values of variables."""
    return _combine([_checksum(variable) for variable in variables])


def find_differing(
    variables: Sequence[Variable], process_set: ProcessSet
) -> list[Variable]:
    """Return the variables whose values differ between these ranks. A collective."""
    checksums = [_checksum(variable) for variable in variables]
    if _is_equal_on_all_ranks(checksums, process_set):
        return []
    checksums_by_rank = allgather_object(
        checksums, name="DifferingVariables", process_set=process_set
    )
    columns = zip(*checksums_by_rank, strict=True)
    pairs = zip(variables, columns, strict=True)
    return [variable for variable, column in pairs if len(set(column)) > 1]


def _combine(checksums: list[int]) -> int:
    return zlib.crc32(np.array(checksums, "uint32").tobytes())


def _checksum(variable: Variable) -> int:
    # An array over the memory of the variable: `numpy()` copies it.
    tensor = tf.convert_to_tensor(variable)
    value = np.ascontiguousarray(np.asarray(tensor))
    header = f"{value.dtype} {value.shape}".encode()
    return zlib.crc32(value.view("uint8").reshape(-1).data, zlib.crc32(header))


def _is_equal_on_all_ranks(checksums: list[int], process_set: ProcessSet) -> bool:
    digest = _combine(checksums)
    # Compare by sums: an allgather fails while a rank has joined. N numbers are equal
    # if and only if N times the sum of their squares is the square of their sum
    # (Cauchy-Schwarz). Halves of 16 bits, so that the squares fit into 64 bits.
    high, low = digest >> 16, digest & 0xFFFF
    sums = ops.allreduce(
        np.array([1, high, high**2, low, low**2], "int64"),
        name="Consistency",
        op=Sum,
        process_set=process_set,
    )
    count, high, high_squares, low, low_squares = sums.numpy().tolist()
    return count * high_squares == high**2 and count * low_squares == low**2


def _explain(
    descriptions_by_rank: Sequence[list[_Description]], ranks: Sequence[int]
) -> str | None:
    """Return how the variables differ, None if they are equal."""
    counts = group_by_value(list(map(len, descriptions_by_rank)), ranks)
    if len(counts) > 1:
        return (
            "The ranks train different models: number of variables is "
            f"{name_values(counts)}. Build and compile the same model on every rank."
        )
    differing = []
    for by_rank in zip(*descriptions_by_rank, strict=True):
        paths, shapes, checksums = zip(*by_rank, strict=True)
        groups = group_by_value(shapes, ranks)
        if len(groups) > 1:
            return (
                f"The ranks train different models: the shape of {paths[0]} is "
                f"{name_values(groups)}. Build the same model on every rank."
            )
        groups = group_by_value(checksums, ranks)
        if len(groups) > 1:
            differing.append((paths[0], groups))
    if not differing:
        return None
    path, groups = differing[0]
    return (
        f"The ranks hold different models: {len(differing)} of "
        f"{len(descriptions_by_rank[0])} variables differ. First: {path}, where "
        + " and ".join(name_ranks(group.ranks) for group in groups)
        + " hold different values."
    )


def _explain_unlisted(
    unlisted_by_rank: Sequence[list[Unlisted]],
    ranks: Sequence[int],
    precedes_broadcast: bool,
) -> str | None:
    names = [[value.name for value in unlisted] for unlisted in unlisted_by_rank]
    counts = group_by_value(list(map(len, names)), ranks)
    if len(counts) > 1:
        return (
            "The ranks train different models: number of layers with a vocabulary or "
            f"bins, and of hyperparameters, is {name_values(counts)}. Build and "
            "compile the same model on every rank."
        )
    for by_rank in zip(*unlisted_by_rank, strict=True):
        groups = group_by_value(by_rank, ranks, key=lambda value: value.text)
        if precedes_broadcast:
            groups = [group for group in groups if group.value.text != INITIAL]
        if len(groups) > 1:
            value = groups[0].value
            texts = name_values(groups, lambda value: value.text)
            return f"The ranks differ in {value.name}: {texts}. {value.remedy}"
    return None
