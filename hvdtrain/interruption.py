"""Signals to a program of this package while it imports its modules.

Python's own handler of SIGINT raises `KeyboardInterrupt`: the traceback of an import is
long, and where Python ignores exceptions, as in callbacks of the import system and in
finalizers, the signal is lost.
"""

import contextlib
import os
import pathlib
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

# All by which a terminal, a launcher or a batch system ends a job.
SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
# Path of a file on the launcher's host, in which the launcher writes the signal that it
# has received, in place of the one that it sends its ranks. Such a launcher prints the
# line; under another one, rank 0 does.
SIGNAL_FILE = "HVDTRAIN_LAUNCHER_SIGNAL"
# Variables of the rank, of launchers that print no line.
_RANKS = (
    *("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"),
    "HVDTRAIN_RANK",
)
_replaced: dict[int, Any] = {}


def end_program_on_signals() -> None:
    """Let signals end `python -m hvdtrain.PROGRAM` at once, until `restore_handlers`.

    Does nothing in other processes.
    """
    # While Python imports the packages of a module that it is to run, argv[0] is "-m".
    words = sys.orig_argv
    if sys.argv[:1] != ["-m"] or "-m" not in words:
        return
    package, *names = words[words.index("-m") + 1].split(".")
    if package != "hvdtrain" or len(names) > 1:
        return
    for number in SIGNALS:
        # nohup ignores SIGHUP, for a job that outlives its terminal.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            _replaced[number] = signal.signal(number, _end)


def restore_handlers() -> None:
    """Restore what `end_program_on_signals` has replaced."""
    while _replaced:
        signal.signal(*_replaced.popitem())


def launcher_signal() -> str:
    """Return the name of the signal that the launcher has received; empty for none."""
    path = os.environ.get(SIGNAL_FILE, "")
    with contextlib.suppress(OSError):
        # On another host than the launcher's it may be any file, or a pipe.
        if os.readlink(path).startswith("/memfd:"):
            name = pathlib.Path(path).read_text(errors="replace")
            return name if name in signal.Signals.__members__ else ""
    return ""


def _end(number: int, frame: FrameType | None) -> NoReturn:
    rank = next(filter(None, map(os.environ.get, _RANKS)), "0")
    if SIGNAL_FILE not in os.environ and rank == "0":
        # The reader of the output may have ended.
        with contextlib.suppress(OSError):
            os.write(2, f"Stopped by {signal.Signals(number).name}.\n".encode())
    os._exit(128 + number)
