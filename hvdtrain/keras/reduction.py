"""How gradients, weights and metrics cross ranks.

Horovod's operations take TensorFlow tensors. The functions here take whatever a
Keras script holds (Keras variables, TensorFlow variables and tensors, NumPy
arrays, Python numbers) and keep Horovod's own names and meaning.
"""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.keras import groups, wire
from hvdtrain.keras.wire import Compression, native

Average, Sum, Adasum = hvd.Average, hvd.Sum, hvd.Adasum
Min, Max, Product = hvd.Min, hvd.Max, hvd.Product
global_process_set = hvd.global_process_set


def allreduce(value, *, name=None, op=Average, process_set=global_process_set):
    """Reduces one `value` over all ranks: `grouped_allreduce` of a list of one."""
    return grouped_allreduce([value], name=name, op=op, process_set=process_set)[0]


def grouped_allreduce(
    values,
    *,
    name=None,
    op=Average,
    prescale_factor=1.0,
    postscale_factor=1.0,
    compression=Compression.none,
    device_dense="",
    device_sparse="",
    process_set=global_process_set,
):
    """Reduces a list of tensors in one communication per dtype.

    Dense tensors are handed to Horovod as one group, so that they share one
    negotiation and one buffer, and are summed in the same order in every run.
    `IndexedSlices` are gathered instead: two communications for the whole list.

    Args:
        values: list of tensor-compatible values or `tf.IndexedSlices`; position,
            shape and dtype agree on all ranks.
        name: prefix of the operations' names.
        op: `Average`, `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        prescale_factor: multiplies the inputs.
        postscale_factor: multiplies the results.
        compression: how tensors travel: `Compression.none`, `fp16` or `bf16`.
        device_dense: device of the reduction of dense tensors; "" is the default.
        device_sparse: the same for `tf.IndexedSlices`.
        process_set: the ranks that take part.

    Returns:
        The reduced values, in the order given.
    """
    wire.check_not_compiled_by_xla()
    name = wire.operation_name(name or "Allreduce", process_set)
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}

    def reduce(group, _):
        if is_sparse(group[0]):
            with tf.device(device_sparse):
                return _allgather_slices(group, name, op, process_set, scale)
        with tf.device(device_dense):
            return _reduce_dense(group, name, op, process_set, scale, compression)

    values = [native(value) for value in values]
    return wire.in_turn(lambda: in_groups(values, is_sparse, reduce))


def allgather(value, name=None, process_set=global_process_set):
    """Concatenates every rank's `value` on the first axis, in the order of ranks.

    Args:
        value: tensor-compatible; all axes but the first agree on all ranks.
        name: names the operation.
        process_set: the ranks that take part.
    """
    return grouped_allgather([value], name=name, process_set=process_set)[0]


def grouped_allgather(values, *, name=None, process_set=global_process_set):
    """Gathers a list of tensors in one communication per dtype; see `allgather`."""
    wire.check_not_compiled_by_xla()
    name = wire.operation_name(name or "Allgather", process_set)
    return wire.in_turn(lambda: _gather(values, name, process_set))


def _gather(values, name, process_set):
    tensors = [tf.convert_to_tensor(native(value)) for value in values]
    for tensor in tensors:
        wire.check_has_rows(tensor)
    packed = [wire.pack(tensor) for tensor in tensors]
    gathered = _by_dtype(
        packed,
        lambda group, number: groups.gather(group, f"{name}_{number}", process_set),
    )
    return [
        wire.unpack(result, tensor.dtype)
        for result, tensor in zip(gathered, tensors, strict=True)
    ]


def broadcast(value, root_rank, name=None, process_set=global_process_set):
    """Returns `root_rank`'s `value` on every rank; shape and dtype agree."""
    wire.check_not_compiled_by_xla()
    name = wire.operation_name(name or "Broadcast", process_set)
    return wire.in_turn(lambda: _broadcast(value, root_rank, name, process_set))


def _broadcast(value, root_rank, name, process_set):
    tensor = tf.convert_to_tensor(native(value))
    received = hvd.broadcast(
        wire.not_folded(wire.pack(tensor)),
        root_rank,
        name=name,
        process_set=process_set,
        ignore_name_scope=True,
    )
    return wire.unpack(received, tensor.dtype)


