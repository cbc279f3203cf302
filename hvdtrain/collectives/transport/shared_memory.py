"""Dense reductions without negotiation, in memory that the ranks of one node share.

All ranks of a static job run the same graph, so once they have agreed on a reduction in
the first step, Horovod's negotiation has nothing left to decide. An operation of the
native library (`hvdtrain.native`) then adds the ranks' tensors in shared memory. It
costs two barriers in place of Horovod's cycles and messages.

`_obstacle` has the conditions. `HVDTRAIN_REDUCTION` chooses: `auto`, the default, uses
it where it is possible; `shared_memory` raises an error where it is not; `horovod`
never uses it.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import json
import math
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain import native
from hvdtrain.collectives import dtypes, graph, threads
from hvdtrain.collectives.environment import is_elastic, quotas
from hvdtrain.collectives.process_sets import ProcessSet
from hvdtrain.collectives.transport import segment
from hvdtrain.collectives.transport.reduction import Average, Reduction, Sum
from hvdtrain.collectives.transport.signature import Signature

_CHOICES = ("auto", "shared_memory", "horovod")
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)


@dataclasses.dataclass(frozen=True)
class Connection:
    """The native library, or the obstacle because of which Horovod reduces."""

    operations: ModuleType | None = None
    functions: ctypes.CDLL | None = None
    obstacle: str = ""


def connect() -> Connection:
    """Connect the ranks of the job, and return the `Connection`.

    The first call in a job is a collective, with the same result on all ranks. It must
    start a rank's first collective, whatever that is: one rank may trace a function,
    call one that an earlier job has traced, or join, while another calls eagerly. It
    cannot be a part of `hvd.init`, after which scripts configure devices and threads:
    TensorFlow's context is initialized by the first operation.

    Raises:
        ValueError: for an unknown value of HVDTRAIN_REDUCTION.
        RuntimeError: HVDTRAIN_REDUCTION=shared_memory cannot be fulfilled.
    """
    return _connector.connect()


@dataclasses.dataclass
class _Connector:
    """Connects the ranks once in a job; `connection` is None before that."""

    connection: Connection | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def connect(self) -> Connection:
        if self.connection is None:
            with self.lock:
                if self.connection is None:
                    self.connection = _connect()
                    _watch_functions()
        return self.connection

    def disconnect(self) -> Connection | None:
        left, self.connection = self.connection, None
        return left


_connector = _Connector()


@functools.cache
def _watch_functions() -> None:
    threads.watch(graph.order_token(), prepare=_connect_anew)


def _connect_anew() -> None:
    # After a shutdown, the operation's own error says what is missing.
    if _connector.connection is None and hvd.is_initialized():
        connect()


def _connect() -> Connection:
    choice = reduction_choice()
    # Both are known to every rank without communication.
    if is_elastic():
        connection = Connection(obstacle="the job is elastic")
    elif hvd.size() == 1:
        connection = Connection(obstacle="the job has one rank")
    else:
        connection = _connect_ranks()
    if choice == "shared_memory" and hvd.size() > 1 and connection.obstacle:
        raise RuntimeError(
            "HVDTRAIN_REDUCTION=shared_memory is not possible: "
            f"{connection.obstacle}. Unset it to reduce through Horovod."
        )
    return connection


def reduction_choice() -> str:
    """Return HVDTRAIN_REDUCTION, `auto` where it is unset or empty.

    Raises:
        ValueError: for an unknown value.
    """
    choice = os.environ.get("HVDTRAIN_REDUCTION") or "auto"
    if choice not in _CHOICES:
        raise ValueError(
            f"Received HVDTRAIN_REDUCTION={choice}; expected one of "
            f"{', '.join(_CHOICES)}."
        )
    return choice


def disconnect() -> None:
    """End the reductions that other ranks wait in, before this rank leaves the job."""
    left = _connector.disconnect()
    if left and left.functions:
        threads.use_native(None)
        left.functions.hvdtrain_leave()


def reduction_path() -> str:
    """Return how dense gradients are reduced, as a short text; see `connect`."""
    return "shared memory" if connect().operations else "Horovod"


def takes_part(process_set: ProcessSet) -> bool:
    """Return whether collectives that are traced now begin with a native operation."""
    if process_set.process_set_id != 0:
        return False
    # Outside of the function that is traced: the first call communicates.
    with tf.init_scope():
        is_native = connect().operations is not None
    return is_native and not tf.executing_eagerly()


def covers(tensor: tf.Tensor, reduction: Reduction) -> bool:
    """Return whether tensors of this dtype are reduced natively."""
    if reduction.op not in (Average, Sum) or tensor.dtype not in _DTYPES:
        return False
    is_mean_of_integers = reduction.op == Average and not tensor.dtype.is_floating
    return not is_mean_of_integers and takes_part(reduction.process_set)


def allreduce(
    tensors: Sequence[tf.Tensor], *, name: str, reduction: Reduction
) -> list[tf.Tensor]:
    """Add or average tensors of one dtype, which `covers` has accepted.

    The operation compares names, dtypes and shapes of all ranks in every step. If they
    differ, it fails on every rank, and the error holds what each has sent.
    """
    return _operations().hvdtrain_allreduce(
        inputs=tensors,
        token=graph.order_token().handle,
        mean=reduction.op == Average,
        collective=name,
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
        mean=reduction.op == Average,
        starts=[sum(size_by_rank[:rank]) for size_by_rank in sizes],
        sizes=[size_by_rank[rank] for size_by_rank in sizes],
        collective=name,
        description=f"shards {sizes}, {reduction.describe()}",
    )


def gathers(dtype: tf.DType, process_set: ProcessSet) -> bool:
    """Return whether shards of this dtype are gathered natively."""
    return dtype in _DTYPES and takes_part(process_set)


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
        collective=name,
        description=f"allgather of {len(shards)} shards",
    )


def compare(signature: Signature, *, name: str) -> tf.Operation:
    """Return an operation that compares a collective which Horovod moves.

    It fails where another rank calls a native reduction. Without it both would block
    until the stall limit.
    """
    return _operations().hvdtrain_compare(
        checksum=signature.checksum(),
        token=graph.order_token().handle,
        collective=name,
        description=signature.describe(),
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


def reduction_seconds() -> float:
    """Return the seconds of this process in reductions, waits for other ranks included.

    NaN where Horovod reduces, which does not measure them.
    """
    functions = connect().functions
    if not functions:
        return math.nan
    functions.hvdtrain_reduction_nanoseconds.restype = ctypes.c_uint64
    return 1e-9 * functions.hvdtrain_reduction_nanoseconds()


def _operations() -> ModuleType:
    operations = connect().operations
    assert operations is not None
    return operations


def _connect_ranks() -> Connection:
    obstacle, library = _obstacle(), None
    if not obstacle:
        try:
            library = native.load()
        except OSError as error:
            obstacle = str(error)
            _warn_of_library(obstacle)
    obstacles, *cores_and_quotas = zip(
        *_gather((obstacle, sorted(os.sched_getaffinity(0)), quotas())), strict=True
    )
    obstacle = _first_obstacle(obstacles)
    # All ranks take the same branch.
    if library and not obstacle:
        # Only now: a job that is killed while a rank loads TensorFlow leaves no file.
        with _reserved_file(library.functions) as (obstacle, file):
            obstacles, files = zip(*_gather((obstacle, file)), strict=True)
            obstacle = _first_obstacle(obstacles)
            if obstacle:
                return Connection(obstacle=obstacle)
            reason = segment.attach(
                library.functions,
                files[0],
                rank=hvd.rank(),
                size=hvd.size(),
                is_core_shared=_is_core_shared(*cores_and_quotas),
            )
            # Keep the file until all ranks have mapped it.
            obstacle = _first_obstacle(_gather(reason))
    if obstacle or not library:
        return Connection(obstacle=obstacle)
    library.functions.hvdtrain_start()
    threads.use_native(library.functions)
    atexit.register(disconnect)
    return Connection(library.operations, library.functions)


def _is_core_shared(
    cores_by_rank: Sequence[list[int]], quotas_by_rank: Sequence[list[float]]
) -> bool:
    """Return whether a rank that spins may take processor time from another one."""
    size = len(cores_by_rank)
    cores = set(itertools.chain.from_iterable(cores_by_rank))
    # A shared quota and one quota per rank cannot be told apart. In the second case
    # ranks sleep although they could spin.
    quota = min(itertools.chain.from_iterable(quotas_by_rank), default=size)
    return min(len(cores), quota) < size


@contextlib.contextmanager
def _reserved_file(functions: ctypes.CDLL) -> Iterator[tuple[str, str]]:
    """Yield rank 0's obstacle and the path of its file; both empty on the others."""
    with contextlib.ExitStack() as stack:
        obstacle = path = ""
        if hvd.rank() == 0:
            try:
                reserved = segment.reserve(functions, hvd.size())
                path = stack.enter_context(reserved).name
            except OSError as error:
                obstacle = str(error)
        yield obstacle, path


