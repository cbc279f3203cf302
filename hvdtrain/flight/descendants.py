"""Programs that a rank has started. They end with it.

A program may be in a session of its own, and its parent may have ended. It is found by
the variables with which the launcher has started the rank, which it inherits.
"""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from hvdtrain.processes import read_stat

# The values of one of these are equal in two processes only if a rank of a job has
# started both, or is one of them.
_IDENTITIES = (
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RANK"),
    ("PMIX_NAMESPACE", "PMIX_RANK"),
)
_POLL_SECONDS = 0.02
# From SIGTERM to SIGKILL. The resource tracker of multiprocessing ignores SIGTERM, and
# removes shared memory when the processes that use it have ended.
_GRACE_SECONDS = 2.0
_PROC = pathlib.Path("/proc")


class Orphans:
    """The programs of a rank that has ended, as the rank's guard finds them.

    To be made by a child of the rank. The kernel gives it another parent when the rank
    ends, and the same one to the other children.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._identity = identity(os.environ)
        # The rank may have ended before its guard has started.
        self._start = read_stat(os.getpid()).start_seconds
        with contextlib.suppress(OSError):
            self._start = read_stat(rank).start_seconds

    def end(self) -> None:
        """Wait for the end of the rank, and end its programs."""
        while os.getppid() == self._rank:
            time.sleep(_POLL_SECONDS)
        end(self._find)

    def _find(self) -> Iterator[int]:
        """Yield the programs without a parent; their children follow when they end."""
        for pid in find(self._identity):
            with contextlib.suppress(OSError):
                stat = read_stat(pid)
                # A shell script that has started the rank is older, and has the same
                # variables.
                if (
                    stat.parent == os.getppid()
                    and stat.start_seconds > self._start
                    and pid != os.getpid()
                ):
                    yield pid


def identity(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the processes of a rank have in common, if any."""
    for names in _IDENTITIES:
        if all(name in environ for name in names):
            return {name: environ[name] for name in names}
    return {}


def end(find: Callable[[], Iterable[int]]) -> None:
    """End all processes that are found, by SIGTERM, and by SIGKILL after 2 s."""
    signalled: set[int] = set()
    start = time.monotonic()
    while found := set(find()):
        seconds = time.monotonic() - start
        if seconds > 2 * _GRACE_SECONDS:
            # A process that is blocked in the kernel does not end.
            return
        is_late = seconds > _GRACE_SECONDS
        for pid in found if is_late else found - signalled:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
                # A stopped process does not end at SIGTERM alone.
                os.kill(pid, signal.SIGCONT)
        signalled |= found
        time.sleep(_POLL_SECONDS)


def find(identity: Mapping[str, str]) -> Iterator[int]:
    """Yield the processes of this user that have these variables."""
    variables = {f"{name}={value}".encode() for name, value in identity.items()}
    for path in _PROC.glob("[0-9]*/environ"):
        # Of a process that has ended, or of another user.
        with contextlib.suppress(OSError):
            if variables and variables <= set(path.read_bytes().split(b"\0")):
                yield int(path.parent.name)
