"""The ranks of a job under Gloo wait for each other before Horovod connects them.

Gloo would abort the process after 30 s. Its sockets accept any process: they exist only
when all ranks have signed that they are here.
"""

import http
import itertools
import os
import time
import urllib.error

from horovod.runner.http import http_client

from hvdtrain import environment, output
from hvdtrain.environment import InitLimits
from hvdtrain.job import launchers
from hvdtrain.job.world import JobError
from hvdtrain.output import name_ranks

_ATTEMPTS, _RETRY_SECONDS = 5, 0.5
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.01, 0.5
# Of all ranks: the launcher's store answers some 1,300 on one core.
_REQUESTS_PER_SECOND = 500
_PRINT_SECONDS = 1.0
_inits = itertools.count()


def has_patches() -> bool:
    """Return whether the installed Horovod has the patches of hvdtrain."""
    return hasattr(http_client, "send_request")


def wait_for_ranks(*, rank: int, size: int) -> None:
    """Return when all ranks have called this as often as this rank has.

    Raises:
        JobError: a rank is late by more than the limit, or the launcher refuses this
            process.
    """
    if not has_patches():
        return
    limits = environment.init_limits()
    scope = f"init-{next(_inits)}"
    _request("PUT", scope, str(rank))
    began, is_reported = time.monotonic(), False
    while late := sorted(set(range(size)) - _arrived(scope)):
        seconds = time.monotonic() - began
        is_first = rank == min(set(range(size)) - set(late))
        if seconds >= limits.timeout_seconds > 0:
            _give_up(late, limits)
        is_slow = seconds >= limits.report_seconds > 0
        if is_slow and is_first and not is_reported:
            _report(late, limits)
            is_reported = True
        time.sleep(pause_seconds(seconds, size))


def pause_seconds(seconds: float, size: int) -> float:
    """Return the time to the next request of a rank that has waited for `seconds`."""
    # Ranks that come together are not delayed, and a late one costs few requests.
    pause = min(max(seconds / 10, _LEAST_PAUSE_SECONDS), _MOST_PAUSE_SECONDS)
    return max(pause, size / _REQUESTS_PER_SECOND)


def _arrived(scope: str) -> set[int]:
    # Without a key: the keys.
    return set(map(int, _request("GET", scope, "").split()))


def _report(late: list[int], limits: InitLimits) -> None:
    end = f"ends after {limits.timeout_seconds:g} s"
    if not limits.timeout_seconds:
        end = "waits without a limit"
    output.write_error(
        f"hvd.init: the job has waited for {name_ranks(late)} for "
        f"{limits.report_seconds:g} s, and {end} ({environment.INIT_TIMEOUT}).\n",
        timeout_seconds=_PRINT_SECONDS,
    )


def _give_up(late: list[int], limits: InitLimits) -> None:
    error = (
        f"{name_ranks(late)} did not call hvd.init within {limits.timeout_seconds:g} s "
        f"of the other ranks. If it does something that takes longer, such as a "
        f"download, set {environment.INIT_TIMEOUT}."
    )
    for rank in late:
        _request("PUT", launchers.LATE_RANKS, str(rank), error.encode())
    raise JobError(error)


def _request(method: str, scope: str, key: str, body: bytes = b"") -> bytes:
    """Return the response of the launcher's store, which may be busy."""
    host, port = (os.environ[name] for name in launchers.GLOO_RENDEZVOUS)
    for attempt in range(_ATTEMPTS):
        try:
            return http_client.send_request(method, host, int(port), scope, key, body)
        except urllib.error.HTTPError as error:
            reason = f"has answered {error.code}"
            if error.code == http.HTTPStatus.FORBIDDEN:
                reason = f"refuses a process without its {environment.JOB_SECRET}"
            break
        except OSError as error:
            reason = f"does not answer: {error}"
            time.sleep(_RETRY_SECONDS * attempt)
    raise JobError(f"The rendezvous at {host}, port {port}, {reason}.")
