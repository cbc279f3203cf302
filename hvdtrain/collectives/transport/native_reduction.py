"""Dense reductions without negotiation, in shared memory and over TCP.

All ranks of a static job call the same collectives in one order, which each call
checks, so Horovod's negotiation has nothing left to decide. An operation of the native
library (`hvdtrain.native`) then adds the tensors: ranks of one host add theirs in
memory that they share, and hosts exchange their sums over TCP: native/hosts.h has how.
This replaces Horovod's cycles and messages. `connection` decides whether this is
possible.
"""

import ctypes
import itertools
import re
from collections.abc import Sequence
from types import ModuleType

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.collectives import graph
from hvdtrain.collectives.process_sets import ProcessSet
from hvdtrain.collectives.transport.connection import connect
from hvdtrain.collectives.transport.reduction import Average, Reduction, Sum
from hvdtrain.collectives.transport.signature import Signature

# Begins the names of eager calls.
_EAGER = "eager"
# In the text of kernel.cc, which has the call of each rank.
_MISMATCH = "Mismatched collectives. Sent by"
_RANK = re.compile(r"\brank \d+: ")
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)


def takes_part(process_set: ProcessSet) -> bool:
    """Return whether collectives that are called now begin with a native operation."""
    if process_set.process_set_id != 0:
        return False
    # Outside of a function that is traced: the first call communicates.
    with tf.init_scope():
        return connect().operations is not None


def covers(tensor: tf.Tensor, reduction: Reduction) -> bool:
    """Return whether tensors of this dtype are reduced natively."""
    is_sum = reduction.op in (Average, Sum)
    return is_sum and tensor.dtype in _DTYPES and takes_part(reduction.process_set)


def allreduce(
    tensors: Sequence[tf.Tensor], *, name: str, reduction: Reduction
) -> list[tf.Tensor]:
    """Reduce tensors of one dtype, which `covers` has accepted.

    The operation compares names, dtypes and shapes of all ranks in every step. If they
    differ, it fails on every rank, and the error holds what each has sent.
    """
    return _operations().hvdtrain_allreduce(
        inputs=tensors,
        token=graph.order_token().handle,
        mean=reduction.operation(tensors[0].dtype) == Average,
        collective=_name(name, "allreduce"),
        description=reduction.describe(),
    )


def reducescatter(
    tensors: Sequence[tf.Tensor],
    sizes: Sequence[Sequence[int]],
    *,
    name: str,
    reduction: Reduction,
) -> list[tf.Tensor]:
    """Reduce as `allreduce`, but return this rank's flat shard of each tensor.

    `sizes` has, for each tensor, the elements of each rank.
    """
    rank = hvd.rank()
    return _operations().hvdtrain_reducescatter(
        inputs=tensors,
        token=graph.order_token().handle,
        mean=reduction.operation(tensors[0].dtype) == Average,
        starts=[sum(size_by_rank[:rank]) for size_by_rank in sizes],
        sizes=[size_by_rank[rank] for size_by_rank in sizes],
        collective=_name(name, "reducescatter"),
        description=f"shards {sizes}, {reduction.describe()}",
    )


def gathers(dtype: tf.DType, process_set: ProcessSet) -> bool:
    """Return whether shards of this dtype are gathered natively."""
    # Only ranks with a peer on each host send to others.
    is_uniform = hvd.is_homogeneous()
    return is_uniform and dtype in _DTYPES and takes_part(process_set)


def allgather(
    shards: Sequence[tf.Tensor],
    *,
    sizes: Sequence[Sequence[int]],
    shapes: Sequence[Sequence[int] | tf.TensorShape | None],
    name: str,
) -> list[tf.Tensor]:
    """Gather shards of one dtype, which `gathers` has accepted; see `gather_shards`."""
    return _operations().hvdtrain_allgather(
        parts=shards,
        token=graph.order_token().handle,
        sizes=list(itertools.chain.from_iterable(sizes)),
        # Nothing is copied to a tensor without elements.
        shapes=[[0] if shape is None else shape for shape in shapes],
        collective=_name(name, "allgather"),
        description=f"allgather of {len(shards)} shards",
    )


def sum_rows(rows: tf.Tensor, *, name: str) -> tf.Tensor:
    """Return the sum over the ranks of integers, of which each rank has its own row."""
    (total,) = _operations().hvdtrain_allreduce(
        inputs=[rows],
        token=graph.order_token().handle,
        mean=False,
        collective=_name(name, "allgather of bytes"),
        description="rows",
    )
    return total


def compare(signature: Signature, *, name: str) -> tf.Operation:
    """Return an operation that compares a collective which Horovod moves.

    It fails where another rank calls a native reduction. Without it both would block
    until the stall limit.
    """
    return _operations().hvdtrain_compare(
        checksum=signature.checksum(),
        token=graph.order_token().handle,
        collective=_name(name, signature.operation),
        # Lengths may change from call to call: see `_name`.
        description="" if tf.executing_eagerly() else signature.describe(),
    )


def join() -> int | None:
    """Contribute zeros to reductions until every rank has called it.

    Return the last rank that has called it, None where Horovod reduces.
    """
    functions = connect().functions
    if not functions:
        return None
    last = ctypes.c_int()
    functions.hvdtrain_join.restype = ctypes.c_char_p
    reason = functions.hvdtrain_join(ctypes.byref(last))
    if reason:
        raise tf.errors.AbortedError(None, None, reason.decode())
    return last.value


def _name(name: str, operation: str) -> str:
    """Return the name by which ranks are matched: of eager calls, their operation.

    Eager calls are matched by their order, as in Horovod. TensorFlow's cache of eager
    kernels has an entry for each value of an attribute, and is never emptied, while
    users number names.
    """
    return f"{_EAGER} {operation}" if tf.executing_eagerly() else name


def is_mismatch(message: str) -> bool:
    """Return whether this is the error of a native operation, with all ranks' calls."""
    return _MISMATCH in message


def are_all_eager(mismatch: str) -> bool:
    """Return whether all ranks have called eagerly, by the message of a mismatch."""
    _, *calls = _RANK.split(mismatch)
    return all(re.search(rf"(^|: ){_EAGER} ", call) for call in calls)


def _operations() -> ModuleType:
    operations = connect().operations
    assert operations is not None
    return operations
