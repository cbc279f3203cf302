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
import json
import os
import tempfile

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain import native
from hvdtrain.collectives.process_sets import is_elastic
from hvdtrain.collectives.transport.reduction import Average, Sum

_CHOICES = ("auto", "shared_memory", "horovod")
_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)

# A chunk of each rank: larger ones leave the second-level cache, smaller ones need more
# barriers. All slots together stay below the 64 MB of /dev/shm in a container.
_MAX_SLOT_BYTES = 1 << 20
_MAX_SEGMENT_BYTES = 32 << 20
_LINE_BYTES = 128
# What a rank sends to the others to connect.
_RECORD_BYTES = 4096
# To sleep and be woken takes 50 us and more on a virtual machine, and the steps of
# ranks that share a machine differ by some 100 us. A rank that spins longer takes
# processor time from the threads that compute.
_SPIN_SECONDS = 1e-3


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


@functools.cache
def connect():
    """Connects the ranks of the job, and returns the `Connection`.

    A collective in its first call of a job. The answer is the same on all ranks.

    Raises:
        ValueError: for an unknown value of HVDTRAIN_REDUCTION.
        RuntimeError: HVDTRAIN_REDUCTION=shared_memory cannot be fulfilled.
    """
    choice = os.environ.get("HVDTRAIN_REDUCTION", "auto")
    if choice not in _CHOICES:
        raise ValueError(
            f"Received HVDTRAIN_REDUCTION={choice}; expected one of "
            f"{', '.join(_CHOICES)}."
        )
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


def disconnect():
    """Ends the reductions that other ranks wait in, before this rank leaves the job."""
    if connect.cache_info().currsize:
        if functions := connect().functions:
            functions.hvdtrain_leave()
        connect.cache_clear()


def path():
    """How dense gradients are reduced, as a short text; see `connect`."""
    return "shared memory" if connect().operations else "Horovod"


def takes_part(process_set):
    """Whether collectives that are traced now begin with a native operation.

    Asked for every collective: the ranks connect in the first, before one of them may
    trace again what the others have not.
    """
    if tf.executing_eagerly() or process_set.process_set_id != 0:
        return False
    # Outside of the function that is traced: the first call communicates.
    with tf.init_scope():
        return connect().operations is not None


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
        mean=reduction.op == Average,
        collective=name,
        description=reduction.describe(),
    )


def compare(signature, *, name):
    """Returns an operation that compares a collective which Horovod moves.

    A rank that calls a native reduction, and one that calls this, find out that they
    differ. Without it they would wait for each other until the stall limit.
    """
    return connect().operations.hvdtrain_compare(
        checksum=signature.checksum(),
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
    reason = functions.hvdtrain_join(ctypes.byref(last))
    if reason:
        raise tf.errors.AbortedError(None, None, reason.decode())
    return last.value


def _connect_ranks():
    with contextlib.ExitStack() as stack:
        obstacle, functions, segment = _obstacle(), None, None
        if not obstacle:
            try:
                library = native.load()
                functions = _declared(library.functions)
                if hvd.rank() == 0:
                    size = functions.hvdtrain_segment_bytes(hvd.size(), _slot_bytes())
                    segment = stack.enter_context(_reserved_file(size)).name
            except OSError as error:
                obstacle = str(error)
        obstacle, segment = _first(obstacle, segment)
        if obstacle:
            return Connection(obstacle=obstacle)
        # The file is removed when all have mapped it: nothing is left behind by a job
        # that is killed.
        obstacle, _ = _first(_map(functions, segment), None)
    if obstacle:
        return Connection(obstacle=obstacle)
    functions.hvdtrain_start()
    atexit.register(disconnect)
    return Connection(library.operations, functions)


def _first(obstacle, segment):
    """Returns the first rank's obstacle, and rank 0's segment. A collective."""
    record = np.zeros([1, _RECORD_BYTES], np.uint8)
    text = json.dumps([obstacle[: _RECORD_BYTES // 2], segment]).encode()
    record[0, : len(text)] = np.frombuffer(text, np.uint8)
    gathered = hvd.allgather(tf.constant(record), name="Connect").numpy()
    said = [json.loads(row.tobytes().rstrip(b"\0")) for row in gathered]
    obstacles = [
        f"{theirs} (rank {rank})" for rank, (theirs, _) in enumerate(said) if theirs
    ]
    return (obstacles or [""])[0], said[0][1]


def _obstacle():
    """Returns why this rank cannot reduce in shared memory, or an empty text."""
    if os.environ.get("HVDTRAIN_REDUCTION") == "horovod":
        return "HVDTRAIN_REDUCTION=horovod"
    if hvd.local_size() != hvd.size():
        return "the ranks are on several hosts"
    if tf.config.list_physical_devices("GPU"):
        return "gradients are on GPUs"
    return ""


def _declared(functions):
    """Returns the C functions with the types that ctypes does not know."""
    functions.hvdtrain_segment_bytes.restype = ctypes.c_size_t
    functions.hvdtrain_segment_bytes.argtypes = [ctypes.c_int, ctypes.c_size_t]
    functions.hvdtrain_connect.restype = ctypes.c_char_p
    functions.hvdtrain_connect.argtypes = [
        *[ctypes.c_int] * 3,
        ctypes.c_size_t,
        *[ctypes.c_double] * 3,
    ]
    functions.hvdtrain_join.restype = ctypes.c_char_p
    return functions


def _slot_bytes():
    share = _MAX_SEGMENT_BYTES // (hvd.size() + 1) // _LINE_BYTES * _LINE_BYTES
    return min(_MAX_SLOT_BYTES, share)


def _directories():
    # The first is memory; pages of the second may be written to a disk.
    return "/dev/shm", tempfile.gettempdir()


def _reserved_file(size):
    """Returns an open temporary file of `size` bytes, which is removed when closed.

    Raises:
        OSError: there is no memory for it.
    """
    errors = []
    for directory in _directories():
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(prefix="hvdtrain-", dir=directory)
                )
                # Without reserved blocks, a full file system would kill the process
                # when it writes to the mapped memory (SIGBUS).
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                errors.append(f"{directory}: {error.strerror}")
                continue
            stack.pop_all()
            return file
    raise OSError(f"no {size:,} bytes of shared memory: {'; '.join(errors)}")


def _map(functions, segment):
    try:
        with open(segment, "r+b") as file:
            reason = functions.hvdtrain_connect(
                file.fileno(),
                hvd.rank(),
                hvd.size(),
                _slot_bytes(),
                _SPIN_SECONDS if hvd.size() <= os.cpu_count() else 0.0,
                *_stall_limits(),
            )
    except OSError as error:
        return str(error)
    return reason.decode() if reason else ""


def _stall_limits():
    """Returns Horovod's seconds until a warning and until a failure; 0 for never."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return 0.0, 0.0
    return (
        float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS") or 60),
        float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") or 0),
    )
