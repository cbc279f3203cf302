"""Dense reductions without negotiation, in memory that the ranks of one node share.

All ranks of a static job run the same graph, so once they have agreed on a reduction in
the first step, Horovod's negotiation has nothing left to decide. An operation of the
native library (`hvdtrain.native`) then adds the ranks' tensors in shared memory. It
costs two barriers in place of Horovod's cycles and messages.

It is used where it can be: see `_obstacle`. `HVDTRAIN_REDUCTION` chooses: `auto`, the
default; `shared_memory`, an error where it cannot be used; `horovod`, never.
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

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain import native
from hvdtrain.collectives import dtypes, graph, threads
from hvdtrain.collectives.environment import is_elastic, quotas
from hvdtrain.collectives.transport import segment
from hvdtrain.collectives.transport.reduction import Average, Sum

_CHOICES = ("auto", "shared_memory", "horovod")
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)


@dataclasses.dataclass(frozen=True)
class Connection:
    """The outcome of `connect`.

    Attributes:
        operations: see `native.Library`; None where Horovod reduces.
        functions: likewise.
        obstacle: why Horovod reduces.
    """

    operations: object = None
    functions: object = None
    obstacle: str = ""


def connect():
    """Connects the ranks of the job, and returns the `Connection`.

    A collective in its first call of a job, with the same answer on all ranks. It has
    to be the start of a rank's first collective, whatever that is: one rank may trace a
    function, call one that an earlier job has traced, or join, while another calls
    eagerly. It cannot be a part of `hvd.init`, after which scripts configure devices
    and threads: TensorFlow's context is initialized by the first operation.

    Raises:
        ValueError: for an unknown value of HVDTRAIN_REDUCTION.
        RuntimeError: HVDTRAIN_REDUCTION=shared_memory cannot be fulfilled.
    """
    return _connector.connect()


@dataclasses.dataclass
class _Connector:
    """Connects the ranks once in a job; `connection` is None before."""

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
def _watch_functions():
    threads.watch(graph.order_token(), prepare=_connect_anew)


def _connect_anew():
    # After a shutdown, the operation's own error says what is missing.
    if _connector.connection is None and hvd.is_initialized():
        connect()


def _connect():
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


def reduction_choice():
    """Returns HVDTRAIN_REDUCTION, `auto` where it is unset or empty.

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


def disconnect():
    """Ends the reductions that other ranks wait in, before this rank leaves the job."""
    left = _connector.disconnect()
    if left and left.functions:
        threads.use_native(None)
        left.functions.hvdtrain_leave()


def reduction_path():
    """How dense gradients are reduced, as a short text; see `connect`."""
    return "shared memory" if connect().operations else "Horovod"


def takes_part(process_set):
    """Whether collectives that are traced now begin with a native operation."""
    if process_set.process_set_id != 0:
        return False
    # Outside of the function that is traced: the first call communicates.
    with tf.init_scope():
        is_native = connect().operations is not None
    return is_native and not tf.executing_eagerly()


def covers(tensor, reduction):
    """Whether tensors of this dtype are reduced natively."""
    if reduction.op not in (Average, Sum) or tensor.dtype not in _DTYPES:
        return False
    is_mean_of_integers = reduction.op == Average and not tensor.dtype.is_floating
    return not is_mean_of_integers and takes_part(reduction.process_set)


def allreduce(tensors, *, name, reduction):
    """Adds or averages tensors of one dtype, which `covers` has accepted.

    The operation compares names, dtypes and shapes of all ranks in every step. If they
    differ, it fails on every rank, and the error holds what each has sent.
    """
    return connect().operations.hvdtrain_allreduce(
        inputs=tensors,
        token=graph.order_token().handle,
        mean=reduction.op == Average,
        collective=name,
        description=reduction.describe(),
    )


def reducescatter(tensors, sizes, *, name, reduction):
    """As `allreduce`, but returns this rank's part of each flattened tensor.

    Args:
        tensors: list of tensors.
        sizes: list of the elements of each rank, for each tensor.
        name: of the operation.
        reduction: a `Reduction`.
    """
    rank = hvd.rank()
    return connect().operations.hvdtrain_reducescatter(
        inputs=tensors,
        token=graph.order_token().handle,
        mean=reduction.op == Average,
        starts=[sum(each[:rank]) for each in sizes],
        sizes=[each[rank] for each in sizes],
        collective=name,
        description=f"scattered parts {sizes}, {reduction.describe()}",
    )


