"""A lease: one job at a time writes to an address.

    .lease/00000007      the process that holds it, or has held it last

Each holder creates an object with the next number, by a conditional put, of which one
succeeds. It writes the object again every some seconds. A job whose object is older is
taken to be dead: the next one creates its own. The first job, if it was only stopped,
then finds the next number, and writes no more. No object is deleted: without one of
them, a job that was stopped for long would not find that others came after it.
"""

import contextlib
import json
import os
import pathlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from hvdtrain.job import JobError
from hvdtrain.stores.object_store import ObjectStore, StoreError

LEASE_SECONDS = 60.0
FOLDER = ".lease"
_CLOCK = f"{FOLDER}/clock"
_NAME = re.compile(rf"{re.escape(FOLDER)}/(\d{{8,}})")


class Lease:
    """The right to write to a store; to be used in a `with` statement.

    Args:
        seconds: after which a lease that is not renewed ends.
        warn: called with the reason when this process waits for a lease to expire.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        warn: Callable[[str], object],
        seconds: float = LEASE_SECONDS,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store = store
        self._warn = warn
        self._seconds = seconds
        self._sleep = sleep
        self._number = 0
        self._own = _describe_process() | {"address": store.address}
        self._content = json.dumps(self._own).encode()
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Self:
        """Take the lease; wait as long as a holder may be dead.

        Raises:
            JobError: another job holds it.
            StoreError: the store cannot be written.
        """
        last = self._last()
        is_ended = last and self._holder(last) == {}
        if last and self._is_running(last) is not False:
            self._wait(last)
        if not self._store.create(_name(last + 1), self._content):
            raise self._in_use(last + 1)
        if last:
            self._abort_uploads(last, late_seconds=0.0 if is_ended else self._seconds)
        self._number = last + 1
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_ended.set()
        self._thread.join(self._seconds)
        # The object stays, since the numbers only grow. Where the store does not
        # respond, the lease ends by its time.
        with contextlib.suppress(StoreError):
            self._store.write(_name(self._number), b"{}")

    def check(self) -> None:
        """Raise `JobError` if another job has taken the lease."""
        has_next = self._holder(self._number + 1) is not None
        # A store may report the own object as missing for a moment. Nobody else deletes
        # it: another job creates the next one.
        if has_next or self._holder(self._number) not in (None, self._own):
            raise self._in_use(self._number + has_next)

    def _renew(self) -> None:
        while not self._is_ended.wait(self._seconds / 4):
            try:
                self.check()
                self._store.write(_name(self._number), self._content)
            except StoreError:
                # The next one tries again; `check` is called before each checkpoint.
                continue
            except JobError:
                return

    def _abort_uploads(self, number: int, *, late_seconds: float) -> None:
        """Abort the uploads of a holder, which may be later than its last renewal."""
        # The lease is taken by now: the job must not end for parts that cost money.
        with contextlib.suppress(FileNotFoundError, StoreError):
            written = self._store.modified(_name(number))
            self._store.abort_uploads(written + late_seconds)

    def _last(self) -> int:
        # Other programs write objects there, too: markers of the folder, for example.
        matches = map(_NAME.fullmatch, self._store.sizes(FOLDER))
        last = max((int(match[1]) for match in matches if match), default=0)
        # A store may list the newest object late.
        while self._holder(last + 1) is not None:
            last += 1
        return last

    def _holder(self, number: int) -> dict[str, Any] | None:
        try:
            holder = json.loads(self._store.read(_name(number)))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            holder = None
        return holder if isinstance(holder, dict) else {"host": "?"}

    def _is_running(self, number: int) -> bool | None:
        """Return whether a holder runs; None for a process of another machine.

        None also for a holder of another address, from which this lease was copied.
        """
        holder = self._holder(number)
        if not holder:
            return False
        if any(holder.get(name) != self._own[name] for name in ("machine", "address")):
            return None
        # This process has held it before, and could not write that it has ended.
        is_own = holder["process"] == os.getpid()
        return not is_own and _start_of(holder["process"]) == holder["started"]

    def _wait(self, number: int) -> None:
        """Return when the lease has ended.

        Raises:
            JobError: it was renewed, or its holder runs on this machine.
        """
        if self._is_running(number):
            raise self._in_use(number)
        written = self._store.modified(_name(number))
        # Seconds by the clock of the store, which may differ from this machine's.
        self._store.write(_CLOCK, b"")
        left = self._seconds - (self._store.modified(_CLOCK) - written)
        if left <= 0:
            return
        self._warn(
            f"{self._describe(number)} has used {self._store} less than "
            f"{self._seconds:.0f} s ago: this job starts in {left:.0f} s if it has "
            "ended by then."
        )
        while left > 0:
            self._sleep(pause := min(left, self._seconds / 12))
            left -= pause
            # First: its end writes it as well.
            is_renewed = self._store.modified(_name(number)) != written
            if self._is_running(number) is False:
                return
            if is_renewed:
                raise self._in_use(number)

    def _in_use(self, number: int) -> JobError:
        return JobError(
            f"{self._store} is in use by another job ({self._describe(number)}): wait "
            "for its end, or choose another model_dir."
        )

    def _describe(self, number: int) -> str:
        holder = self._holder(number) or {}
        return f"process {holder.get('process', '?')} on {holder.get('host', '?')}"


def _name(number: int) -> str:
    return f"{FOLDER}/{number:08}"


def _describe_process() -> dict[str, Any]:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {
        "process": os.getpid(),
        "started": _start_of(os.getpid()),
        "host": socket.gethostname(),
        # The numbers of processes are unique in a PID namespace.
        "machine": f"{boot} {os.readlink('/proc/self/ns/pid')}",
        "token": secrets.token_hex(8),
    }


def _start_of(process: int) -> str:
    """Return when a process has started, in clock ticks since boot; "" if none runs."""
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    # After the name of the program, which may have spaces.
    return status.rpartition(")")[2].split()[19]
