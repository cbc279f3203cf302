"""How gradients, weights and metrics cross ranks.

Horovod's operations take TensorFlow tensors. The functions here take whatever a
Keras script holds (Keras variables, TensorFlow variables and tensors, NumPy
arrays, Python numbers) and keep Horovod's own names and meaning.
"""

import os

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.keras import wire
from hvdtrain.keras.wire import Compression, native

Average, Sum, Adasum = hvd.Average, hvd.Sum, hvd.Adasum
Min, Max, Product = hvd.Min, hvd.Max, hvd.Product
global_process_set = hvd.global_process_set


def allreduce(value, *, name, op=Average, process_set=global_process_set):
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
        prescale_factor: multiplies the inputs; not applied to `IndexedSlices`.
        postscale_factor: multiplies the results; not applied to `IndexedSlices`.
        compression: how tensors travel: `Compression.none`, `fp16` or `bf16`.
        device_dense: device of the reduction of dense tensors; "" is the default.
        device_sparse: the same for `tf.IndexedSlices`.
        process_set: the ranks that take part.

    Returns:
        The reduced values, in the order given.
    """
    wire.check_not_compiled_by_xla()
    scale = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}

    def reduce(group):
        if is_sparse(group[0]):
            with tf.device(device_sparse):
                return _allgather_slices(group, name, op, process_set)
        with tf.device(device_dense):
            return _reduce_dense(group, name, op, process_set, scale, compression)

    return in_groups([native(value) for value in values], is_sparse, reduce)


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
    tensors = [tf.convert_to_tensor(native(value)) for value in values]
    packed = [wire.pack(tensor) for tensor in tensors]
    gathered = _by_dtype(packed, lambda group: _gather_group(group, name, process_set))
    return [
        wire.unpack(result, tensor.dtype)
        for result, tensor in zip(gathered, tensors, strict=True)
    ]


def broadcast(value, root_rank, name=None, process_set=global_process_set):
    """Returns `root_rank`'s `value` on every rank; shape and dtype agree."""
    wire.check_not_compiled_by_xla()
    tensor = tf.convert_to_tensor(native(value))
    received = hvd.broadcast(
        wire.pack(tensor),
        root_rank,
        name=name,
        process_set=process_set,
        ignore_name_scope=name is not None,
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

    # One function, so that the broadcasts share a negotiation. Horovod's own names
    # each by its variable; Keras' names of slots hold the layer's number in its
    # process, which differs where one rank has built a model more.
    @tf.function(autograph=False)
    def assign_all():
        for i, variable in enumerate(variables):
            value = broadcast(
                variable,
                root_rank,
                name=f"BroadcastVariables_{i}",
                process_set=process_set,
            )
            variable.assign(value)

    assign_all()


def participates(process_set):
    """Whether this rank has anybody in `process_set` to exchange tensors with."""
    # An elastic job may grow from one rank: there the operation is always needed.
    return process_set.included() and (process_set.size() > 1 or _is_elastic())


def _is_elastic():
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def on_all_ranks(flag, *, name, process_set=global_process_set):
    """Whether `flag` is true on every rank of `process_set`; all get one answer."""
    if not participates(process_set):
        return bool(flag)
    flags = allreduce(np.int32(bool(flag)), name=name, op=Min, process_set=process_set)
    return bool(flags.numpy())


def process_set_size(process_set, dtype):
    """The number of ranks in `process_set`, as a scalar of `dtype`."""
    # An elastic job changes size under a function that was traced before.
    if _is_elastic():
        return tf.cast(hvd.size_op(process_set.process_set_id), dtype)
    return tf.constant(process_set.size(), dtype)


def is_sparse(value):
    """Whether `value` is a `tf.IndexedSlices`."""
    return isinstance(value, tf.IndexedSlices)


def in_groups(values, key, exchange):
    """Applies `exchange` to each list of values with one `key(value)`.

    Returns:
        Its results, in the order of `values`.
    """
    results = [None] * len(values)
    keys = [key(value) for value in values]
    for group in dict.fromkeys(keys):
        places = [i for i, other in enumerate(keys) if other == group]
        exchanged = exchange([values[i] for i in places])
        for i, result in zip(places, exchanged, strict=True):
            results[i] = result
    return results


def _by_dtype(tensors, exchange):
    # One Horovod group holds one dtype.
    return in_groups(tensors, lambda tensor: tensor.dtype, exchange)


def _reduce_dense(values, name, op, process_set, scale, compression):
    def reduce(group):
        is_bfloat16 = group[0].dtype == tf.bfloat16
        exchange = _reduce_bfloat16 if is_bfloat16 else _reduce_group
        return exchange(group, name, op, process_set, scale)

    tensors = [tf.convert_to_tensor(value) for value in values]
    sent, contexts = zip(*map(compression.compress, tensors), strict=True)
    return list(map(compression.decompress, _by_dtype(sent, reduce), contexts))


def _gather_group(tensors, name, process_set):
    *gathered, _ = mpi_ops.grouped_allgather(
        [*tensors, wire.shape_guard(tensors, free_axes=1)],
        name=name and f"{name}_{tensors[0].dtype.name}",
        process_set=process_set,
        ignore_name_scope=name is not None,
    )
    return gathered


def _reduce_group(tensors, name, op, process_set, scale):
    wire.check_reducible(tensors[0])
    # A rank that has joined adds nothing, yet Horovod divides by all ranks: count
    # those that add something. Only the global set can be joined.
    is_global = process_set.process_set_id == 0
    counts_ranks = op == Average and is_global and tensors[0].dtype.is_floating
    members = list(tensors)
    if counts_ranks:
        members.append(tf.ones([1], tensors[0].dtype))
    *reduced, _ = mpi_ops._grouped_allreduce(
        [*members, wire.shape_guard(members)],
        name=name and f"{name}_{tensors[0].dtype.name}",
        op=Sum if counts_ranks else op,
        process_set=process_set,
        # Ranks are matched by the operation's own name: a scope that only one of
        # them has opened must not keep them apart.
        ignore_name_scope=name is not None,
        **scale,
    )
    if not counts_ranks:
        return reduced
    *sums, scaled_count = reduced
    count = tf.round(
        scaled_count[0] / (scale["prescale_factor"] * scale["postscale_factor"])
    )
    return [total / count for total in sums]


def _reduce_bfloat16(tensors, name, op, process_set, scale):
    """Sums bfloat16 tensors, which Horovod's allreduce does not know.

    Each rank receives its share of every rank's buffer, adds the shares in
    float32, and the rounded sums are gathered: the bytes of a bfloat16 ring
    allreduce, with one rounding instead of one per hop. Horovod sees uint16. Lengths
    that differ between ranks fail in the first exchange, other shapes in the second.
    """
    if op not in (Average, Sum) or _is_elastic():
        wide = [tf.cast(tensor, tf.float32) for tensor in tensors]
        reduced = _reduce_group(wide, name, op, process_set, scale)
        return [tf.cast(tensor, tf.bfloat16) for tensor in reduced]
    ranks = process_set.size()
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
    length = tf.size(flat)
    flat = tf.reshape(tf.pad(flat, [[0, -length % ranks]]), [ranks, -1])
    options = {"process_set": process_set, "ignore_name_scope": name is not None}
    shares = mpi_ops.alltoall(
        tf.bitcast(flat, tf.uint16), name=name and f"{name}_scatter", **options
    )
    shares = tf.cast(tf.bitcast(shares, tf.bfloat16), tf.float32)
    total = tf.reduce_sum(shares * scale["prescale_factor"], axis=0)
    total *= scale["postscale_factor"] / (ranks if op == Average else 1)
    sums = tf.cast(total, tf.bfloat16)
    gathered, _ = mpi_ops.grouped_allgather(
        [wire.pack(sums), wire.pack(wire.shape_guard(tensors))],
        name=name and f"{name}_gather",
        **options,
    )
    flat = tf.bitcast(gathered, tf.bfloat16)[:length]
    parts = tf.split(flat, [tf.size(tensor) for tensor in tensors])
    return [
        tf.reshape(part, tf.shape(tensor))
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def _allgather_slices(slices, name, op, process_set):
    if op not in (Average, Sum):
        raise NotImplementedError(
            "Sparse gradients (tf.IndexedSlices) can be reduced with op=Average or "
            f"op=Sum only. Received: op={op}. Pass sparse_as_dense=True instead."
        )
    values = grouped_allgather(
        [s.values for s in slices],
        name=name and f"{name}_values",
        process_set=process_set,
    )
    indices = grouped_allgather(
        [s.indices for s in slices],
        name=name and f"{name}_indices",
        process_set=process_set,
    )
    if op == Average:
        values = [v / process_set_size(process_set, v.dtype) for v in values]
    return [
        tf.IndexedSlices(v, i, dense_shape=s.dense_shape)
        for v, i, s in zip(values, indices, slices, strict=True)
    ]
