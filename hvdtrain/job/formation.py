"""Jobs of processes that a platform has started: the ranks find each other at rank 0.

Rank 0 listens at its address in the platform's description. Each rank registers there
with the identity of its host. When all are here, each receives the variables that
horovodrun sets, and Horovod starts as it does there, over Gloo.

Until then a process replaces an earlier one of its rank, which a platform may have
restarted. Afterwards it waits for the end of the job, whose ranks fail without the
earlier one, and registers for the next job.
"""

import dataclasses
import http.client
import itertools
import json
import os
import pathlib
import secrets
import socket
import threading
import time
import urllib.error
from collections.abc import Mapping
from typing import Any

from horovod.runner.common.util.host_hash import host_hash
from horovod.runner.http import http_client

from hvdtrain import environment, output
from hvdtrain.addresses import LOOPBACK, interface_of, resolution
from hvdtrain.install.compatibility import INSTALL
from hvdtrain.job import launchers, rendezvous
from hvdtrain.job.platforms import PlatformTask
from hvdtrain.job.registry import SLOT_FIELDS, JobState, Registration, Registry
from hvdtrain.job.world import JobError
from hvdtrain.output import name_ranks

_CONNECT_SECONDS = 2.0
_ANSWER = b"HTTP/"
_PRINT_SECONDS = 1.0
# Until a line says why the other ranks may never come.
_DOUBT_SECONDS = 10.0


def join(task: PlatformTask) -> dict[str, str]:
    """Wait until all ranks are here, and return the variables of horovodrun.

    Raises:
        JobError: not all ranks are here in time, or they do not agree.
    """
    try:
        limits = environment.init_limits()
    except ValueError as error:
        raise JobError(str(error)) from None
    if not rendezvous.has_patches():
        raise JobError(
            f"This Horovod cannot make a job of {task.variable}: it lacks the patches "
            f"of hvdtrain. Run {INSTALL}."
        )
    server = _serve(task) if task.rank == 0 else None
    try:
        return _Registering(task, limits).variables()
    except BaseException:
        # A later call listens again, and no late rank finds a job without this one.
        if server:
            server.close()
        raise


def host_identity() -> str:
    """Return a text that is equal for the processes that share this host's memory."""
    # Hosts may have one name; a host has another identity after each boot.
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()
    return host_hash(salt=boot)


