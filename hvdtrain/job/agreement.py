"""Python values and failures of all ranks. Importing this module loads TensorFlow."""

import concurrent.futures
import contextlib
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from hvdtrain.collectives.objects import allgather_object, group_by_value, name_values
from hvdtrain.job.world import JobError, SharedJobError, World

_POLL_SECONDS = 5.0
_WARN_SECONDS = 60.0


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


def wait_together(
    world: World,
    is_done: Callable[[float], bool],
    *,
    on_wait: Callable[[list[int]], None] = lambda ranks: None,
) -> None:
    """Wait on all ranks until `is_done(timeout_seconds)` is true on each. A collective.

    Short waits: a long one would be taken for a rank that hangs.

    Args:
        world: the `World`.
        is_done: waits for so many seconds.
        on_wait: called after each wait with the ranks that are not done.
    """
    while not all(done := gather(world, is_done(_POLL_SECONDS))):
        on_wait([rank for rank, is_done_there in enumerate(done) if not is_done_there])


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


def on_all(
    world: World,
    work: Callable[[], Any],
    *,
    name: str,
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    """Return this rank's `work()`, when all ranks have done theirs. A collective.

    The work may take longer on one rank than the limit for a rank that hangs. The
    chief then warns once, since a rank that hangs in it blocks the job.

    Args:
        world: the `World`.
        work: a function without collectives.
        name: what the work returns, for the warning.
        clock: returns seconds.

    Raises:
        SharedJobError: on every rank, if it raises a `JobError` on one. Another
            exception is raised on its rank.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        working = thread.submit(work)
        wait_together(
            world,
            lambda seconds: _are_done([working], seconds),
            on_wait=_warning_once(world, name, clock),
        )
    error = working.exception()
    if error and not isinstance(error, JobError):
        raise error
    with fail_together(world):
        return working.result()


def _warning_once(
    world: World, name: str, clock: Callable[[], float]
) -> Callable[[list[int]], None]:
    due = [clock() + _WARN_SECONDS] if world.is_chief else []

    def on_wait(ranks):
        if due and clock() >= due[0]:
            due.clear()
            warnings.warn(
                f"After {_WARN_SECONDS:g} s the job still waits for {name} on rank "
                f"{', '.join(map(str, ranks))}. It waits without a limit.",
                stacklevel=4,
            )

    return on_wait


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
    values_by_rank = gather(world, values)
    for name in values:
        groups = group_by_value([values[name] for values in values_by_rank])
        if name not in but and len(groups) > 1:
            received = name_values(groups, f"{prefix}{name}={{}}".format)
            raise SharedJobError(
                f"Received {received}; expected the same on all ranks."
            )
