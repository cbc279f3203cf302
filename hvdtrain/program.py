"""What all programs share: flags, one line for a mistake, exit codes.

The only module that ends processes.
"""

import contextlib
import errno
import os
import signal
import socket
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from absl import flags

from hvdtrain import interruption, output
from hvdtrain.flight import member
from hvdtrain.job import JobError, signals
from hvdtrain.job.ending import stop
from hvdtrain.job.launchers import launch
from hvdtrain.job.world import PreemptedError, SharedJobError

# By exit code, for users: the site has them as a table.
EXIT_CODES = {
    "0": "The job has finished.",
    "1": "A failure. The line of rank 0, or one with 'rank R on HOST:', has the cause.",
    "2": "A flag is wrong by itself. It is 1 if it does not fit the data or the ranks.",
    "75": "The job stopped after a checkpoint. The same command continues it.",
    "128 + n": "The signal n ended the job at once: 130 for Ctrl-C.",
}

# Rank 0 prints its error at once, and the other ranks after this time. When rank 0 has
# the same error, the launcher ends them before: one message, not one per rank.
_PATIENCE_SECONDS = 3.0
# Limits of a write to a full pipe without a reader.
_WRITE_SECONDS = 10.0
_SIGNAL_WRITE_SECONDS = 1.0
# When a rank has failed, the launcher signals the other ranks. Their collectives fail
# at the same time, because the connections are broken.
_SIGNAL_OF_LAUNCHER_SECONDS = 5.0
# The launcher signals one rank after the other. Rank 0 prints the reason unless one of
# its collectives has failed before, because another rank has ended.
_SIGNAL_TO_RANK_0_SECONDS = 0.3

_INDENT = " " * 6
# The first is the exit code of this process, once it has a reason to end. A later
# signal of the launcher, because another rank has ended first, does not change it.
_exit_codes: list[int] = []

_HELP = flags.DEFINE_bool("help", False, "Print this page and exit.", short_name="h")


def run(
    main: Callable[..., object],
    *,
    page: str | None,
    operands: str | None = None,
    remedies: Mapping[str, str] | None = None,
) -> None:
    """Parse the flags, call `main`, and exit.

    Args:
        main: the program; it raises `JobError` for what a user can correct. Any other
            exception is a bug, and its traceback is shown.
        page: text of --help, above the list of the flags.
        operands: name of the arguments that are not flags, for a program that takes
            one or more of them. `main` then receives them as a list.
        remedies: by the flags of similar programs, what to do in place of them.
    """
    _open_closed_streams()
    warnings.formatwarning = _warning_line
    output.write_whole_lines()
    interruption.restore_handlers()
    signals.subscribe(interruption.SIGNALS, _report_signal)
    try:
        arguments = flags.FLAGS(sys.argv)[1:]
        if arguments and not operands:
            raise flags.Error(f"Unexpected argument: {arguments[0]}")
        if operands and not arguments and not _HELP.value:
            raise flags.Error(f"Received no {operands}; expected one or more")
    except flags.Error as error:
        remedy = (remedies or {}).get(getattr(error, "flagname", ""), "see --help")
        _leave(f"{' '.join(str(error).split())} ({remedy})", code=2)
    try:
        if not _HELP.value:
            main(*([arguments] if operands else []))
        elif launch().rank == 0:
            print(_help(page or ""))
        sys.stdout.flush()
    except JobError as error:
        is_shared = isinstance(error, SharedJobError)
        _leave(str(error), code=error.exit_code, is_shared=is_shared)
    except Exception as error:
        _leave_after_bug(error)


def _warning_line(message: Warning | str, *_: object, **__: object) -> str:
    # Replaces `warnings.formatwarning`, which adds the file and the line of code.
    return f"WARNING: {message}\n"


def _open_closed_streams() -> None:
    # A print would raise an error where the parent process has closed the stream.
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _help(page: str) -> str:
    lines = [page.strip(), "", "Flags, with their defaults:"]
    for defined in flags.FLAGS.flags_by_module_dict().values():
        for flag in defined:
            default = "" if flag.default is None else f"={flag.default}"
            lines.append(f"  --{flag.name}{default}")
            lines += textwrap.wrap(
                flag.help, 72, initial_indent=_INDENT, subsequent_indent=_INDENT
            )
    return "\n".join(lines)


