"""The program of a rank: calls the function that the caller has pickled.

Or it becomes the program that follows its own arguments.
"""

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import sys
from typing import Any, NoReturn

import cloudpickle

from hvdtrain import output
from hvdtrain.flight import member
from hvdtrain.job.ending import stop
from hvdtrain.runner.channel import Outcome

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 5.0


def main() -> None:
    """Call the function, and write the `Outcome` to a file."""
    agent, payload, outcome, reason = map(int, sys.argv[1:5])
    _end_with(agent)
    _restore_search_path(sys.argv[5])
    if command := sys.argv[6:]:
        for file in (payload, outcome, reason):
            os.close(file)
        _become(command)
    member.pass_reason(reason)
    sys.argv[1:] = []
    try:
        function, args, kwargs = cloudpickle.loads(_read(payload))
        returned = _call(function, args, kwargs)
        _write(outcome, Outcome(value=_pickle_result(returned)))
    except BaseException as error:
        _write(outcome, _failure(error))
        _end_with_error(error)


def _become(command: list[str]) -> NoReturn:
    """Replace this process by a program; the kernel still kills it with the agent."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"Cannot start {command[0]}: {error.strerror}.\n")
        os._exit(127)


def _end_with(agent: int) -> None:
    """Let the kernel kill this process when the agent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        # It has ended before.
        os.kill(os.getpid(), signal.SIGKILL)


def _restore_search_path(given: str) -> None:
    """Restore the PYTHONPATH of the agent, for programs that the function starts.

    In this process it was the agent's whole `sys.path`.
    """
    if given:
        os.environ["PYTHONPATH"] = given
    else:
        del os.environ["PYTHONPATH"]


def _call(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except SystemExit as error:
        # As a script that ends with exit code 0.
        if error.code:
            raise
        return None


def _end_with_error(error: BaseException) -> NoReturn:
    """Print the error as Python does, and end without waiting for threads."""
    member.leave(1)
    # A hook may exit, as after a preemption, and would wait for threads.
    with contextlib.suppress(SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    # Ends the collectives that the other ranks are blocked in.
    stop(timeout_seconds=_STOP_SECONDS)
    os._exit(1)


def _read(file: int) -> bytes:
    with open(file, "rb") as opened:
        return opened.read()


def _write(file: int, outcome: Outcome) -> None:
    with open(file, "wb", closefd=False) as opened:
        opened.write(pickle.dumps(outcome))


def _pickle_result(result: Any) -> bytes:
    try:
        return cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"Received a result of {type(result).__name__} that cannot be pickled "
            f"({error}); expected one that can be sent to the caller, such as numbers "
            "and NumPy arrays."
        ) from error


def _failure(error: BaseException) -> Outcome:
    summary, text = output.describe(error)
    try:
        value = cloudpickle.dumps(error)
        cloudpickle.loads(value)
    except Exception:
        value = b""
    if not _is_consequence(error):
        return Outcome(value, summary, text)
    # Without the error: an import of its module takes seconds in the caller.
    return Outcome(
        summary=summary,
        traceback=text,
        is_consequence=True,
        conclusion=member.conclusion(),
        late_ranks=member.late_ranks(),
    )


def _is_consequence(error: BaseException | None) -> bool:
    """Return whether a collective has failed, also if the function wraps the error."""
    if "horovod.tensorflow" not in sys.modules:
        return False
    # Not at the top: a function need not load TensorFlow.
    failures = importlib.import_module("hvdtrain.job.failures")
    while error is not None:
        if failures.is_collective_failure(error):
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    main()