def gathers(dtype, process_set):
    """Whether parts of tensors of this dtype are gathered natively."""
    return dtype in _DTYPES and takes_part(process_set)


def allgather(parts, *, sizes, shapes, name):
    """Gathers parts of one dtype, which `gathers` has accepted; see `gather_shards`."""
    return connect().operations.hvdtrain_allgather(
        parts=parts,
        token=graph.order_token().handle,
        sizes=list(itertools.chain.from_iterable(sizes)),
        # Nothing is copied to a tensor without elements.
        shapes=[[0] if shape is None else shape for shape in shapes],
        collective=name,
        description=f"allgather of {len(parts)} parts",
    )


def compare(signature, *, name):
    """Returns an operation that compares a collective which Horovod moves.

    A rank that calls a native reduction, and one that calls this, find out that they
    differ. Without it they would wait for each other until the stall limit.
    """
    return connect().operations.hvdtrain_compare(
        checksum=signature.checksum(),
        token=graph.order_token().handle,
        collective=name,
        description=signature.describe(),
    )


def join():
    """Takes part in reductions with zeros until every rank has called it.

    Returns:
        The last rank that did; None where Horovod reduces.
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


def reduction_seconds():
    """Seconds that this process has spent in reductions, with waiting for other ranks.

    NaN where Horovod reduces, which does not measure them.
    """
    functions = connect().functions
    if not functions:
        return math.nan
    functions.hvdtrain_reduction_nanoseconds.restype = ctypes.c_uint64
    return 1e-9 * functions.hvdtrain_reduction_nanoseconds()


def _connect_ranks():
    obstacle, library = _obstacle(), None
    if not obstacle:
        try:
            library = native.load()
        except OSError as error:
            obstacle = str(error)
            _warn_of_library(obstacle)
    said = _gather((obstacle, sorted(os.sched_getaffinity(0)), quotas()))
    obstacle = _first_obstacle(each[0] for each in said)
    if not obstacle:
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
                is_core_shared=_is_core_shared([each[1:] for each in said]),
            )
            # Keep the file until all ranks have mapped it.
            obstacle = _first_obstacle(_gather(reason))
    if obstacle:
        return Connection(obstacle=obstacle)
    library.functions.hvdtrain_start()
    threads.use_native(library.functions)
    atexit.register(disconnect)
    return Connection(library.operations, library.functions)


def _is_core_shared(cores_and_quotas):
    """Whether a rank that spins may take processor time from another one."""
    size = len(cores_and_quotas)
    cores = set(itertools.chain.from_iterable(each[0] for each in cores_and_quotas))
    # A shared quota and one quota per rank cannot be told apart. In the second case
    # ranks sleep although they could spin.
    quota = min(itertools.chain(*(each[1] for each in cores_and_quotas)), default=size)
    return min(len(cores), quota) < size


@contextlib.contextmanager
def _reserved_file(functions):
    """Yields rank 0's obstacle and the path of its file; both empty on the others."""
    with contextlib.ExitStack() as stack:
        obstacle = path = ""
        if hvd.rank() == 0:
            try:
                reserved = segment.reserve(functions, hvd.size())
                path = stack.enter_context(reserved).name
            except OSError as error:
                obstacle = str(error)
        yield obstacle, path


def _warn_of_library(obstacle):
    # Other obstacles are facts of the job; this one is a set-up that is incomplete.
    if hvd.rank() == 0 and reduction_choice() == "auto":
        warnings.warn(
            f"Gradients are reduced through Horovod, which is slower: {obstacle}. Set "
            "HVDTRAIN_REDUCTION=horovod to choose this without a warning.",
            stacklevel=2,
        )


def _gather(value):
    """Returns the values of all ranks, each of which JSON can hold. A collective."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = hvd.allgather(tf.constant([len(text)]), name="Connect_lengths")
    texts = hvd.allgather(tf.constant(text), name="Connect")
    return [json.loads(each) for each in dtypes.divide_bytes(texts, lengths)]


def _first_obstacle(obstacles):
    found = (f"{each} (rank {rank})" for rank, each in enumerate(obstacles) if each)
    return next(found, "")


def _obstacle():
    """Returns why this rank cannot reduce in shared memory, or an empty text."""
    if reduction_choice() == "horovod":
        return "HVDTRAIN_REDUCTION=horovod"
    if hvd.local_size() != hvd.size():
        return "the ranks are on several hosts"
    if tf.config.list_physical_devices("GPU"):
        return "gradients are on GPUs"
    return ""
