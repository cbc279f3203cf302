"""What every program shares: flags in, one line for a mistake, an exit code.

The only place that ends processes. Exit codes: 0, 1 for a failure, 2 for wrong
flags, 128 + its number for a signal: 130 for Ctrl-C.
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
import traceback

from absl import flags

from hvdtrain.job import JobError
from hvdtrain.job.launchers import launch
from hvdtrain.job.output import standard_error
from hvdtrain.job.start import stop

# Rank 0 speaks at once; the others wait so long first. By then the launcher, which ends
# all ranks when one has failed, will have ended them: one message, not one per rank.
_PATIENCE_SECONDS = 3.0

_INDENT = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}
# Whether this process knows already why it ends; a launcher's signal is no news then.
_is_leaving = threading.Event()

_HELP = flags.DEFINE_bool("help", False, "Print this page and exit.", short_name="h")


def run(main, *, page):
    """Parse the flags, call `main()`, and exit.

    Args:
        main: the program; it raises `JobError` for what a user can mend. Of another
            exception, a bug, the trace is shown.
        page: text of --help, above the list of the flags.
    """
    _open_closed_streams()
    _leave_on_signal()
    try:
        arguments = flags.FLAGS(sys.argv)
        if arguments[1:]:
            raise flags.Error(f"Unexpected argument: {arguments[1]}")
    except flags.Error as error:
        _leave(
            f"{' '.join(str(error).split())} (see --help)", code=2, is_everywhere=True
        )
    if _HELP.value:
        if launch().rank == 0:
            print(_help(page))
        return
    try:
        main()
        sys.stdout.flush()
    except JobError as error:
        _leave(str(error), code=1, is_everywhere=True)
    except Exception as error:
        _leave_after_bug(error)


class Path(flags.ArgumentParser):
    """Parser of flags that hold a path.

    Takes ~ for the home directory, as shells do, though not after a "=".
    """

    syntactic_help = "a path"

    def parse(self, argument):
        """Return the path with ~ expanded."""
        if not argument:
            raise ValueError("expected a path; a variable may be unset")
        return os.path.expanduser(argument)


def flag_values():
    """Return the program's own flags and their values, as a dict."""
    defined = flags.FLAGS.flags_by_module_dict()[sys.argv[0]]
    return {flag.name: flag.value for flag in defined}


def _open_closed_streams():
    # Closed by whoever started this, who does not care for them.
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
    if _is_loss_of_a_rank(error):
        # The rank that failed says why, and the launcher ends the others. Unless there
        # is no launcher that does: then somebody has to speak.
        _is_leaving.set()
        time.sleep(_PATIENCE_SECONDS)
        _leave("Another rank has left the job, or does not answer.", code=1)
    if getattr(error, "errno", None) in (errno.EPIPE, errno.ENOSPC):
        _leave(f"Cannot write the output: {error.strerror}.", code=1)
    _leave(traceback.format_exc().rstrip(), code=1)


def _is_loss_of_a_rank(error):
    if not type(error).__module__.startswith(("tensorflow", "horovod")):
        return False
    from hvdtrain.keras.elastic import running

    return running.is_collective_failure(error)


def _leave(text, *, code, is_everywhere=False):
    """Say why, once for the job, and end this process.

    Without Python's usual end, which waits for other threads: they may be waiting for
    ranks that wait for this one.

    Args:
        text: what to say.
        code: exit code.
        is_everywhere: all ranks are about to say the same, so that rank 0 is enough.
    """
    _is_leaving.set()
    rank = launch().rank
    if rank:
        # Not to exit before rank 0 has spoken: the launcher would end it.
        time.sleep(_PATIENCE_SECONDS)
    if not (rank and is_everywhere):
        _say(text)
    stop(timeout_seconds=_PATIENCE_SECONDS)
    os._exit(code)


def _say(text):
    rank = launch().rank
    prefix = f"rank {rank} on {socket.gethostname()}: " if rank else ""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    os.write(standard_error(), f"{prefix}{text}\n".encode())


def _leave_on_signal():
    """Make Ctrl-C, and on rank 0 SIGTERM, end the process at once with a line.

    Launchers turn Ctrl-C into SIGTERM for their ranks.
    """
    # A Python handler would wait until the main thread is back from TensorFlow, which
    # may be never. The C handler's byte reaches the thread at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watched = [signal.SIGINT]
    if launch().rank == 0:
        watched.append(signal.SIGTERM)
    for number in watched:
        signal.signal(number, lambda *_: None)

    def watch():
        while (number := os.read(reader, 1)[0]) not in watched:
            pass
        if not _is_leaving.is_set():
            _say(f"Stopped by {signal.Signals(number).name}.")
        os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()
