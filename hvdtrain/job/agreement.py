"""Python values and failures of all ranks. Importing this module loads TensorFlow."""

import concurrent.futures
import contextlib
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

from hvdtrain.collectives.objects import allgather_object, group_by_value, name_values
from hvdtrain.job.world import JobError, SharedJobError, World

T = TypeVar("T")
# Shorter than the limit for a rank that hangs: each wait is followed by a collective.
_POLL_SECONDS = 5.0
_WARN_SECONDS = 60.0


def gather(world: World, value: T) -> list[T]:
    """Return every rank's `value`, by rank, on every rank. A collective."""
    if world.size == 1:
        return [value]
    return allgather_object(value, name="gather")


@contextlib.contextmanager
def fail_together(
    world: World, *, expected: tuple[type[Exception], ...] = (JobError,)
) -> Iterator[None]:
    """Make a failure of the enclosed block on one rank a failure of all ranks.

    A collective, also where nothing fails: every rank enters and leaves the block.

    The message of the `expected` exceptions is for users. For other exceptions the
    message is the full traceback.

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

    After each wait, call `on_wait` with the ranks that are not done.
    """
    while not all(done_by_rank := gather(world, is_done(_POLL_SECONDS))):
        on_wait([rank for rank, done in enumerate(done_by_rank) if not done])


def on_chief(world: World, work: Callable[[], T]) -> T | None:
    """Return `work()` on the chief, and None on the others. A collective.

    The work may take longer than the limit for a rank that hangs.

    Raises:
        SharedJobError: on every rank, if it raises an exception; see `fail_together`.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        future = thread.submit(work) if world.is_chief else None
        wait_together(world, lambda seconds: _is_done(future, seconds))
    with fail_together(world):
        return future.result() if future else None


def on_all(
    world: World,
    work: Callable[[], T],
    *,
    name: str,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Return this rank's `work()`, when all ranks have done theirs. A collective.

    The work, which has no collectives, may take longer on one rank than the limit for a
    rank that hangs. The chief then warns once that the job waits for `name`, since a
    rank that hangs in the work blocks the job.

    Raises:
        SharedJobError: on every rank, if it raises a `JobError` on one. Another
            exception is raised on its rank.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        future = thread.submit(work)
        wait_together(
            world,
            lambda seconds: _is_done(future, seconds),
            on_wait=_warning_once(world, name, clock),
        )
    error = future.exception()
    if error and not isinstance(error, JobError):
        raise error
    with fail_together(world):
        return future.result()


def _warning_once(
    world: World, name: str, clock: Callable[[], float]
) -> Callable[[list[int]], None]:
    due = [clock() + _WARN_SECONDS] if world.is_chief else []

    def on_wait(ranks: list[int]) -> None:
        if due and clock() >= due[0]:
            due.clear()
            warnings.warn(
                f"After {_WARN_SECONDS:g} s the job still waits for {name} on rank "
                f"{', '.join(map(str, ranks))}. It waits without a limit.",
                stacklevel=4,
            )

    return on_wait


def _is_done(future: concurrent.futures.Future | None, timeout_seconds: float) -> bool:
    futures = [future] if future else []
    return not concurrent.futures.wait(futures, timeout=timeout_seconds).not_done


def check_same(
    world: World,
    values: Mapping[str, object],
    *,
    but: Collection[str] = (),
    prefix: str = "",
) -> None:
    """Raise `SharedJobError` if an option differs between the ranks. A collective.

    Options named in `but` may differ. The message has `prefix` before the name of an
    option: "--" for flags.
    """
    values_by_rank = gather(world, values)
    for name in values:
        groups = group_by_value([values[name] for values in values_by_rank])
        if name not in but and len(groups) > 1:
            received = name_values(groups, f"{prefix}{name}={{}}".format)
            raise SharedJobError(
                f"Received {received}; expected the same on all ranks."
            )
