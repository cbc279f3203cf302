"""Collectives that move values and compute nothing; see `collectives` for gradients."""

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.keras import reduction, wire
from hvdtrain.keras.collectives import backward_name, dense
from hvdtrain.keras.reduction import Sum, global_process_set


def allgather(
    value, name=None, ignore_name_scope=False, process_set=global_process_set
):
    """Concatenates every rank's `value` on the first axis, in the order of ranks.

    Args:
        value: tensor-compatible; all axes but the first agree on all ranks.
        name: names the operation; ranks are matched by it.
        ignore_name_scope: Horovod's; a `name` given here always ignores scopes.
        process_set: the ranks that take part.

    Raises:
        TypeError: for a dtype that cannot be moved.
        tensorflow.errors.FailedPreconditionError: if dtypes, or other axes than the
            first, differ between ranks.
    """
    return grouped_allgather([value], name=name, process_set=process_set)[0]


def grouped_allgather(
    tensors, name=None, ignore_name_scope=False, process_set=global_process_set
):
    """Gathers a list of tensors in one communication per dtype; see `allgather`."""

    @tf.custom_gradient
    def gather(*inputs):
        def gradient(*upstream):
            sizes = reduction.allgather(
                tf.stack([tf.shape(x)[0] for x in inputs])[tf.newaxis],
                name=backward_name(name, "sizes"),
                process_set=process_set,
            )
            totals = reduction.grouped_allreduce(
                dense(upstream),
                name=backward_name(name),
                op=Sum,
                process_set=process_set,
            )
            me = reduction.process_set_rank(process_set)
            starts = tf.reduce_sum(sizes[:me], axis=0)
            return [
                total[starts[i] : starts[i] + sizes[me, i]]
                for i, total in enumerate(totals)
            ]

        gathered = reduction.grouped_allgather(
            inputs, name=name, process_set=process_set
        )
        return gathered, gradient

    return gather(*dense(tensors))


def broadcast(
    value,
    root_rank,
    name=None,
    ignore_name_scope=False,
    process_set=global_process_set,
):
    """Returns `root_rank`'s `value` on every rank; shape and dtype agree.

    Args:
        value: tensor-compatible.
        root_rank: the rank whose value is taken.
        name: names the operation; ranks are matched by it.
        ignore_name_scope: Horovod's; a `name` given here always ignores scopes.
        process_set: the ranks that take part.
    """

    @tf.custom_gradient
    def send(tensor):
        def gradient(upstream):
            total = reduction.allreduce(
                upstream, name=backward_name(name), op=Sum, process_set=process_set
            )
            # Asked at run time: knowing that it is not the root, TensorFlow would
            # drop the reduction, which the others wait for.
            is_root = tf.equal(hvd.rank_op(), root_rank)
            return tf.where(is_root, total, tf.zeros_like(total))

        received = reduction.broadcast(
            tensor, root_rank, name=name, process_set=process_set
        )
        return received, gradient

    return send(*dense([value]))


def alltoall(
    tensor,
    splits=None,
    name=None,
    ignore_name_scope=False,
    process_set=global_process_set,
):
    """Sends a slice of `tensor` to each rank; returns the slices received.

    Args:
        tensor: tensor-compatible; all axes but the first agree on all ranks.
        splits: integers, in the order of ranks: how many rows of `tensor` go to
            each. By default every rank gets the same number.
        name: names the operation; ranks are matched by it.
        ignore_name_scope: Horovod's; a `name` given here always ignores scopes.
        process_set: the ranks that take part.

    Returns:
        The slices that this rank received, concatenated on the first axis. If
        `splits` is given: a pair of that and the number of rows from each rank.
    """
    wire.check_not_compiled_by_xla()
    _check_splits(splits)
    operation = name or "Alltoall"

    def exchange(rows, counts, operation):
        wire.check_has_rows(rows)
        name = wire.operation_name(operation, process_set)
        output, received = wire.in_turn(
            lambda: mpi_ops.alltoall(
                wire.not_folded(wire.pack(rows)),
                splits=counts,
                name=name,
                process_set=process_set,
                ignore_name_scope=True,
            )
        )
        return wire.unpack(output, rows.dtype), received

    @tf.custom_gradient
    def scatter(rows, counts):
        output, received = exchange(rows, counts, operation)

        def gradient(upstream, _):
            return exchange(upstream, received, backward_name(operation))[0], None

        return (output, received), gradient

    # Horovod takes no splits as equal ones.
    counts = tf.constant([], tf.int32) if splits is None else tf.cast(splits, tf.int32)
    output, received = scatter(*dense([tensor]), counts)
    return output if splits is None else (output, received)


def _check_splits(splits):
    if splits is None:
        return
    known = tf.get_static_value(tf.convert_to_tensor(splits))
    # Horovod's core would abort the process.
    if known is not None and (known < 0).any():
        raise ValueError(f"splits must be 0 or more. Received: {known.tolist()}")


def join():
    """Waits until every rank has called it; until then, this rank adds zeros.

    Meanwhile the others may reduce dense tensors over all ranks, and take means over
    the ranks that have not joined: see `allreduce`.

    Returns:
        A scalar tensor: the last rank that joined.
    """
    # Horovod has not told TensorFlow that the operation has an effect. Within one
    # function it would run once, and later calls return at once with its old result:
    # so each call makes a function of its own, when it runs.
    return wire.in_turn(
        lambda: tf.py_function(lambda: tf.function(hvd.join)(), [], tf.int32)
    )
