"""The report of a failed collective that a user's script does not catch."""

import os
import signal
import socket
import sys
import time
import traceback
from types import TracebackType
from typing import NoReturn

import horovod
import keras
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

import hvdtrain
from hvdtrain.environment import STALL_SHUTDOWN
from hvdtrain.flight import member
from hvdtrain.job.ending import end_despite_threads
from hvdtrain.job.launchers import launch
from hvdtrain.job.world import PreemptedError

# The native library begins the reason with this text: kernel.cc.
NATIVE_FAILURE = "A collective has lost a rank"
# And the reason of a host that does not acknowledge contains this one: links.cc.
_NO_NETWORK = "the network to it is cut"


def is_collective_failure(error: BaseException) -> bool:
    """Return whether `error` is the failure of a collective whose job lost a rank.

    TensorFlow raises it as an error like any other. Horovod's operations are
    identified by their kernel ("Op:Horovod..."), by the file in which a node of a
    graph was defined, or by Horovod's text at shutdown; never by the node's name,
    which is the user's. Ranks that disagree, about a shape for instance, raise another
    error.
    """
    if isinstance(error, HorovodInternalError):
        return True
    signs = (
        "Op:Horovod",
        "horovod/tensorflow/mpi_ops",
        "Horovod has been shut",
        NATIVE_FAILURE,
    )
    return isinstance(error, (tf.errors.UnknownError, tf.errors.AbortedError)) and any(
        sign in str(error) for sign in signs
    )


def network_failure(error: BaseException) -> str:
    """Return the reason of a collective whose rank cannot reach another host, or ""."""
    reason = _reason(error) if is_collective_failure(error) else ""
    return reason if _NO_NETWORK in reason else ""


def _reason(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    signs = ("Horovod", NATIVE_FAILURE)
    signed = [line for line in lines if any(sign in line for sign in signs)]
    return (signed or lines[-1:])[0]


_NETWORK_CAUSE = """\
rank {rank} on {host}: a collective failed: another host cannot be reached.
"""
_CAUSE = """\
rank {rank} on {host}: a collective failed: another rank has ended or did not call it.
- If another rank printed an error, that error is the cause.
- Otherwise the ranks called different collectives. "Missing ranks" in the output of
  rank 0 names those that were waited for, and the operation. Usual reasons: ranks with
  different numbers of batches (pass steps_per_epoch to fit, or use
  hvd.callbacks.JoinCallback); a callback that stops the training on one rank (use
  hvd.callbacks.StopTogetherCallback); an evaluation, a broadcast or another collective
  that only rank 0 calls.
- HOROVOD_STALL_SHUTDOWN_TIME_SECONDS={limit} is how long a rank waits for the others.
"""
# The launcher ends the other ranks once the rank that failed has ended, which takes
# Python some seconds. Without such a launcher, each rank prints the report.
_PATIENCE_SECONDS = 5.0
_EXPLAINS = "explains_failed_collectives"
_PACKAGES = tuple(
    os.path.dirname(str(module.__file__)) + os.sep
    for module in (tf, keras, horovod, hvdtrain)
)


def explain_failed_collectives() -> None:
    """Make Python print the cause of an uncaught failure of a collective.

    The cause replaces the traceback, which repeats each frame in the text of
    TensorFlow's error. As in Keras, `keras.config.disable_traceback_filtering()` or
    `tf.debugging.disable_traceback_filtering()` brings back the complete traceback.
    A `PreemptedError` is one line, and the exit code of the script. A
    `KeyboardInterrupt` has the frames of the script alone. Other exceptions
    are printed as before. In a job of several ranks the process then
    ends, also if threads that are not daemons run.
    """
    previous = sys.excepthook
    if getattr(previous, _EXPLAINS, False):
        return

    def explain(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, PreemptedError):
            _end_preempted(error)
        is_interrupt = isinstance(error, KeyboardInterrupt)
        is_consequence = is_collective_failure(error)
        if is_consequence and launch().launcher:
            time.sleep(_PATIENCE_SECONDS)
        if is_consequence and _is_filtered():
            sys.stderr.write(_report(error, trace))
        elif is_interrupt and _is_filtered():
            sys.stderr.write("".join([*_own_frames(trace), "KeyboardInterrupt\n"]))
        else:
            previous(kind, error, trace)
        # The code with which Python ends after Ctrl-C. Horovod's shutdown at Python's
        # exit would wait for a lost rank.
        code = 128 + signal.SIGINT if is_interrupt else 1
        end_despite_threads(code, has_lost_rank=is_consequence)

    setattr(explain, _EXPLAINS, True)
    sys.excepthook = explain


def _end_preempted(error: PreemptedError) -> NoReturn:
    """End a script as `program.run` ends a program: rank 0 prints the reason."""
    if launch().rank == 0:
        sys.stderr.write(f"{error}\n")
    # Otherwise the guard reports an uncaught exception when Python exits.
    vars(sys).pop("last_value", None)
    end_despite_threads(error.exit_code)
    # Python exits with this code if its hook raises SystemExit.
    sys.exit(error.exit_code)


def _is_filtered() -> bool:
    return (
        keras.config.is_traceback_filtering_enabled()
        and tf.debugging.is_traceback_filtering_enabled()
    )


def _own_frames(trace: TracebackType | None) -> list[str]:
    """Return the lines of a traceback without those of the packages."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(("<frozen ", *_PACKAGES))
    ]
    return traceback.format_list(frames)


def _report(error: BaseException, trace: TracebackType | None) -> str:
    cause = (_NETWORK_CAUSE if network_failure(error) else _CAUSE).format(
        rank=launch().rank,
        host=socket.gethostname(),
        limit=os.environ[STALL_SHUTDOWN],
    )
    return "".join(
        [
            cause,
            *_own_frames(trace),
            f"{type(error).__name__}: {_reason(error)}\n",
            f"{conclusion}\n" if (conclusion := member.conclusion()) else "",
        ]
    )
