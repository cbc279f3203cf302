"""Python values and failures of all ranks. Importing this module loads TensorFlow."""

import concurrent.futures
import contextlib
import socket
import traceback
from collections.abc import Callable
from typing import Any

from hvdtrain.collectives.objects import allgather_object
from hvdtrain.job.world import JobError, SharedJobError, World

_POLL_SECONDS = 5.0


def gather(world, value):
    """Return the list of every rank's `value`, by rank, on every rank."""
    if world.size == 1:
        return [value]
    # Horovod's default name is the type of the value: ranks with values of different
    # types would wait for each other until the stall limit.
    return allgather_object(value, name="gather")


@contextlib.contextmanager
def fail_together(world, *, expected=(JobError,)):
    """Make a failure of the enclosed phase on one rank a failure of all ranks.

    A collective, also where nothing fails: every rank enters and leaves it.

    Args:
        world: the `World`.
        expected: exceptions whose message is for users. Of others the whole traceback
            is shown.

    Raises:
        SharedJobError: on every rank, with the first failing rank's message.
    """
    text = ""
    try:
        yield
    except expected as error:
        text = str(error)
    except Exception:
        text = traceback.format_exc()
    failures = gather(world, (text, socket.gethostname()))
    texts = [text for text, _ in failures]
    if texts[0] and len(set(texts)) == 1:
        raise SharedJobError(texts[0])
    for rank, (text, host) in enumerate(failures):
        if text:
            raise SharedJobError(f"rank {rank} on {host}: {text}")


def wait_together(world, is_done):
    """Wait on all ranks until `is_done(timeout_seconds)` is true on each. A collective.

    Short waits: a long one would be taken for a rank that hangs.
    """
    while not all(gather(world, is_done(_POLL_SECONDS))):
        pass


def on_chief(world, work):
    """Return `work()` on the chief, and None on the others. A collective.

    The work may take longer than the limit for a rank that hangs.

    Raises:
        SharedJobError: on every rank, if it raises an exception; see `fail_together`.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        working = [thread.submit(work)] if world.is_chief else []
        wait_together(world, lambda seconds: _are_done(working, seconds))
    with fail_together(world):
        for each in working:
            return each.result()


def on_all(world: World, work: Callable[[], Any]) -> Any:
    """Return this rank's `work()`, when all ranks have done theirs. A collective.

    The work may take longer on one rank than the limit for a rank that hangs.

    Raises:
        SharedJobError: on every rank, if it raises a `JobError` on one. Another
            exception is raised on its rank.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        working = thread.submit(work)
        wait_together(world, lambda seconds: _are_done([working], seconds))
    error = working.exception()
    if error and not isinstance(error, JobError):
        raise error
    with fail_together(world):
        return working.result()


def _are_done(working, timeout_seconds):
    return not concurrent.futures.wait(working, timeout=timeout_seconds).not_done


def check_same(world, values, *, but=(), prefix=""):
    """Raise `SharedJobError` if an option differs between the ranks. A collective.

    Args:
        world: the `World`.
        values: this rank's options, a dict by name.
        but: names of options that may differ.
        prefix: of the names in the message, "--" for flags.
    """
    everyone = gather(world, values)
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            before = everyone[0][name]
            if name not in but and value != before:
                raise SharedJobError(
                    f"Received {prefix}{name}={before} on rank 0 and {prefix}{name}="
                    f"{value} on rank {rank}; expected the same on all ranks."
                )
