"""Horovod's collectives as Keras scripts call them: any value, right gradients.

The gradient of a collective is that of the sum of all ranks' losses: what one
process finds that computes all ranks' losses and adds them up. Averaged over ranks,
as the distributed optimizer does it, it is the gradient of the mean loss. Horovod's
own gradients follow this for allreduce and alltoall; those of allgather and
broadcast are too small by the number of ranks, and that of reducescatter too large.
"""

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.keras import reduction, wire
from hvdtrain.keras.reduction import Average, Sum, global_process_set
from hvdtrain.keras.wire import Compression


def allreduce(
    value,
    name=None,
    average=None,
    prescale_factor=1.0,
    postscale_factor=1.0,
    op=None,
    compression=Compression.none,
    device_dense="",
    device_sparse="",
    process_set=global_process_set,
    ignore_name_scope=False,
):
    """Reduces `value` over all ranks; as `horovod.tensorflow.keras.allreduce`.

    With op=Average, the mean of a floating point tensor is the mean over the ranks
    that have not called `join`; Horovod itself divides by all.

    Args:
        value: tensor-compatible, of the same shape and dtype on every rank, or
            `tf.IndexedSlices`.
        name: names the operation; ranks are matched by it.
        average: Horovod's deprecated switch between Average and Sum; use `op`.
        prescale_factor: multiplies the input before the reduction.
        postscale_factor: multiplies the result.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        compression: how the tensor travels: `Compression.none`, `fp16` or `bf16`.
        device_dense: device of the reduction of a tensor; "" is the default.
        device_sparse: the same for `tf.IndexedSlices`.
        process_set: the ranks that take part.
        ignore_name_scope: Horovod's; a `name` given here always ignores scopes.

    Returns:
        A tensor (or `IndexedSlices`) of `value`'s shape and dtype, the same on
        every rank.

    Raises:
        TypeError: for a dtype that cannot be reduced.
        tensorflow.errors.FailedPreconditionError: if shapes or dtypes differ
            between ranks.
    """
    return grouped_allreduce(
        [value],
        average=average,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        name=name,
    )[0]


def grouped_allreduce(
    tensors,
    average=None,
    device_dense="",
    device_sparse="",
    compression=Compression.none,
    op=None,
    prescale_factor=1.0,
    postscale_factor=1.0,
    process_set=global_process_set,
    ignore_name_scope=False,
    name=None,
):
    """Reduces a list of tensors in one communication per dtype; see `allreduce`."""
    op = hvd.handle_average_backwards_compatibility(op, average)
    options = {
        "name": name,
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "compression": compression,
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "process_set": process_set,
    }

    def reduce(group, _):
        is_sparse = reduction.is_sparse(group[0])
        exchange = reduction.grouped_allreduce if is_sparse else _reduce_dense
        return exchange(group, **options)

    values = [wire.native(tensor) for tensor in tensors]
    return reduction.in_groups(values, reduction.is_sparse, reduce)


def reducescatter(
    value,
    name=None,
    op=Average,
    device_dense="",
    compression=Compression.none,
    process_set=global_process_set,
    ignore_name_scope=False,
    prescale_factor=1.0,
    postscale_factor=1.0,
):
    """Reduces `value` over all ranks and leaves each rank a slice of the result.

    Args:
        value: tensor-compatible, of the same shape and dtype on every rank.
        name: names the operation; ranks are matched by it.
        op: `Average` or `Sum`.
        device_dense: device of the reduction; "" is the default.
        compression: how the tensor travels: `Compression.none`, `fp16` or `bf16`.
        process_set: the ranks that take part.
        ignore_name_scope: Horovod's; a `name` given here always ignores scopes.
        prescale_factor: multiplies the input before the reduction.
        postscale_factor: multiplies the result.

    Returns:
        This rank's share of the rows; the first ranks get one more where the number
        of rows cannot be divided.
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


def grouped_reducescatter(
    tensors,
    device_dense="",
    compression=Compression.none,
    op=Average,
    process_set=global_process_set,
    prescale_factor=1.0,
    postscale_factor=1.0,
    name=None,
):
    """Reduces and scatters a list of tensors; see `reducescatter`."""
    if op not in (Average, Sum):
        raise ValueError(f"op must be hvd.Average or hvd.Sum. Received: op={op}")
    wire.check_not_compiled_by_xla()
    # One operation each: of a group, Horovod would report the last one's errors only.
    shares = []
    with tf.device(device_dense):
        for i, tensor in enumerate(dense(tensors)):
            scatter = _scatter(
                wire.operation_name(f"{name or 'Reducescatter'}_{i}", process_set),
                op,
                process_set,
                {
                    "prescale_factor": prescale_factor,
                    "postscale_factor": postscale_factor,
                },
            )
            sent, context = compression.compress(tensor)
            # Horovod cannot add bfloat16: it travels as float32.
            wide = tf.cast(sent, tf.float32) if sent.dtype == tf.bfloat16 else sent
            wire.check_scatterable(wide)
            share = tf.cast(scatter(wide), sent.dtype)
            shares.append(compression.decompress(share, context))
    return shares


def _scatter(name, op, process_set, scale):
    @tf.custom_gradient
    def scatter(tensor):
        def gradient(upstream):
            gathered = reduction.allgather(
                upstream, name=backward_name(name), process_set=process_set
            )
            factor = scale["prescale_factor"] * scale["postscale_factor"]
            if op == Average:
                factor /= reduction.process_set_size(process_set, gathered.dtype)
            return gathered * factor

        share = wire.in_turn(
            lambda: mpi_ops._reducescatter(
                wire.not_folded(tensor),
                name=name,
                op=op,
                process_set=process_set,
                ignore_name_scope=True,
                **scale,
            )
        )
        return share, gradient

    return scatter


def _reduce_dense(tensors, **options):
    @tf.custom_gradient
    def reduce(*inputs):
        def gradient(*upstream):
            if options["op"] not in (Average, Sum):
                raise NotImplementedError(
                    "Only op=hvd.Average and op=hvd.Sum have a gradient. Received: "
                    f"op={options['op']}. Use tf.stop_gradient around the allreduce."
                )
            backward = {**options, "name": backward_name(options["name"])}
            return reduction.grouped_allreduce(dense(upstream), **backward)

        return reduction.grouped_allreduce(list(inputs), **options), gradient

    return reduce(*dense(tensors))


def dense(values):
    """Returns the tensors of a list of tensor-compatible values."""
    return [tf.convert_to_tensor(wire.native(value)) for value in values]


def backward_name(name, part="gradient"):
    """Name of a gradient's operation, where the operation itself has one."""
    return name and f"{name}_{part}"
