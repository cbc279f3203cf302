"""Collectives that move tensors, and the check that all ranks call them alike."""

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.collectives import dtypes, graph, threads
from hvdtrain.collectives.dtypes import TensorLike
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    check_root,
    global_process_set,
)
from hvdtrain.collectives.transport import connection, native_reduction
from hvdtrain.collectives.transport.reduction import Reduction, Sum
from hvdtrain.collectives.transport.signature import Signature, name_difference
from hvdtrain.native import recorder

# A broadcast copies tensors of at most this size into one buffer for each dtype.
_PACKED_BYTES = 2**20
_SAME_CALLBACKS = (
    "Pass callbacks that call collectives, as those of hvd.callbacks, to fit on all "
    "ranks. "
)


def allgather(
    values: Sequence[TensorLike],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Concatenate each value's rows over the ranks; all axes but the first agree."""
    if not values:
        return []
    name = graph.operation_name(name or "Allgather", process_set)
    tensors = dtypes.as_tensors(values)
    for tensor in tensors:
        dtypes.check_has_rows(tensor)
    signature = Signature("allgather", tensors, has_free_rows=True)
    if tf.executing_eagerly():
        exchange = functools.partial(gather_groups, tensors, name, process_set)
    else:
        exchange = functools.partial(
            _allgather, tensors, f"{name}_0", process_set, signature
        )
    return run(
        exchange,
        signature,
        name=name,
        process_set=process_set,
        is_compared=compares_itself(process_set),
    )


def broadcast(
    value: TensorLike,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return `root_rank`'s value on every rank; shape and dtype agree."""
    check_root(root_rank, process_set)
    name = graph.operation_name(name or "Broadcast", process_set)
    (tensor,) = dtypes.as_tensors([value])
    signature = Signature(f"broadcast from rank {root_rank}", [tensor])
    exchange = functools.partial(_broadcast, tensor, root_rank, name, process_set)
    return run(
        exchange,
        signature,
        name=name,
        process_set=process_set,
        is_compared=compares_itself(process_set),
    )


def broadcast_all(
    values: Sequence[TensorLike],
    root_rank: int,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Return `root_rank`'s list of values on every rank, in one negotiation."""
    if not values:
        return []
    check_root(root_rank, process_set)
    name = graph.operation_name(name, process_set)
    tensors = dtypes.as_tensors(values)
    signature = Signature(f"broadcast from rank {root_rank}", tensors)

    def exchange() -> list[tf.Tensor]:
        return _broadcast_packed(tensors, root_rank, name, process_set)

    return run(exchange, signature, name=name, process_set=process_set)


def broadcast_in_place(
    variables: Sequence[tf.Variable],
    root_rank: int,
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Write `root_rank`'s values into TensorFlow variables, without a copy."""
    check_root(root_rank, process_set)
    name = graph.operation_name("BroadcastVariables", process_set)
    signature = Signature(f"broadcast from rank {root_rank}", variables)
    exchange = functools.partial(_broadcast_in_place, variables, root_rank, process_set)
    run(exchange, signature, name=name, process_set=process_set)


def reducescatter(
    tensors: Sequence[tf.Tensor], reduction: Reduction, *, name: str
) -> list[tf.Tensor]:
    """Reduce a list of tensors and return this rank's share of the rows of each."""
    sent, contexts = reduction.prepare(tensors)
    return reduction.finish(reduce_rows(sent, reduction, name=name), contexts)


def reduce_rows(
    tensors: Sequence[tf.Tensor], reduction: Reduction, *, name: str
) -> list[tf.Tensor]:
    """Reduce and scatter tensors that `Reduction.prepare` has returned."""
    process_set = reduction.process_set
    name = graph.operation_name(name, process_set)
    signature = Signature(f"reducescatter, {reduction.describe()}", tensors)
    exchange = functools.partial(_reducescatter, tensors, reduction, name)
    return run(exchange, signature, name=name, process_set=process_set)


def allgather_bytes(
    data: bytes, *, name: str, process_set: ProcessSet = global_process_set
) -> list[bytes]:
    """Return all ranks' `data`, bytes of any length; runs eagerly.

    Where all are short, it is one exchange: each takes round trips, and the start of a
    training has dozens.
    """
    head = dtypes.pack_head(data, process_set.size())
    heads = _gather_heads(head, name, process_set)
    lengths, short = dtypes.unpack_heads(heads)
    if short:
        return short
    content = tf.constant(np.frombuffer(data, np.uint8))
    (content,) = allgather([content], name=f"{name}_content", process_set=process_set)
    return dtypes.split_bytes(content, lengths)


def _gather_heads(head: np.ndarray, name: str, process_set: ProcessSet) -> np.ndarray:
    """Return the heads of all ranks, one row for each."""
    if not native_reduction.takes_part(process_set):
        (rows,) = allgather([head[None]], name=name, process_set=process_set)
        return rows.numpy()
    rows = np.zeros([process_set.size(), len(head)], np.int64)
    rows[process_set.rank()] = head
    tensor = tf.constant(rows)
    exchange = functools.partial(native_reduction.sum_rows, tensor, name=name)
    signature = Signature("allgather of bytes", [tensor])
    done = run(
        exchange, signature, name=name, process_set=process_set, is_compared=True
    )
    return done.numpy()


def run(
    exchange: Callable[[], graph.Nest],
    signature: Signature,
    *,
    name: str,
    process_set: ProcessSet,
    is_compared: bool = False,
) -> graph.Nest:
    """Return the results of `exchange()`, which creates the operations of a collective.

    The collective is ordered after every collective traced before it, and fails on all
    ranks if their signatures differ. A guard precedes it unless `is_compared`: then the
    first of its own operations compares the ranks.
    """
    call = graph.Call(name, signature.operation, signature.tensors, process_set)
    # Called in any case: it connects the ranks in their first collective.
    is_native = native_reduction.takes_part(process_set)

    def guard() -> list[tf.Tensor] | tf.Operation:
        if is_native:
            return native_reduction.compare(signature, name=name)
        # Eager operations are matched by their type: all begin with this type.
        return exchange_guard(signature, f"{name}_0", process_set)

    with _explained_mismatch(signature, process_set):
        return graph.serialize(exchange, call, guard=None if is_compared else guard)


def compares_itself(process_set: ProcessSet) -> bool:
    """Return whether an operation of Horovod is compared without a guard.

    In a function, Horovod compares operations of one name and their shapes. A guard
    would cost a negotiation in each step.
    """
    return not tf.executing_eagerly() and not native_reduction.takes_part(process_set)


@contextlib.contextmanager
def _explained_mismatch(
    signature: Signature, process_set: ProcessSet
) -> Iterator[None]:
    """Replace the error of a mismatch by one with what each rank has sent.

    Only where all ranks call eagerly: within a function, the error is raised by the
    caller's step, and its text remains as it is.
    """
    try:
        yield
    except tf.errors.FailedPreconditionError as error:
        # A mismatch is reported to every rank of the set: all of them get here.
        if "Mismatched" not in error.message or not tf.executing_eagerly():
            raise
        is_native = native_reduction.is_mismatch(error.message)
        if is_native and not native_reduction.are_all_eager(error.message):
            raise
        text = threads.description() + signature.lines()
        with threads.uncompared():
            described, callbacks = (
                allgather_bytes(each.encode(), name="Mismatch", process_set=process_set)
                for each in (text, _calling_callback())
            )
        remedy = _SAME_CALLBACKS if any(callbacks) else ""
        texts = name_difference([text.decode() for text in described])
        if any(callbacks):
            places = [name.decode() or "no callback" for name in callbacks]
            texts = [f"{t}, in {place}" for t, place in zip(texts, places, strict=True)]
        sent = "; ".join(
            f"rank {rank}: {text}"
            for rank, text in zip(process_set.ranks, texts, strict=True)
        )
        cause = "" if is_native else f" Horovod: {error.message}"
        raise tf.errors.FailedPreconditionError(
            error.node_def,
            error.op,
            "Mismatched collectives: the ranks called different ones, or one with "
            f"different arguments. Sent by {sent}. {remedy}Call it alike on all ranks, "
            f"and collectives in one thread.{cause}",
        ) from None


def _calling_callback() -> str:
    """Return the method of a Keras callback that has led here, or an empty text."""
    for frame, _ in traceback.walk_stack(None):
        owner, method = frame.f_locals.get("self"), frame.f_code.co_name
        is_list = isinstance(owner, keras.callbacks.CallbackList)
        is_callback = isinstance(owner, keras.callbacks.Callback) and not is_list
        if is_callback and method.startswith("on_"):
            return f"{type(owner).__name__}.{method}"
    return ""


def exchange_guard(
    signature: Signature,
    name: str,
    process_set: ProcessSet,
    dtype: tf.DType = tf.float32,
) -> list[tf.Tensor]:
    """Compare the ranks' signatures in a negotiation of its own.

    Returns:
        Tensors on which the next operation must have control dependencies.
    """
    # A group of two under the name of the flat buffer of a small bucket: a rank whose
    # dtype or size makes it take the other path fails in the same negotiation.
    agreed = mpi_ops._grouped_allreduce(
        [tf.zeros([1], dtype), signature.guard(dtype)],
        name=name,
        op=Sum,
        process_set=process_set,
        ignore_name_scope=True,
    )
    # Grappler turns an operation that has only control dependents into a NoOp.
    graph.prevent_pruning(agreed[0])
    return agreed


def _allgather(
    tensors: list[tf.Tensor], name: str, process_set: ProcessSet, signature: Signature
) -> list[tf.Tensor]:
    first = dtypes.to_carrier(tensors[0])
    gathered, _ = mpi_ops.grouped_allgather(
        [first, signature.guard(first.dtype)],
        name=name,
        process_set=process_set,
        ignore_name_scope=True,
    )
    # The others start after the guard: where the ranks' lists differ in length, none
    # may be in flight.
    with tf.control_dependencies([gathered]):
        others = gather_groups(tensors[1:], name, process_set)
    return [dtypes.from_carrier(gathered, tensors[0].dtype), *others]


def gather_groups(
    tensors: Sequence[tf.Tensor], name: str, process_set: ProcessSet
) -> list[tf.Tensor]:
    """Gather tensors, known to be alike on all ranks, in one group per dtype."""
    packed = [dtypes.to_carrier(tensor) for tensor in tensors]
    gathered: list[tf.Tensor] = [None] * len(tensors)
    for number, indices in enumerate(dtypes.buckets(packed)):
        bucket = [packed[i] for i in indices]
        unfoldable = graph.block_constant_folding(tf.zeros([0], bucket[0].dtype))
        results = mpi_ops.grouped_allgather(
            [*bucket, unfoldable],
            name=f"{name}_group_{number}",
            process_set=process_set,
            ignore_name_scope=True,
        )
        for i, result in zip(indices, results[:-1], strict=True):
            gathered[i] = dtypes.from_carrier(result, tensors[i].dtype)
    return gathered


def _broadcast_packed(
    tensors: list[tf.Tensor], root_rank: int, name: str, process_set: ProcessSet
) -> list[tf.Tensor]:
    # Small tensors of a dtype are one buffer: to trace an operation of Horovod takes
    # 10 ms, and a model with its optimizer may have thousands of variables.
    dtypes_sent = [tensor.dtype for tensor in tensors]
    tensors = list(map(dtypes.to_carrier, tensors))
    messages = _messages(tensors)
    flat = [
        tf.concat([tf.reshape(tensors[i], [-1]) for i in indices], axis=0)
        if len(indices) > 1
        else tensors[indices[0]]
        for indices in messages
    ]
    broadcast: Callable[[list[tf.Tensor]], list[tf.Tensor]] = functools.partial(
        _broadcast_all, root_rank=root_rank, name=name, process_set=process_set
    )
    # Run one by one, each operation would wait for a negotiation of its own.
    if tf.executing_eagerly():
        specs = tuple(tf.TensorSpec(t.shape, t.dtype) for t in flat)
        number = process_set.process_set_id
        broadcast = _traced_broadcast(specs, root_rank, name, process_set, number)
    results: list[tf.Tensor] = [None] * len(tensors)
    for indices, received in zip(messages, broadcast(flat), strict=True):
        if len(indices) == 1:
            results[indices[0]] = received
            continue
        shapes = [tensors[i].shape for i in indices]
        parts = tf.split(received, [shape.num_elements() for shape in shapes])
        for i, part, shape in zip(indices, parts, shapes, strict=True):
            results[i] = tf.reshape(part, shape)
    return list(map(dtypes.from_carrier, results, dtypes_sent))


def _messages(tensors: list[tf.Tensor]) -> list[list[int]]:
    """Return lists of indices; the tensors of a list have one dtype, sent together."""
    small: dict[tf.DType, list[int]] = {}
    alone = []
    for i, tensor in enumerate(tensors):
        elements = tensor.shape.num_elements()
        if elements is None or elements * tensor.dtype.size > _PACKED_BYTES:
            alone.append([i])
        else:
            small.setdefault(tensor.dtype, []).append(i)
    return [*small.values(), *alone]


def _broadcast_all(
    tensors: list[tf.Tensor], root_rank: int, name: str, process_set: ProcessSet
) -> list[tf.Tensor]:
    return [
        _broadcast(tensor, root_rank, f"{name}_{i}", process_set)
        for i, tensor in enumerate(tensors)
    ]


# The broadcast is repeated at the beginning of each `fit`, where tracing takes most of
# the time of a small model. A process set that is added again has another number, which
# is in the graph.
@functools.lru_cache(maxsize=8)
def _traced_broadcast(
    specs: tuple[tf.TensorSpec, ...],
    root_rank: int,
    name: str,
    process_set: ProcessSet,
    _number: int,
) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
    @tf.function(autograph=False)
    def exchange(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return _broadcast_all(tensors, root_rank, name, process_set)

    return exchange


def _broadcast_in_place(
    variables: Sequence[tf.Variable], root_rank: int, process_set: ProcessSet
) -> list[tf.Tensor]:
    done = hvd.broadcast_variables(
        variables, root_rank, process_set=process_set, inplace=True
    )
    if tf.executing_eagerly():
        return []
    # The next collective of the function has control dependencies on tensors.
    with tf.control_dependencies([done]):
        return [tf.constant(0)]


def _broadcast(
    tensor: tf.Tensor, root_rank: int, name: str, process_set: ProcessSet
) -> tf.Tensor:
    received = hvd.broadcast(
        graph.block_constant_folding(dtypes.to_carrier(tensor)),
        root_rank,
        name=name,
        process_set=process_set,
        ignore_name_scope=True,
    )
    return dtypes.from_carrier(received, tensor.dtype)


def _reducescatter(
    tensors: Sequence[tf.Tensor], reduction: Reduction, name: str
) -> list[tf.Tensor]:
    # One operation for each: of a group, Horovod reports the last one's status alone.
    shares = []
    with tf.device(reduction.device_dense):
        for i, tensor in enumerate(tensors):
            dtypes.check_scatterable(tensor)
            # Horovod cannot add bfloat16.
            is_bfloat16 = tensor.dtype == tf.bfloat16
            wide = tf.cast(tensor, tf.float32) if is_bfloat16 else tensor
            share = mpi_ops._reducescatter(
                graph.block_constant_folding(wide),
                name=f"{name}_{i}",
                op=reduction.operation(tensor.dtype),
                process_set=reduction.process_set,
                ignore_name_scope=True,
            )
            shares.append(tf.cast(share, tensor.dtype))
    return shares


def join() -> tf.Tensor:
    """Block until every rank has called it; return the last rank that did."""
    with tf.init_scope():
        connection.connect()
    call = graph.Call("join", "join", [], global_process_set)
    return graph.serialize(lambda: tf.py_function(_join, [], tf.int32), call)


def _join() -> int | tf.Tensor:
    # The other ranks may still reduce through Horovod and natively, in any order.
    with futures.ThreadPoolExecutor(1) as pool:
        last_native = pool.submit(native_reduction.join)
        # The operation is stateless and has no inputs: TensorFlow runs it once for
        # each graph or eager kernel, and returns that result in later calls (constant
        # folding). Hence each call traces a graph of its own, inside a py_function,
        # which is stateful. A concrete function is not counted as retracing.
        last = tf.function(hvd.join, autograph=False).get_concrete_function()()
    # A rank that has joined has not counted the collectives that it served.
    recorder.renumber_collectives()
    # A native reduction does not wait for a cycle of Horovod, which may therefore
    # receive the calls of the ranks in another order.
    return last if last_native.result() is None else last_native.result()
