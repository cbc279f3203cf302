"""Whether the ranks can reduce natively, and their connection if they can.

`_obstacle` has the conditions. `HVDTRAIN_REDUCTION` chooses: `auto`, the default, uses
shared memory within a host, and TCP between hosts, where it is possible; `native`
raises an error where it is not; `horovod` uses neither.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import hmac
import json
import os
import secrets
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain import handshake, native
from hvdtrain.collectives import dtypes, graph, threads
from hvdtrain.collectives.transport import links, places, segment
from hvdtrain.environment import is_elastic, job_secret, quotas, reduction_choice
from hvdtrain.native import recorder


@dataclasses.dataclass(frozen=True)
class Connection:
    """The native library, or the obstacle because of which Horovod reduces.

    Attributes:
        path: how tensors are reduced, as a short text.
    """

    operations: ModuleType | None = None
    functions: ctypes.CDLL | None = None
    obstacle: str = ""
    path: str = "Horovod"


def connect() -> Connection:
    """Connect the ranks of the job, and return the `Connection`.

    The first call in a job is a collective, with the same result on all ranks. It must
    start a rank's first collective, whatever that is: one rank may trace a function,
    call one that an earlier job has traced, or join, while another calls eagerly. It
    cannot be a part of `hvd.init`, after which scripts configure devices and threads:
    TensorFlow's context is initialized by the first operation.

    Raises:
        ValueError: for an unknown value of HVDTRAIN_REDUCTION.
        RuntimeError: HVDTRAIN_REDUCTION=native cannot be fulfilled.
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
    if choice == "native" and hvd.size() > 1 and connection.obstacle:
        raise RuntimeError(
            "HVDTRAIN_REDUCTION=native is not possible: "
            f"{connection.obstacle}. Unset it to reduce through Horovod."
        )
    return connection


def disconnect() -> None:
    """End the reductions that other ranks wait in, before this rank leaves the job."""
    left = _connector.take()
    if left and left.functions:
        threads.use_native(None)
        left.functions.hvdtrain_leave()


def reduction_path() -> str:
    """Return how dense gradients are reduced, as a short text; see `connect`."""
    return connect().path


def _negotiate() -> Connection:
    obstacle, library, listener = _obstacle(), None, None
    with contextlib.ExitStack() as stack:
        if not obstacle:
            try:
                library = native.load()
                if hvd.local_size() != hvd.size():
                    listener = stack.enter_context(
                        contextlib.closing(links.PeerListener())
                    )
            except OSError as error:
                obstacle = str(error)
                _warn(obstacle)
        mine = places.RankPlace(
            hostname=os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
            host=hvd.cross_rank(),
            local_rank=hvd.local_rank(),
            cores=sorted(os.sched_getaffinity(0)),
            quotas=quotas(),
            address=listener.address if listener else ("", 0),
        )
        # Of rank 0. Where the job has a secret, this text alone is of no use.
        salt = secrets.token_hex(handshake.KEY_BYTES)
        sent = (native.INTERFACE, obstacle, dataclasses.asdict(mine), salt)
        interfaces, obstacles, received, salts = zip(*_gather(sent), strict=True)
        obstacle_of_any = _first_obstacle(obstacles)
        if obstacle_of_any and not obstacle:
            _warn(obstacle_of_any)
        obstacle = obstacle_of_any or _interface_obstacle(interfaces)
        # All ranks take the same branch, here and below.
        if obstacle:
            return Connection(obstacle=obstacle)
        all_places = places.RankPlaces(
            [places.RankPlace(**place) for place in received], hvd.rank()
        )
        obstacle = all_places.obstacle
        if obstacle:
            _warn(obstacle)
        elif library:
            key = hmac.digest(job_secret(), salts[0].encode(), "sha256")
            dial = functools.partial(
                _dial, library.functions, listener, all_places, key
            )
            obstacle = _share(library.functions, all_places, dial)
    if obstacle or not library:
        return Connection(obstacle=obstacle)
    library.functions.hvdtrain_start()
    threads.use_native(library.functions)
    atexit.register(disconnect)
    return Connection(library.operations, library.functions, path=all_places.path)


