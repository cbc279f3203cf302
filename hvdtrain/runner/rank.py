"""The program of a rank: calls the function that the caller has pickled."""

import ctypes
import dataclasses
import os
import signal
import sys
from typing import Any

import cloudpickle

from hvdtrain.job import output

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the function has returned or raised.

    Attributes:
        value: pickled result, or pickled exception; empty if it cannot be pickled.
        summary: last line of the traceback; empty if the function has returned.
        traceback: of the exception, as Python prints it.
        is_consequence: whether a collective has failed because of another rank.
    """

    value: bytes = b""
    summary: str = ""
    traceback: str = ""
    is_consequence: bool = False


def main() -> None:
    """Call the function, and write the `Outcome` to a file."""
    agent, payload, outcome = map(int, sys.argv[1:4])
    _end_with(agent)
    sys.argv[1:] = []
    try:
        function, args, kwargs = cloudpickle.loads(_read(payload))
        returned = function(*args, **kwargs)
        _write(outcome, Outcome(value=_pickle_result(returned)))
    except BaseException as error:
        _write(outcome, _failure(error))
        # Python prints it, with the cause of a collective that has failed.
        raise


def _end_with(agent: int) -> None:
    """Let the kernel kill this process when the agent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        # It has ended before.
        os.kill(os.getpid(), signal.SIGKILL)


def _read(file: int) -> bytes:
    with open(file, "rb") as opened:
        return opened.read()


def _write(file: int, outcome: Outcome) -> None:
    with open(file, "wb", closefd=False) as opened:
        opened.write(cloudpickle.dumps(outcome))


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
    return Outcome(value, summary, text, _is_consequence(error))


def _is_consequence(error: BaseException) -> bool:
    # A function that has called no collective need not have loaded TensorFlow.
    failures = sys.modules.get("hvdtrain.job.failures")
    return failures is not None and failures.is_collective_failure(error)


if __name__ == "__main__":
    main()