def _serve(task: PlatformTask) -> Registry:
    """Return the server of the job, which ends with this process."""
    is_local = task.host in ("localhost", LOOPBACK)
    for port in task.ports:
        try:
            server = Registry((LOOPBACK if is_local else "", port), task)
            break
        except OSError as error:
            reason = error.strerror
    else:
        raise JobError(
            f"Rank 0 cannot listen at port {port}, the one of {task.address} in "
            f"{task.variable}: {reason}. Another process has it, such as a second "
            "start of rank 0, or a server that the script starts before hvd.init()."
        )
    # The port is free for a new rank 0, even if a fork of this one goes on.
    os.register_at_fork(after_in_child=server.socket.close)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Registering:
    """A rank that registers and waits for the others."""

    def __init__(self, task: PlatformTask, limits: environment.InitLimits) -> None:
        self._task, self._limits = task, limits
        self._token = secrets.token_hex(8)
        self._host_hash = host_identity()
        # Where rank 0 was reached last, with the address of this host to it.
        self._found: tuple[str, int] = ("", 0)
        self._own_address = ""

    def variables(self) -> dict[str, str]:
        """Return the variables of horovodrun, when all ranks are here."""
        began, is_reported = time.monotonic(), False
        while True:
            state, reason = self._ask()
            if state.slot:
                return self._variables(state, state.slot)
            seconds = time.monotonic() - began
            if state.error or seconds >= self._limits.timeout_seconds > 0:
                raise JobError(self._failure(state, reason))
            if seconds >= self._report_seconds > 0 and not is_reported:
                self._report(state, reason)
                is_reported = True
            time.sleep(rendezvous.pause_seconds(seconds, self._task.size))

    @property
    def _report_seconds(self) -> float:
        given = self._limits.report_seconds
        is_early = self._task.doubt and environment.INIT_REPORT not in os.environ
        return min(given, _DOUBT_SECONDS) if is_early else given

    def _ask(self) -> tuple[JobState, str]:
        """Return the state of the job, and why rank 0 is not reached, if it is not."""
        reason = ""
        is_refused = False
        for host, port in itertools.product(self._hosts(), self._task.ports):
            try:
                self._connect(host, port)
                state = self._request("GET")
                if not (state.is_here or state.is_closed or state.error):
                    self._request("PUT")
                    state = self._request("GET")
                return state, ""
            except urllib.error.HTTPError as error:
                is_refused |= error.code == http.HTTPStatus.FORBIDDEN
                reason = f"another job, or another program, is at port {port}"
            except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
                reason = f"{error}".strip("<>")
        if is_refused:
            raise JobError(
                f"Rank 0 at {self._task.address} refuses a process without its "
                f"{environment.JOB_SECRET}: set it alike on all ranks."
            )
        return JobState(), reason

    def _hosts(self) -> list[str]:
        """Return where to look for rank 0.

        A host whose own name has no address, or another host's, has its loopback.
        """
        host = self._task.host
        if self._task.rank == 0:
            return [LOOPBACK]
        return [host, LOOPBACK] if host == socket.gethostname() else [host]

    def _connect(self, host: str, port: int) -> None:
        """Find the address of rank 0, with a short limit, and the own one to it."""
        with socket.create_connection((host, port), _CONNECT_SECONDS) as connection:
            self._own_address = connection.getsockname()[0]
            self._found = (connection.getpeername()[0], port)
            # Another program may be at one of several ports, and not answer at all.
            if len(self._task.ports) > 1:
                connection.sendall(f"GET /{self._task.key}/ HTTP/1.0\r\n\r\n".encode())
                if not connection.recv(len(_ANSWER)).startswith(_ANSWER):
                    raise ConnectionError(f"another program is at port {port}")

    def _request(self, method: str) -> JobState:
        body, key = b"", f"{self._task.rank}-{self._token}"
        if method == "PUT":
            rank, size = self._task.rank, self._task.size
            host = socket.gethostname()
            new = Registration(self._token, rank, size, self._host_hash, host)
            body = json.dumps(dataclasses.asdict(new)).encode()
        scope = self._task.key
        received = http_client.send_request(method, *self._found, scope, key, body)
        return JobState(**json.loads(received)) if received else JobState()

    def _variables(self, state: JobState, slot: Mapping[str, Any]) -> dict[str, str]:
        # HOROVOD_LOCAL_RANK and others, as horovod.runner.gloo_run sets them.
        of_slot = {f"HOROVOD_{name.upper()}": str(slot[name]) for name in SLOT_FIELDS}
        return of_slot | launchers.gloo_variables(
            address=state.near_address or self._found[0],
            port=state.port,
            interface=interface_of(state.near_address or self._own_address),
        )

    def _report(self, state: JobState, reason: str) -> None:
        present = set(range(self._task.size)) - set(state.missing)
        if state.missing and self._task.rank != min(present):
            return
        end = f"and ends after {self._limits.timeout_seconds:g} s"
        if not self._limits.timeout_seconds:
            end = "without a limit"
        output.write_error(
            f"hvd.init: rank {self._task.rank} has waited for "
            f"{self._report_seconds:g} s, {end} ({environment.INIT_TIMEOUT}): "
            f"{self._cause(state, reason)}.{self._remedy(state)}\n",
            timeout_seconds=_PRINT_SECONDS,
        )

    def _failure(self, state: JobState, reason: str) -> str:
        text = (
            f"Received {self._task.declaration}, which do not form a job: "
            f"{self._cause(state, reason)}.{self._remedy(state)}"
        )
        if not state.error:
            text += (
                f" The limit is {self._limits.timeout_seconds:g} s "
                f"({environment.INIT_TIMEOUT})."
            )
        return text

    def _remedy(self, state: JobState) -> str:
        """Return what to do about ranks that were never started."""
        if state.error or state.is_closed:
            return ""
        alone = "Set HVDTRAIN_ALONE=1 if this process is to train alone."
        return f" {self._task.doubt}{alone}"

    def _cause(self, state: JobState, reason: str) -> str:
        task = self._task
        if state.error:
            return state.error
        if state.is_closed:
            return (
                f"rank {task.rank} is in the job at {task.address} already, which "
                "has not ended: this process was started twice, or restarted"
            )
        if state.missing:
            called = "has" if len(state.missing) == 1 else "have"
            return f"{name_ranks(state.missing)} {called} not called hvd.init"
        return (
            f"rank 0 does not answer at {task.address}: {reason}; on "
            f"{socket.gethostname()}, {resolution(task.host)}. Start rank 0, or "
            f"correct {task.variable}, or the name in the DNS or /etc/hosts, which "
            "needs an IPv4 address"
        )
