"""Detection of ranks whose variables differ although they must be equal."""

import zlib

import numpy as np
import tensorflow as tf

from hvdtrain.collectives import ops
from hvdtrain.collectives.dtypes import as_tensorflow
from hvdtrain.collectives.objects import (
    allgather_object,
    group_by_value,
    name_ranks,
    name_values,
)
from hvdtrain.collectives.process_sets import (
    global_process_set,
    is_elastic,
    needs_communication,
)
from hvdtrain.collectives.transport import Sum

CHECK_SETUP = (
    "Check that the optimizer is a DistributedOptimizer and that "
    "BroadcastGlobalVariablesCallback(0) is the first callback, and pass variables "
    "that are meant to differ as local_variables."
)
BROADCAST_FIRST = (
    "Before the first step the ranks need equal weights and optimizer state: make "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) the first callback of fit, or "
    "call hvd.broadcast_variables for model.variables and optimizer.variables. "
    "Register variables that are meant to differ as local ones."
)
# The attribute of a tf.Variable that holds the check of its first step.
_CHECK = "_hvdtrain_first_step"


class DesynchronizedError(RuntimeError):
    """Variables that must be equal on all ranks are not."""

    # AutoGraph replaces an exception by one of its own unless it has this constructor.
    __init__ = Exception.__init__


def check_consistency(variables, *, process_set=global_process_set, remedy=CHECK_SETUP):
    """Raises an error on every rank unless `variables` are equal on all of them.

    Args:
        variables: list of Keras or TensorFlow variables, the same on every rank.
        process_set: the ranks that take part.
        remedy: last sentences of the message.

    Raises:
        DesynchronizedError: names the first variable that differs, and which ranks
            hold equal values of it.
    """
    if not needs_communication(process_set):
        return
    checksums = [_checksum(variable) for variable in variables]
    if _is_equal_on_all_ranks(checksums, process_set):
        return
    paths = [getattr(variable, "path", variable.name) for variable in variables]
    shapes = [tuple(variable.shape) for variable in variables]
    everyone = allgather_object(
        list(zip(paths, shapes, checksums, strict=True)),
        name="ConsistencyDetails",
        process_set=process_set,
    )
    raise DesynchronizedError(f"{_explain(everyone, process_set.ranks)} {remedy}")


def check_first_step(variables, *, process_set):
    """Raises an error on every rank unless all start with equal `variables`.

    Call it while the first step is traced, or executed eagerly: each rank does this
    once, before its first reduction. In an elastic job it does nothing, since ranks
    that join later trace a step that the others have traced before.

    Raises:
        DesynchronizedError: with the remedy.
    """
    if is_elastic():
        return
    # Of the variables and not of the graph that is being traced.
    with tf.init_scope():
        check_consistency(variables, process_set=process_set, remedy=BROADCAST_FIRST)


def check_first_steps(gradients, variables, *, process_set):
    """As `check_first_step`, for a step of which only the gradients are known.

    Horovod's examples with a tape broadcast after their first step. So where the
    ranks differ in the first step, they are compared again in the second.

    Args:
        gradients: list of tensors, `tf.IndexedSlices` or None.
        variables: list of Keras or TensorFlow variables; those that were part of an
            earlier call are not compared again.
        process_set: the ranks that take part.

    Returns:
        `gradients`, which a graph evaluates after the comparison.

    Raises:
        DesynchronizedError: with the remedy; in a graph as TensorFlow's error.
    """
    if is_elastic() or not needs_communication(process_set):
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

    def __init__(self, variables, process_set):
        self._process_set = process_set
        self._steps = 0
        with tf.init_scope():
            # Variables that a tf.function creates have no value while it is traced.
            variables = [v for v in variables if bool(v.is_initialized())]
            checksums = [_checksum(variable) for variable in variables]
            is_equal = _is_equal_on_all_ranks(checksums, process_set)
        self._variables = [] if is_equal else variables

    def __call__(self, gradients):
        if not self._variables:
            return gradients
        if tf.executing_eagerly():
            self._step()
            return gradients
        return self._in_graph(gradients)

    def _in_graph(self, gradients):
        # After the gradients, which have read the result of the step before, and
        # before whatever assigns to the variables.
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

    def _step(self):
        self._steps += 1
        if self._steps == 2:
            variables, self._variables = self._variables, []
            check_consistency(
                variables, process_set=self._process_set, remedy=BROADCAST_FIRST
            )


def compute_checksum(variables: list) -> int:
    """Returns a checksum of the values of variables, on this rank."""
    checksums = [_checksum(variable) for variable in variables]
    return zlib.crc32(np.array(checksums, "uint32").tobytes())


def _checksum(variable):
    value = np.ascontiguousarray(variable.numpy())
    header = f"{value.dtype} {value.shape}".encode()
    return zlib.crc32(value.view("uint8").reshape(-1), zlib.crc32(header))


def _is_equal_on_all_ranks(checksums, process_set):
    digest = zlib.crc32(np.array(checksums, "uint32").tobytes())
    # By sums and not by an allgather, which fails while a rank has joined. Numbers
    # are equal if and only if their number times the sum of their squares is the
    # square of their sum. Halves, so that the squares fit into 64 bits.
    high, low = digest >> 16, digest & 0xFFFF
    sums = ops.allreduce(
        np.array([1, high, high**2, low, low**2], "int64"),
        name="Consistency",
        op=Sum,
        process_set=process_set,
    )
    count, high, high_squares, low, low_squares = sums.numpy().tolist()
    return count * high_squares == high**2 and count * low_squares == low**2


def _explain(described_by_rank, ranks):
    counts = group_by_value(list(map(len, described_by_rank)), ranks)
    if len(counts) > 1:
        return (
            "The ranks train different models: number of variables is "
            f"{name_values(counts)}. Build and compile the same model on every rank."
        )
    differing = []
    for by_rank in zip(*described_by_rank, strict=True):
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
    path, groups = differing[0]
    return (
        f"The ranks hold different models: {len(differing)} of "
        f"{len(described_by_rank[0])} variables differ. First: {path}, where "
        + " and ".join(name_ranks(group.ranks) for group in groups)
        + " hold different values."
    )
