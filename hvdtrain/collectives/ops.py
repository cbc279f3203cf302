"""The collectives that users call: any value in, and gradients.

A collective has the gradient of the sum of all ranks' losses, as one process would
compute it from that sum. Averaged over ranks, as the
distributed optimizer does, it is the gradient of the mean loss. Horovod's own gradients
follow this for allreduce and alltoall; for allgather and broadcast they are too small
by the number of ranks, and for reducescatter too large.
"""

import functools
from collections.abc import Callable, Sequence

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.dtypes import (
    Compression,
    TensorLike,
    as_tensorflow,
    as_tensors,
)
from hvdtrain.collectives.graph import do_not_convert
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    needs_communication,
    rank_in,
    size_of,
)
from hvdtrain.collectives.transport import Average, Reduction, Sum, op_name

# Returns the gradients of the inputs, from those of the results.
Gradient = Callable[..., object]


@do_not_convert
def allreduce(
    value: TensorLike,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: object = None,
    compression: type[hvd.compression.Compressor] = Compression.none,
    device_dense: str = "",
    device_sparse: str = "",
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor | tf.IndexedSlices:
    """Reduce `value` over all ranks; as `horovod.tensorflow.keras.allreduce`.

    With op=Average, the mean of a floating point tensor is the mean over the ranks
    that have not called `join`; Horovod itself divides by all.

    Args:
        value: tensor or `IndexedSlices` of the same shape and dtype on every rank.
        name: name of the operation. Ranks are matched by it inside a `tf.function`,
            and by the order of their calls outside.
        average: Horovod's deprecated switch between Average and Sum; use `op`.
        prescale_factor: number by which the input is multiplied: float64 in float64,
            other floating point dtypes in float32, and integers in float64, after which
            they are truncated.
        postscale_factor: number by which the result is multiplied, in the same way. A
            mean of integers is truncated once, after the multiplication.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        compression: dtype on the wire: `Compression.none`, `fp16` or `bf16`.
        device_dense: device of the reduction of a tensor; "" is the default.
        device_sparse: the same for `tf.IndexedSlices`.
        process_set: the ranks that take part.
        ignore_name_scope: Horovod's; a `name` given here always ignores scopes.

    Returns:
        A tensor (or `IndexedSlices`) of `value`'s shape and dtype, the same on
        every rank.

    Raises:
        TypeError: for a dtype that cannot be reduced, or a factor that is no number.
        ValueError: for an `op` that is none of these, and for `Adasum` over a process
            set, under Gloo, or over a number of ranks that is no power of two.
        tensorflow.errors.FailedPreconditionError: on every rank, if shapes, dtypes,
            kinds (dense or sparse), factors or `op` differ between ranks.
    """
    op = hvd.handle_average_backwards_compatibility(op, average)
    reduction = Reduction.from_arguments(locals())
    return _bind([value], reduction, name)()[0]


@do_not_convert
def grouped_allreduce(
    tensors: Sequence[TensorLike],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[hvd.compression.Compressor] = Compression.none,
    op: object = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduce a list of tensors in one communication per dtype; see `allreduce`."""
    op = hvd.handle_average_backwards_compatibility(op, average)
    reduction = Reduction.from_arguments(locals())
    return _bind(tensors, reduction, name)()


def _bind(
    values: Sequence[TensorLike], reduction: Reduction, name: str | None
) -> Callable[[], list[tf.Tensor | tf.IndexedSlices]]:
    # The caller calls the result: one frame fewer in a traceback.
    values = [as_tensorflow(value) for value in values]
    if not values or any(isinstance(value, tf.IndexedSlices) for value in values):
        # Sparse tensors are gradients, of which no gradient is needed.
        return functools.partial(transport.allreduce, values, reduction, name=name)

    @tf.custom_gradient
    def reduce(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Gradient]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            if reduction.op not in (Average, Sum):
                raise NotImplementedError(
                    "Only op=hvd.Average and op=hvd.Sum have a gradient. Received: "
                    f"op=hvd.{op_name(reduction.op)}. Use tf.stop_gradient around the "
                    "allreduce."
                )
            return transport.allreduce(upstream, reduction, name=_gradient_name(name))

        return transport.allreduce(inputs, reduction, name=name), gradient

    return functools.partial(reduce, *as_tensors(values))


@do_not_convert
def allgather(
    value: TensorLike,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate every rank's `value` on the first axis, in the order of ranks.

    Dtypes, and all axes but the first, agree on all ranks. `allreduce` describes the
    other arguments and the errors.
    """
    return grouped_allgather([value], name=name, process_set=process_set)[0]


@do_not_convert
def grouped_allgather(
    tensors: Sequence[TensorLike],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Gather a list of tensors; see `allgather`."""

    @tf.custom_gradient
    def gather(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Gradient]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            (sizes,) = transport.allgather(
                [tf.stack([tf.shape(x)[0] for x in inputs])[tf.newaxis]],
                name=_gradient_name(name, "sizes"),
                process_set=process_set,
            )
            totals = transport.allreduce(
                upstream,
                Reduction(op=Sum, process_set=process_set),
                name=_gradient_name(name),
            )
            rank = rank_in(process_set)
            starts = tf.reduce_sum(sizes[:rank], axis=0)
            return [
                total[starts[i] : starts[i] + sizes[rank, i]]
                for i, total in enumerate(totals)
            ]

        gathered = transport.allgather(inputs, name=name, process_set=process_set)
        return gathered, gradient

    return gather(*as_tensors(tensors))


@do_not_convert
def broadcast(
    value: TensorLike,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return `root_rank`'s `value` on every rank; shape and dtype agree.

    `allreduce` describes the other arguments.
    """

    @tf.custom_gradient
    def send(tensor: tf.Tensor) -> tuple[tf.Tensor, Gradient]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            (total,) = transport.allreduce(
                [upstream],
                Reduction(op=Sum, process_set=process_set),
                name=_gradient_name(name),
            )
            # Compared in the graph: on ranks that are known not to be the root, the
            # reduction would be pruned, and the root would wait for them.
            is_root = tf.equal(hvd.rank_op(), root_rank)
            return tf.where(is_root, total, tf.zeros_like(total))

        received = transport.broadcast(
            tensor, root_rank, name=name, process_set=process_set
        )
        return received, gradient

    return send(*as_tensors([value]))


@do_not_convert
def broadcast_variables(
    variables: Sequence[keras.Variable | tf.Variable],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Assign `root_rank`'s values to the `variables`, the same list on every rank.

    With `inplace`, write into their memory without a temporary copy.
    """
    variables = [as_tensorflow(variable) for variable in variables]
    if inplace:
        transport.broadcast_in_place(variables, root_rank, process_set=process_set)
        return
    # Horovod's own function names each operation by its variable. The names of Keras'
    # slots contain a layer's number, which differs by rank where one rank has built one
    # more model.
    received = transport.broadcast_all(
        variables, root_rank, name="BroadcastVariables", process_set=process_set
    )
    for variable, value in zip(variables, received, strict=True):
        variable.assign(value)


@do_not_convert
def alltoall(
    tensor: TensorLike,
    splits: TensorLike | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send rows of `tensor` to each rank; return the rows received.

    `allreduce` describes the other arguments.

    Args:
        tensor: tensor-compatible; all axes but the first agree on all ranks.
        splits: integers, in the order of ranks: how many rows of `tensor` go to
            each. By default every rank gets the same number.

    Returns:
        The rows that this rank received, in the order of ranks. If `splits` is given:
        a pair of these and the number of rows from each rank.
    """
    _check_splits(splits)
    base_name = name or "Alltoall"

    @tf.custom_gradient
    def scatter(
        rows: tf.Tensor, counts: tf.Tensor
    ) -> tuple[tuple[tf.Tensor, tf.Tensor], Gradient]:
        output, received = transport.alltoall(
            rows, counts, name=base_name, process_set=process_set
        )

        def gradient(upstream: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, None]:
            returned, _ = transport.alltoall(
                upstream,
                received,
                name=f"{base_name}_gradient",
                process_set=process_set,
            )
            return returned, None

        return (output, received), gradient

    # Horovod takes an empty tensor for equal splits.
    counts = tf.constant([], tf.int32) if splits is None else tf.cast(splits, tf.int32)
    output, received = scatter(*as_tensors([tensor]), counts)
    return output if splits is None else (output, received)


@do_not_convert
def reducescatter(
    value: TensorLike,
    name: str | None = None,
    op: object = Average,
    device_dense: str = "",
    compression: type[hvd.compression.Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce `value` over all ranks; return this rank's share of the rows.

    The first ranks get one row more where the number of rows is not divisible by the
    number of ranks. `op` is `Average` or `Sum`; `allreduce` describes the other
    arguments.
    """
    return grouped_reducescatter(
        [value],
        device_dense=device_dense,
        compression=compression,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )[0]


@do_not_convert
def grouped_reducescatter(
    tensors: Sequence[TensorLike],
    device_dense: str = "",
    compression: type[hvd.compression.Compressor] = Compression.none,
    op: object = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduce and scatter a list of tensors; see `reducescatter`."""
    if not tensors:
        return []
    if op not in (Average, Sum):
        raise ValueError(
            f"op must be hvd.Average or hvd.Sum. Received: op=hvd.{op_name(op)}"
        )
    reduction = Reduction.from_arguments(locals())

    @tf.custom_gradient
    def scatter(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Gradient]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            sent, contexts = reduction.prepare(upstream)
            gathered = transport.allgather(
                sent, name=_gradient_name(name), process_set=process_set
            )
            totals = reduction.finish(gathered, contexts)
            if op == Sum:
                return totals
            return [total / size_of(process_set, total.dtype) for total in totals]

        shares = transport.reducescatter(
            inputs, reduction, name=name or "Reducescatter"
        )
        return shares, gradient

    return scatter(*as_tensors(tensors))


@do_not_convert
def join() -> tf.Tensor:
    """Block until every rank has called it; until then, this rank adds zeros.

    Meanwhile the others may reduce dense tensors over all ranks, and take means over
    the ranks that have not joined: see `allreduce`. Returns the last rank that joined.
    """
    return transport.join()


@do_not_convert
def is_true_on_all_ranks(
    flag: TensorLike, *, name: str, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Return whether `flag` is true on every rank, as a scalar boolean tensor.

    A collective over `process_set`, in a graph or executed eagerly.
    """
    flag = tf.convert_to_tensor(flag)
    if not needs_communication(process_set):
        return flag
    # Count the ranks where it is false: a rank that has joined contributes a zero,
    # which the minimum of the flags would take for false.
    is_false = tf.cast(tf.logical_not(flag), tf.int32)
    count = allreduce(is_false, name=name, op=Sum, process_set=process_set)
    return tf.equal(count, 0)


def _check_splits(splits: TensorLike | None) -> None:
    if splits is None:
        return
    known = tf.get_static_value(tf.convert_to_tensor(splits))
    # Horovod's core aborts the process on a negative number.
    if known is not None and (known < 0).any():
        raise ValueError(f"splits must be 0 or more. Received: {known.tolist()}")


def _gradient_name(name: str | None, suffix: str = "gradient") -> str | None:
    return name and f"{name}_{suffix}"