def _leave_after_bug(error: Exception) -> NoReturn:
    if _is_collective_failure(error):
        # The rank that failed prints the reason, and the launcher ends the others by a
        # signal, which a training may have handled as a request to stop. This rank
        # prints a reason only if the launcher sends none.
        _exit_codes.append(1)
        if signals.seconds_since_last() < _SIGNAL_OF_LAUNCHER_SECONDS:
            _end(_exit_codes[0])
        time.sleep(_PATIENCE_SECONDS)
        reason = sys.modules["hvdtrain.job.failures"].network_failure(error) or (
            "Another rank has left the job, or has not called a collective within "
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS."
        )
        _leave(f"{reason}\n{member.conclusion()}".rstrip(), code=1)
    if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC):
        _leave(f"Cannot write the output: {error.strerror}.", code=1)
    _leave(output.describe(error)[1], code=1)


def _is_collective_failure(error: BaseException | None) -> bool:
    # An import would load TensorFlow. A program that has not loaded this module has
    # started no collective.
    failures = sys.modules.get("hvdtrain.job.failures")
    return failures is not None and failures.is_collective_failure(error)


def _leave(text: str, *, code: int, is_shared: bool = False) -> NoReturn:
    """Print the reason, once for the job, and end this process.

    `os._exit` ends it, because the normal exit of Python joins threads: one may be
    blocked in a collective with ranks that this rank blocks.

    Args:
        is_shared: every rank has the same reason, and rank 0 prints it.
    """
    signals.wait_for_callbacks()
    _exit_codes.append(code)
    is_chief = launch().rank == 0
    if not is_chief:
        # The launcher ends all ranks when the first exits, perhaps before rank 0 has
        # printed.
        time.sleep(_PATIENCE_SECONDS)
    if is_chief or not is_shared:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        _write_reason(text, timeout_seconds=_WRITE_SECONDS)
    stop(timeout_seconds=_PATIENCE_SECONDS)
    _end(code)


def _end(code: int) -> NoReturn:
    # The guard reports a process that ends without this, or by a failure.
    member.leave(0 if code == PreemptedError.exit_code else code)
    os._exit(code)


def _write_reason(text: str, *, timeout_seconds: float) -> None:
    rank = launch().rank
    prefix = f"rank {rank} on {socket.gethostname()}: " if rank else ""
    output.write_error(f"{prefix}{text}\n", timeout_seconds=timeout_seconds)


def _report_signal(number: int) -> NoReturn:
    # Without a flush of stdout: the main thread may be blocked in a write to a full
    # pipe, and holds the lock of the stream.
    if _exit_codes:
        _end(_exit_codes[0])
    # On Ctrl-C launchers send SIGTERM or SIGUSR1 to all ranks: one prints a line.
    # horovodrun and hvdtrain.launch print it themselves.
    is_launched = interruption.SIGNAL_FILE in os.environ
    prints = not is_launched and (launch().rank == 0 or number == signal.SIGINT)
    if prints and not _is_collective_failure(_handled_exception()):
        reason = f"Stopped by {signal.Signals(number).name}."
        _write_reason(reason, timeout_seconds=_SIGNAL_WRITE_SECONDS)
    elif not prints:
        # Also where a collective fails meanwhile, because rank 0 has ended.
        _exit_codes.append(128 + number)
        time.sleep(_SIGNAL_TO_RANK_0_SECONDS)
    _end(128 + number)


def _handled_exception() -> BaseException | None:
    # The main thread may be in the `finally` blocks that a failed collective runs.
    exceptions = sys._current_exceptions()
    exception: Any = exceptions.get(threading.main_thread().ident or 0)
    # Python 3.11 returns a tuple: type, exception, traceback.
    return exception[1] if isinstance(exception, tuple) else exception
