"""What all programs share: flags, one line for a mistake, exit codes.

The only module that ends processes. Exit codes: 0, 1 for a failure, 2 for wrong
flags, 75 for a job that was stopped and can be continued, and 128 + its number for a
signal: 130 for Ctrl-C.
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

from absl import flags

from hvdtrain.job import JobError, output, signals
from hvdtrain.job.launchers import launch
from hvdtrain.job.start import stop
from hvdtrain.job.world import SharedJobError

# Rank 0 prints its error at once; the others wait this long first. When rank 0 has
# failed alike, the launcher ends them in this time: one message, not one per rank.
_PATIENCE_SECONDS = 3.0
# For a pipe without a reader.
_WRITE_SECONDS = 10.0
_SIGNAL_WRITE_SECONDS = 1.0

# A launcher sends it to the others when a rank has failed, whose broken connections
# end their collectives at the same time.
_SIGNAL_OF_LAUNCHER_SECONDS = 5.0

_INDENT = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}
# The exit code of this process, once it has a reason to end. The launcher's signal,
# which follows when another rank has ended first, then ends it with that code.
_exit_codes = []

_HELP = flags.DEFINE_bool("help", False, "Print this page and exit.", short_name="h")


def run(main, *, page, operands=None):
    """Parse the flags, call `main`, and exit.

    Args:
        main: the program; it raises `JobError` for what a user can correct. Any other
            exception is a bug, and its traceback is shown.
        page: text of --help, above the list of the flags.
        operands: the name of the arguments that are no flags, if the program takes
            them: one or more, which `main` receives as a list.
    """
    _open_closed_streams()
    warnings.formatwarning = _warning_line
    output.write_whole_lines()
    _leave_on_signal()
    try:
        arguments = flags.FLAGS(sys.argv)[1:]
        if arguments and not operands:
            raise flags.Error(f"Unexpected argument: {arguments[0]}")
        if operands and not arguments and not _HELP.value:
            raise flags.Error(f"Received no {operands}; expected one or more")
    except flags.Error as error:
        _leave(f"{' '.join(str(error).split())} (see --help)", code=2)
    try:
        if not _HELP.value:
            main(*([arguments] if operands else []))
        elif launch().rank == 0:
            print(_help(page))
        sys.stdout.flush()
    except JobError as error:
        is_shared = isinstance(error, SharedJobError)
        _leave(str(error), code=error.exit_code, is_shared=is_shared)
    except Exception as error:
        _leave_after_bug(error)


def _warning_line(message, *_, **__):
    """As `warnings.formatwarning`, without the place in the source."""
    return f"WARNING: {message}\n"


def _open_closed_streams():
    # The parent process may have closed them; a print would raise an error.
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _help(page):
    lines = [page.strip(), "", "Flags, with their defaults:"]
    for defined in flags.FLAGS.flags_by_module_dict().values():
        for flag in defined:
            default = "" if flag.default is None else f"={flag.default}"
            lines.append(f"  --{flag.name}{default}")
            lines += textwrap.wrap(flag.help, 72, **_INDENT)
    return "\n".join(lines)


def _leave_after_bug(error):
    if _is_collective_failure(error):
        # The rank that failed prints the reason, and the launcher ends the others, by a
        # signal that may have been taken as a request to stop. A launcher that does not
        # leaves it to this rank.
        _exit_codes.append(1)
        if signals.seconds_since_last() < _SIGNAL_OF_LAUNCHER_SECONDS:
            os._exit(1)
        time.sleep(_PATIENCE_SECONDS)
        _leave(
            "Another rank has left the job, or has not called a collective within "
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.",
            code=1,
        )
    if getattr(error, "errno", None) in (errno.EPIPE, errno.ENOSPC):
        _leave(f"Cannot write the output: {error.strerror}.", code=1)
    _leave(output.describe(error)[1], code=1)


def _is_collective_failure(error):
    # Not imported here, as it loads TensorFlow. A program that has not loaded it has
    # started no collective.
    failures = sys.modules.get("hvdtrain.job.failures")
    return failures is not None and failures.is_collective_failure(error)


def _leave(text, *, code, is_shared=False):
    """Print the reason, once for the job, and end this process.

    By `os._exit`: the usual exit of Python joins threads, which may be blocked in a
    collective of ranks that are blocked by this one.

    Args:
        text: the reason.
        code: exit code.
        is_shared: every rank has the same reason, and rank 0 prints it.
    """
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
    os._exit(code)


def _write_reason(text, *, timeout_seconds):
    rank = launch().rank
    prefix = f"rank {rank} on {socket.gethostname()}: " if rank else ""
    output.write_error(f"{prefix}{text}\n", timeout_seconds=timeout_seconds)


def _leave_on_signal():
    """Make these signals end the process at once, with a line.

    Launchers turn Ctrl-C into SIGTERM or SIGUSR1 for all of their ranks: rank 0 alone
    prints the line.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    signals.subscribe(numbers, _report_signal)


def _report_signal(number):
    # Without a flush of stdout: the main thread may be blocked in a write to a full
    # pipe, and holds the lock of the stream.
    if _exit_codes:
        os._exit(_exit_codes[0])
    prints = launch().rank == 0 or number == signal.SIGINT
    if prints and not _is_collective_failure(_handled_exception()):
        reason = f"Stopped by {signal.Signals(number).name}."
        _write_reason(reason, timeout_seconds=_SIGNAL_WRITE_SECONDS)
    os._exit(128 + number)


def _handled_exception():
    # A failed collective, before the main thread has left the blocks that it ends.
    found = sys._current_exceptions().get(threading.main_thread().ident)
    # Until Python 3.11 a tuple.
    return found[1] if isinstance(found, tuple) else found