def broadcast_variables(
    variables, root_rank, process_set=global_process_set, inplace=False
):
    """Assigns `root_rank`'s values to the `variables` of every rank.

    Args:
        variables: Keras or TensorFlow variables, the same list on every rank.
        root_rank: the rank whose values are taken.
        process_set: the ranks that take part.
        inplace: write into the variables' memory without a temporary copy.
    """
    wire.check_not_compiled_by_xla()
    variables = [native(variable) for variable in variables]
    if inplace:
        hvd.broadcast_variables(
            variables, root_rank, process_set=process_set, inplace=True
        )
        return

    # Horovod's own names each by its variable; Keras' names of slots hold the layer's
    # number in its process, which differs where one rank has built a model more.
    def receive_all():
        name = wire.operation_name("BroadcastVariables", process_set)
        return [
            _broadcast(variable, root_rank, f"{name}_{i}", process_set)
            for i, variable in enumerate(variables)
        ]

    def assign_all():
        for variable, value in zip(variables, wire.in_turn(receive_all), strict=True):
            variable.assign(value)

    # Within a function, the broadcasts share a negotiation.
    if tf.executing_eagerly():
        assign_all = tf.function(assign_all, autograph=False)
    assign_all()


def participates(process_set):
    """Whether this rank has anybody in `process_set` to exchange tensors with."""
    # An elastic job may grow from one rank: there the operation is always needed.
    return process_set.included() and (process_set.size() > 1 or groups.is_elastic())


def on_all_ranks(flag, *, name, process_set=global_process_set):
    """Whether `flag` is true on every rank of `process_set`; all get one answer."""
    if not participates(process_set):
        return bool(flag)
    flags = allreduce(np.int32(bool(flag)), name=name, op=Min, process_set=process_set)
    return bool(flags.numpy())


def process_set_size(process_set, dtype):
    """The number of ranks in `process_set`, as a scalar of `dtype`."""
    # An elastic job changes size under a function that was traced before.
    if groups.is_elastic():
        return tf.cast(hvd.size_op(process_set.process_set_id), dtype)
    return tf.constant(process_set.size(), dtype)


def process_set_rank(process_set):
    """This rank's number among the ranks of `process_set`."""
    # An elastic job gives a process another rank under a function traced before.
    if groups.is_elastic() and process_set.process_set_id == 0:
        return hvd.rank_op()
    return process_set.rank()


def is_sparse(value):
    """Whether `value` is a `tf.IndexedSlices`."""
    return isinstance(value, tf.IndexedSlices)


def in_groups(values, key, exchange):
    """Applies `exchange(group, number)` to the values of each `key(value)`.

    Returns:
        Its results, in the order of `values`.
    """
    results = [None] * len(values)
    keys = [key(value) for value in values]
    for number, group in enumerate(dict.fromkeys(keys)):
        places = [i for i, other in enumerate(keys) if other == group]
        exchanged = exchange([values[i] for i in places], number)
        for i, result in zip(places, exchanged, strict=True):
            results[i] = result
    return results


def _by_dtype(tensors, exchange):
    # One Horovod group holds one dtype.
    return in_groups(tensors, lambda tensor: tensor.dtype, exchange)


def _reduce_dense(values, name, op, process_set, scale, compression):
    def reduce(group, number):
        is_bfloat16 = group[0].dtype == tf.bfloat16
        exchange = groups.reduce_bfloat16 if is_bfloat16 else groups.reduce
        return exchange(group, f"{name}_{number}", op, process_set, scale)

    tensors = [tf.convert_to_tensor(value) for value in values]
    sent, contexts = zip(*map(compression.compress, tensors), strict=True)
    return list(map(compression.decompress, _by_dtype(sent, reduce), contexts))


def _allgather_slices(slices, name, op, process_set, scale):
    if op not in (Average, Sum):
        raise NotImplementedError(
            "Sparse gradients (tf.IndexedSlices) can be reduced with op=Average or "
            f"op=Sum only. Received: op={op}. Pass sparse_as_dense=True instead."
        )
    values, indices = (
        _gather([getattr(s, part) for s in slices], f"{name}_{part}", process_set)
        for part in ("values", "indices")
    )
    factor = scale["prescale_factor"] * scale["postscale_factor"]
    values = [groups.scaled(v, factor) for v in values]
    if op == Average:
        values = [v / process_set_size(process_set, v.dtype) for v in values]
    return [
        tf.IndexedSlices(v, i, dense_shape=s.dense_shape)
        for v, i, s in zip(values, indices, slices, strict=True)
    ]
