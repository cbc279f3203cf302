"""`hvdtrain.run`: calls a function on every rank of a new job."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from hvdtrain.runner.caller import run_once
from hvdtrain.runner.engine import Engine, Local, RunError
from hvdtrain.runner.results import LostRankError, Work


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int,
    on: Engine | None = None,
    max_restarts: int = 0,
    start_timeout_seconds: float = 600.0,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on `np` ranks and return the results by rank.

    The function starts Horovod itself, by `hvd.init()` or `job.start()`, as a script
    under `horovodrun --gloo` does, and imports TensorFlow inside. What the ranks print
    is printed here, with the rank in front. When a rank fails, or the caller ends, the
    others are ended by SIGTERM, and by SIGKILL after 5 s.

    Args:
        function: cloudpickle pickles it, and what it refers to in a notebook or script.
            Modules that it imports must be importable by the ranks.
        np: number of ranks.
        on: engine that places the ranks; by default processes on this machine.
        max_restarts: how often the job is started again after a rank was lost. A
            function that trains with a `model_dir` continues from the last checkpoint.
        start_timeout_seconds: how long to wait until the engine has placed all ranks; a
            longer wait raises `RunError`.

    Raises:
        RankError: the function has raised an exception on a rank.
        LostRankError: the process of a rank has ended without a result.
        RunError: the ranks were not placed in time.
    """
    _check(function, args, kwargs, np, on, max_restarts)
    call = (function, tuple(args), dict(kwargs or {}))
    work = Work(payload=cloudpickle.dumps(call))
    engine = on or Local()
    restarts = 0
    while True:
        try:
            return run_once(
                engine, work, np, start_timeout_seconds=start_timeout_seconds
            )
        except (RunError, KeyboardInterrupt) as error:
            if not isinstance(error, LostRankError) or restarts == max_restarts:
                # Without the frames below: none of them is the cause.
                raise error.with_traceback(None) from error.__cause__
            restarts += 1
            print(
                f"hvdtrain.run: {error}. Starting restart {restarts} of "
                f"{max_restarts}.",
                file=sys.stderr,
                flush=True,
            )


def _check(
    function: Any, args: Any, kwargs: Any, np: Any, on: Any, max_restarts: Any
) -> None:
    """Raise an error here, and not on the ranks, for arguments of a wrong type."""
    is_list = isinstance(args, Iterable) and not isinstance(args, str | bytes)
    # A class has the method, too: the call of it was forgotten.
    is_engine = on is None or (hasattr(on, "place") and not isinstance(on, type))
    for name, value, is_right, expected in (
        ("function", function, callable(function), "a function"),
        ("args", args, is_list, "a list of arguments"),
        ("kwargs", kwargs, isinstance(kwargs or {}, Mapping), "a dictionary"),
        ("np", np, isinstance(np, int), "a number of ranks"),
        ("on", on, is_engine, "an engine, such as hvdtrain.Ray()"),
        ("max_restarts", max_restarts, isinstance(max_restarts, int), "a number"),
    ):
        if not is_right:
            raise TypeError(f"Received {name}={value!r:.80}; expected {expected}.")
    if np < 1 or max_restarts < 0:
        raise ValueError(
            f"Received np={np} and max_restarts={max_restarts}; expected 1 rank or "
            "more, and 0 restarts or more."
        )
