"""The server of rank 0 at which the ranks of a platform's job register.

When all are here, it makes the plan of hosts, and starts Horovod's rendezvous at a port
of its own: jobs that follow each other at one address have different rendezvous.
"""

import collections
import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from hvdtrain.addresses import LOOPBACK
from hvdtrain.job.platforms import PlatformTask

# A rank that has not asked for so long has ended, or is restarted.
_LOST_SECONDS = 30.0
# Rank 0 waits so long for the other ranks to ask, when the job has an error.
_TELL_SECONDS = 10.0
# Of Horovod's `SlotInfo`.
SLOT_FIELDS = (
    *("hostname", "rank", "size", "local_rank", "local_size"),
    *("cross_rank", "cross_size"),
)


@dataclasses.dataclass(frozen=True)
class Registration:
    """What a rank sends.

    Attributes:
        token: random text of the process.
        size: number of ranks that its variables declare.
        host_hash: equal for ranks that share memory.
        host: name of the host, for messages.
    """

    token: str
    rank: int
    size: int
    host_hash: str
    host: str


@dataclasses.dataclass(frozen=True)
class JobState:
    """The state to a rank that asks.

    Attributes:
        is_here: whether the rank is registered.
        is_closed: whether the job has been made with another process as this rank.
        missing: ranks that are not registered.
        error: why no job is made.
        slot: `SLOT_FIELDS` by name, once all ranks are here.
        port: of Horovod's rendezvous.
        near_address: of this host, for ranks on it; empty for the others.
    """

    is_here: bool = False
    is_closed: bool = False
    missing: tuple[int, ...] = ()
    error: str = ""
    slot: Mapping[str, Any] | None = None
    port: int = 0
    near_address: str = ""


class _Handler(RendezvousHandler):
    server: "Registry"

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        if scope != self.server.task.key:
            super()._put_value(scope, key, value)
            return
        # A stranger may send anything.
        with contextlib.suppress(ValueError, TypeError):
            registration = Registration(**json.loads(value))
            self.server.register(registration, self.connection.getsockname()[0])

    def _get_value(self, scope: str, key: str) -> bytes | None:
        if scope != self.server.task.key:
            return super()._get_value(scope, key)
        rank, _, token = key.partition("-")
        if not rank.isdigit():
            return None
        state = self.server.state(int(rank), token)
        return json.dumps(dataclasses.asdict(state)).encode()


class Registry(RendezvousHTTPServer):
    """Registers the ranks of a job, and starts Horovod's rendezvous for them."""

    def __init__(self, address: tuple[str, int], task: PlatformTask) -> None:
        """Listen at an address of this host.

        Raises:
            OSError: it is in use, or not one of this host.
        """
        super().__init__(address, _Handler, 0)
        self.task = task
        self._lock = threading.Lock()
        self._present: dict[int, Registration] = {}
        self._asked_seconds: dict[int, float] = {}
        self._store: RendezvousHTTPServer | None = None
        # Tokens of processes that have registered before another one of their rank.
        self._successors: dict[str, Registration] = {}
        self._own_addresses: list[str] = []
        self._slots: dict[int, SlotInfo] = {}
        self._error = ""
        self._error_seconds = 0.0
        # Tokens of the ranks that have not received the error.
        self._untold: set[str] = set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of a request that a stranger, or a rank that ends, has sent."""

    def register(self, new: Registration, own_address: str) -> None:
        """Register a rank, unless the job has been made.

        Args:
            own_address: of this host, to which the rank has connected.
        """
        with self._lock:
            if self._slots or new.rank not in range(max(new.size, self.task.size)):
                return
            if new.size != self.task.size:
                self._error = (
                    f"rank {new.rank} on {new.host} expects {new.size} ranks, and rank "
                    f"0 {self.task.size}; start all with one configuration"
                )
                self._error_seconds = time.monotonic()
                others = {r.token for rank, r in self._present.items() if rank}
                self._untold = others | {new.token}
                return
            old = self._present.get(new.rank)
            if old and old.token != new.token:
                self._successors[old.token] = new
            self._present[new.rank] = new
            self._own_addresses.append(own_address)

    def state(self, rank: int, token: str) -> JobState:
        """Return the state of the job for a process."""
        with self._lock:
            if successor := self._successors.get(token):
                return JobState(error=f"it was started again on {successor.host}")
            if self._error:
                return self._tell(rank, token)
            present = self._present.get(rank)
            if not present or present.token != token:
                return JobState(is_closed=bool(self._slots))
            self._asked_seconds[rank] = time.monotonic()
            if not self._slots:
                if missing := self._missing():
                    return JobState(is_here=True, missing=missing)
                self._make_job()
            assert self._store
            is_near = present.host_hash == self._present[0].host_hash
            return JobState(
                is_here=True,
                slot=vars(self._slots[rank]),
                port=self._store.server_port,
                near_address=self._address() if is_near else "",
            )

    def _tell(self, rank: int, token: str) -> JobState:
        self._untold.discard(token)
        elapsed = time.monotonic() - self._error_seconds
        # This server ends with rank 0, and the others would wait for it.
        if rank == 0 and self._untold and elapsed < _TELL_SECONDS:
            return JobState(is_here=True)
        return JobState(error=self._error)

    def _missing(self) -> tuple[int, ...]:
        lost = time.monotonic() - _LOST_SECONDS
        here = {rank for rank, asked in self._asked_seconds.items() if asked > lost}
        return tuple(sorted(set(range(self.task.size)) - here))

    def _make_job(self) -> None:
        self._slots = assign(self._present)
        host = str(self.server_address[0])
        self._store = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
        self._store.init(list(self._slots.values()))
        os.register_at_fork(after_in_child=self._store.socket.close)
        threading.Thread(target=self._store.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Serve no more ranks."""
        for server in filter(None, (self, self._store)):
            server.shutdown()
            server.server_close()

    def _address(self) -> str:
        """Return the address of this host that other hosts reach."""
        outer = (each for each in self._own_addresses if not each.startswith("127."))
        return next(outer, LOOPBACK)


def assign(present: Mapping[int, Registration]) -> dict[int, SlotInfo]:
    """Return Horovod's plan by rank: ranks keep their numbers, and share hosts."""
    ranks_by_host: dict[str, list[int]] = collections.defaultdict(list)
    for rank in sorted(present):
        ranks_by_host[present[rank].host_hash].append(rank)
    slots = {}
    for host, ranks in ranks_by_host.items():
        for local_rank, rank in enumerate(ranks):
            # Hosts with a rank of this local number, in the order of their first rank.
            peers = [h for h, r in ranks_by_host.items() if len(r) > local_rank]
            slots[rank] = SlotInfo(
                hostname=host,
                rank=rank,
                local_rank=local_rank,
                cross_rank=peers.index(host),
                size=len(present),
                local_size=len(ranks),
                cross_size=len(peers),
            )
    return slots
