"""The end of a rank that has failed: it leaves the job, whatever its threads do."""

import contextlib
import os
import socket
import sys
import threading
import time

from hvdtrain import output
from hvdtrain.flight import member
from hvdtrain.job.launchers import launch

# Less than the others wait before they print that their collectives have failed: the
# launcher ends them before.
THREAD_SECONDS = 3.0


def stop(*, timeout_seconds: float) -> bool:
    """Leave the job, which ends the collectives that other ranks are blocked in.

    The shutdown is negotiated between all ranks. Returns after `timeout_seconds` also
    if one of them is blocked or lost, and whether this process has left.
    """
    backend = sys.modules.get("hvdtrain.job.backend")
    if backend and backend.hvd.is_initialized():
        stopper = threading.Thread(target=backend.shutdown, daemon=True)
        stopper.start()
        stopper.join(timeout_seconds)
        return not stopper.is_alive()
    return True


def end_despite_threads(exit_code: int = 1, *, has_lost_rank: bool = False) -> None:
    """End this process, also if threads that are not daemons run.

    To be called after an uncaught exception. Python joins these threads without a limit
    before it exits, while the other ranks wait for this one in a collective. Does
    nothing where there are no other ranks.

    Args:
        has_lost_rank: whether the exception is of a collective: a rank that cannot be
            reached takes no part in the shutdown, which Python's exit waits for.
    """
    main = threading.main_thread()
    threads = [t for t in threading.enumerate() if not t.daemon and t is not main]
    is_main = threading.current_thread() is main
    if is_main and (threads or has_lost_rank) and launch().size > 1:
        # An exit by `os._exit` does not flush.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        threading.Thread(target=_end, args=(threads, exit_code), daemon=True).start()


def _end(threads: list[threading.Thread], exit_code: int) -> None:
    deadline = time.monotonic() + THREAD_SECONDS
    has_left = stop(timeout_seconds=THREAD_SECONDS)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = [thread.name for thread in threads if thread.is_alive()]
    if alive:
        rank = f"rank {launch().rank} on {socket.gethostname()}"
        output.write_error(
            f"{rank}: ends {THREAD_SECONDS:g} s after its exception, although threads "
            f"that are not daemons run: {', '.join(alive)}.\n",
            timeout_seconds=1,
        )
    # The exit of Python would wait for the shutdown as well.
    if alive or not has_left:
        member.leave(exit_code)
        os._exit(exit_code)
