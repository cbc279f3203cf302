"""Whether the ranks can reduce in shared memory, and their connection if they can.

`_obstacle` has the conditions. `HVDTRAIN_REDUCTION` chooses: `auto`, the default, uses
shared memory where it is possible; `shared_memory` raises an error where it is not;
`horovod` never uses it.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import IO, Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain import native
from hvdtrain.collectives import dtypes, graph, threads
from hvdtrain.environment import is_elastic, quotas, stall_limits
from hvdtrain.native import recorder

_CHOICES = ("auto", "shared_memory", "horovod")
# A chunk of each rank: larger ones leave the second-level cache, smaller ones need more
# barriers. All slots together stay below the 64 MB of /dev/shm in a container.
_MAX_SLOT_BYTES = 1 << 20
_MAX_SEGMENT_BYTES = 32 << 20
_LINE_BYTES = 128
# To sleep and be woken takes 50 us and more on a virtual machine, and the steps of
# ranks that share a machine differ by some 100 us. A rank that spins longer takes
# processor time from the threads that compute.
_SPIN_SECONDS = 1e-3


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

    def take(self) -> Connection | None:
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
        connection = _negotiate()
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
    left = _connector.take()
    if left and left.functions:
        threads.use_native(None)
        left.functions.hvdtrain_leave()


def reduction_path() -> str:
    """Return how dense gradients are reduced, as a short text; see `connect`."""
    return "shared memory" if connect().operations else "Horovod"


def _negotiate() -> Connection:
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
        with _chief_file(library.functions) as (obstacle, file):
            obstacles, files = zip(*_gather((obstacle, file)), strict=True)
            obstacle = _first_obstacle(obstacles)
            if obstacle:
                return Connection(obstacle=obstacle)
            reason = _attach(
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
def _chief_file(functions: ctypes.CDLL) -> Iterator[tuple[str, str]]:
    """Yield rank 0's obstacle and the path of its file; both empty on the others."""
    with contextlib.ExitStack() as stack:
        obstacle = path = ""
        if hvd.rank() == 0:
            try:
                reserved = _reserve(functions, hvd.size())
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
    with recorder.collective(
        "Connect", "allgather", size_bytes=len(text), is_of_all_ranks=True
    ):
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


def _reserve(functions: ctypes.CDLL, size: int) -> IO[bytes]:
    """Return an open file for the memory of `size` ranks, removed when it is closed.

    Raises:
        OSError: there is no room for it.
    """
    count = functions.hvdtrain_segment_bytes
    count.restype = ctypes.c_size_t
    count.argtypes = [ctypes.c_int, ctypes.c_size_t]
    return _reserved_file(count(size, _slot_bytes(size)))


def _attach(
    functions: ctypes.CDLL, file: str, *, rank: int, size: int, is_core_shared: bool
) -> str:
    """Map rank 0's `file`, and return the reason if this fails, else an empty text.

    Where `is_core_shared`, ranks sleep at once: one that spins would take the core of
    another one.
    """
    map_file = functions.hvdtrain_connect
    map_file.restype = ctypes.c_char_p
    map_file.argtypes = [*[ctypes.c_int] * 3, ctypes.c_size_t, *[ctypes.c_double] * 3]
    spin_seconds = 0.0 if is_core_shared else _SPIN_SECONDS
    limits = stall_limits()
    try:
        with open(file, "r+b") as opened:
            reason = map_file(
                opened.fileno(), rank, size, _slot_bytes(size), spin_seconds, *limits
            )
    except OSError as error:
        return str(error)
    return reason.decode() if reason else ""


def _slot_bytes(size: int) -> int:
    """Return the bytes of the slot of each of `size` ranks."""
    share = _MAX_SEGMENT_BYTES // (size + 1) // _LINE_BYTES * _LINE_BYTES
    return min(_MAX_SLOT_BYTES, share)


def _directories() -> tuple[str, str]:
    # The first is memory; pages of the second may be written to a disk.
    return "/dev/shm", tempfile.gettempdir()


def _reserved_file(size: int) -> IO[bytes]:
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
