"""Which ranks take part in a collective: membership, size and rank."""

from typing import TypeAlias

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.environment import is_elastic

ProcessSet: TypeAlias = hvd.ProcessSet
global_process_set = hvd.global_process_set


def needs_communication(process_set: ProcessSet) -> bool:
    """Return whether a collective over `process_set` reaches another rank."""
    # A function traced on one rank of an elastic job is run again after growth: its
    # graph must hold the collective.
    return process_set.included() and (process_set.size() > 1 or is_elastic())


def size_of(process_set: ProcessSet, dtype: tf.DType) -> tf.Tensor:
    """Return the number of ranks in `process_set`, as a scalar tensor of `dtype`."""
    # The size of an elastic job changes under a function that is already traced.
    if is_elastic():
        return tf.cast(hvd.size_op(process_set.process_set_id), dtype)
    return tf.constant(process_set.size(), dtype)


def rank_in(process_set: ProcessSet) -> int | tf.Tensor:
    """Return the number of this rank among the ranks of `process_set`."""
    # The rank of a process in an elastic job changes under a traced function.
    if is_elastic() and process_set.process_set_id == 0:
        return hvd.rank_op()
    return process_set.rank()


def check_root(root_rank: int, process_set: ProcessSet) -> None:
    """Raise a ValueError unless `root_rank` is one of the ranks of `process_set`."""
    if root_rank not in process_set.ranks:
        raise ValueError(
            "root_rank must be one of the ranks that take part. "
            f"Received: {root_rank}, expected one of {list(process_set.ranks)}."
        )