def _warn_of_library(obstacle: str) -> None:
    # Users cannot remove the other obstacles; this one is an incomplete set-up.
    if hvd.rank() == 0 and reduction_choice() == "auto":
        warnings.warn(
            f"Gradients are reduced through Horovod, which is slower: {obstacle}. Set "
            "HVDTRAIN_REDUCTION=horovod to choose this without a warning.",
            stacklevel=2,
        )


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks, each of which JSON can hold. A collective."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = hvd.allgather(tf.constant([len(text)]), name="Connect_lengths")
    texts = hvd.allgather(tf.constant(text), name="Connect")
    return list(map(json.loads, dtypes.split_bytes(texts, lengths)))


def _first_obstacle(obstacle_by_rank: Iterable[str]) -> str:
    named = (
        f"{text} (rank {rank})" for rank, text in enumerate(obstacle_by_rank) if text
    )
    return next(named, "")


def _obstacle() -> str:
    """Return why this rank cannot reduce in shared memory, or an empty text."""
    if reduction_choice() == "horovod":
        return "HVDTRAIN_REDUCTION=horovod"
    if hvd.local_size() != hvd.size():
        return "the ranks are on several hosts"
    if tf.config.list_physical_devices("GPU"):
        return "gradients are on GPUs"
    return ""