def _dial(
    functions: ctypes.CDLL,
    listener: links.PeerListener | None,
    all_places: places.RankPlaces,
    key: bytes,
) -> list[links.Socket | None]:
    """Return connections to the peers on other hosts, if there are any."""
    host, peers = all_places.host, all_places.peers
    if not listener or not peers:
        return []
    addresses = [
        all_places.by_rank[rank].address
        if functions.hvdtrain_are_connected(len(peers), host, other)
        else None
        for other, rank in enumerate(peers)
    ]
    return listener.connect(addresses, host=host, key=key)


def _share(
    functions: ctypes.CDLL,
    all_places: places.RankPlaces,
    dial: Callable[[], list[links.Socket | None]],
) -> str:
    """Map the memory of this host on all its ranks; return the obstacle, if any."""
    # Only now: a job that is killed while a rank loads TensorFlow leaves no file.
    with _chief_file(functions, all_places) as (obstacle, file):
        obstacles, files = zip(*_gather((obstacle, file)), strict=True)
        obstacle = _first_obstacle(obstacles)
        sockets: list[links.Socket | None] = []
        if not obstacle:
            file = files[all_places.local_ranks[0]]
            try:
                sockets = dial()
                obstacle = segment.attach(functions, file, all_places, sockets)
            except OSError as error:
                obstacle = f"there is no connection to another host: {error}"
            # Keep the file until all ranks have mapped it.
            obstacle = _first_obstacle(_gather(obstacle))
    if obstacle:
        functions.hvdtrain_leave()
        for made in filter(None, sockets):
            made.close()
        _warn(obstacle)
    return obstacle


@contextlib.contextmanager
def _chief_file(
    functions: ctypes.CDLL, all_places: places.RankPlaces
) -> Iterator[tuple[str, str]]:
    """Yield the path of the file of a host's first rank; empty on the others.

    The first of the two is the obstacle, if there is no room for the file.
    """
    with contextlib.ExitStack() as stack:
        obstacle = path = ""
        if hvd.local_rank() == 0:
            try:
                reserved = segment.reserve(functions, all_places)
                path = stack.enter_context(reserved).name
            except OSError as error:
                obstacle = str(error)
        yield obstacle, path


def _warn(obstacle: str) -> None:
    # Users cannot remove other obstacles: these are an incomplete set-up, a firewall,
    # or full memory.
    if hvd.rank() == 0 and reduction_choice() == "auto":
        warnings.warn(
            f"Gradients are reduced through Horovod, which is slower: {obstacle}. Set "
            "HVDTRAIN_REDUCTION=horovod to choose this without a warning.",
            stacklevel=2,
        )


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks, each of which JSON can hold. A collective."""
    text = json.dumps(value).encode()
    with recorder.collective(
        "Connect", "allgather", size_bytes=len(text), is_of_all_ranks=True
    ):
        head = dtypes.pack_head(text, hvd.size())
        heads = hvd.allgather(tf.constant(head[None]), name="Connect")
        lengths, texts = dtypes.unpack_heads(heads.numpy())
        if not texts:
            content = tf.constant(np.frombuffer(text, np.uint8))
            content = hvd.allgather(content, name="Connect_content")
            texts = dtypes.split_bytes(content, lengths)
    return list(map(json.loads, texts))


def _first_obstacle(obstacle_by_rank: Iterable[str]) -> str:
    named = (
        f"{text} (rank {rank})" for rank, text in enumerate(obstacle_by_rank) if text
    )
    return next(named, "")


def _interface_obstacle(interfaces: Sequence[int]) -> str:
    """Return the obstacle of ranks that would send each other different messages."""
    other = next((rank for rank, n in enumerate(interfaces) if n != interfaces[0]), 0)
    if not other:
        return ""
    obstacle = (
        f"rank 0 has interface {interfaces[0]} of the native library, and rank {other} "
        f"has {interfaces[other]}; install the same hvdtrain on all hosts and run "
        "python -m hvdtrain.install there"
    )
    _warn(obstacle)
    return obstacle


def _obstacle() -> str:
    """Return why this rank cannot reduce natively, or an empty text."""
    if reduction_choice() == "horovod":
        return "HVDTRAIN_REDUCTION=horovod"
    if hvd.local_size() != hvd.size() and reduction_choice() == "auto":
        device = links.fast_network() if hvd.mpi_enabled() else ""
        if device:
            return f"MPI connects the hosts, by {device} if it can"
    if tf.config.list_physical_devices("GPU"):
        return "gradients are on GPUs"
    return ""
