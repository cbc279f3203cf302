"""The standard streams of a rank."""

import contextlib
import io
import itertools
import os
import re
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence

# Messages of TensorFlow at import, written by C++ code that no log level silences.
_NOISE = "absl::InitializeLog|^I0000 |oneDNN|cpu_feature_guard"
# One write for each line: see `_WholeLines`.
_FILTER = """
import os, re, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
noise = re.compile(os.fsencode(sys.argv[1]))
for line in sys.stdin.buffer:
    if not noise.search(line):
        os.write(1, line)
"""
_FILTER_SECONDS = 5
# The same in the output of a whole program, where a word alone may be the user's.
_NOISE_LINE = re.compile(
    rb"^(WARNING: All log messages before absl::InitializeLog|I0000 \d\d:).*\n", re.M
)
# Variable with the lowest level of the messages of TensorFlow's C++ code.
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_BUFFER_BYTES = 1 << 16
_real_stderr: int | None = None


class _WholeLines(io.TextIOWrapper):
    """A stream in which each `print` is one write of the operating system.

    mpirun puts its tag before each piece that it reads, and `print` writes the text
    and the newline apart: to a terminal, and with PYTHONUNBUFFERED=1 anywhere.
    """

    def write(self, text: str) -> int:
        count = super().write(text)
        # The second is the end of a step of a progress bar.
        if text.endswith(("\n", "\r")):
            self.flush()
        return count


def write_whole_lines() -> None:
    """Make each `print` to stdout and stderr leave this process in one write."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        old.flush()
        # A stream over the old one's buffer would close it when that is deleted.
        file = io.BufferedWriter(io.FileIO(number, "w", closefd=False), _BUFFER_BYTES)
        setattr(sys, name, _WholeLines(file, encoding=old.encoding, errors=old.errors))


def write_whole_lines_of_script() -> None:
    """Call `write_whole_lines`, unless the script or a notebook has its own streams."""
    streams = (sys.stdout, sys.stderr)
    if streams == (sys.__stdout__, sys.__stderr__) and all(streams):
        write_whole_lines()


def write_error(text: str, *, timeout_seconds: float) -> None:
    """Write a text to stderr, past all buffers, also inside of `without_noise`.

    It takes no lock, so that any thread may call it. Text that does not fit into a full
    pipe within `timeout_seconds` is dropped.
    """
    data = text.encode(errors="replace")
    stderr = _real_stderr or 2
    deadline = time.monotonic() + timeout_seconds
    poll = select.poll()
    poll.register(stderr, select.POLLOUT)
    with contextlib.suppress(OSError):
        while data and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            # A pipe that is ready takes PIPE_BUF bytes without blocking. Only complete
            # lines, since mpirun puts its tag before each piece.
            end = data.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
            data = data[os.write(stderr, data[:end]) :]


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Drop TensorFlow's messages at import from stderr.

    A separate process filters: it outlives an abort in C++ code, whose reason is the
    last line. It has its own session, since a launcher signals the group of a rank.
    Nothing is dropped with TF_CPP_MIN_LOG_LEVEL=0, and in a block inside of another.
    """
    global _real_stderr
    if _real_stderr is not None or os.environ.get(LOG_LEVEL) == "0":
        yield
        return
    sys.stderr.flush()
    stderr = _real_stderr = os.dup(2)
    command = [sys.executable, "-I", "-S", "-c", _FILTER, _NOISE]
    filtering = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=stderr, start_new_session=True
    )
    assert filtering.stdin is not None
    os.dup2(filtering.stdin.fileno(), 2)
    filtering.stdin.close()
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        _real_stderr = None
        os.close(stderr)
        # With a limit: a process that was started inside may hold the pipe open.
        with contextlib.suppress(subprocess.TimeoutExpired):
            filtering.wait(_FILTER_SECONDS)


def drop_noise(lines: bytes) -> bytes:
    """Return complete lines of stderr without TensorFlow's messages at import."""
    return _NOISE_LINE.sub(b"", lines)


# TensorFlow puts the traceback of Python code that it calls, as in `tf.numpy_function`
# and `Dataset.from_generator`, into the message of an error of its own, and names of
# nodes after it.
_EMBEDDED = re.compile(r"^Traceback \(most.*?(?=\n\s*\[\[\{\{|\Z)", re.S | re.M)
_FRAME, _CODE = "  File ", "    "
# The message of these is for users, without a traceback.
_JOB_ERROR = re.compile(r"hvdtrain\.[\w.]*\.(?:Shared)?(?:Job|Data)Error: ")
_NOT_OF_THE_USER = ("/tensorflow/python/", "__autograph_generated_file")


def describe(error: BaseException) -> tuple[str, str]:
    """Return the last lines and all lines of the text that Python prints of an error.

    If Python code that TensorFlow has called, such as an input function, raised it, the
    lines describe the original exception with the user's frames. For a `JobError` they
    are its message.
    """
    embedded = None
    if type(error).__module__.startswith("tensorflow."):
        embedded = _EMBEDDED.search(str(error))
    if not embedded:
        text = "".join(traceback.format_exception(error)).rstrip()
        return "".join(traceback.format_exception_only(error)).rstrip(), text
    lines = _without_library_frames(embedded[0].splitlines())
    last = "\n".join(_last_lines(lines))
    if job_error := _JOB_ERROR.match(last):
        return last[job_error.end() :], last[job_error.end() :]
    return last, "\n".join(lines)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 0" or "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _last_lines(lines: list[str]) -> Iterable[str]:
    starts = ("Traceback (most", _FRAME)
    last = max(n for n, line in enumerate(lines) if line.startswith(starts))
    rest = lines[last + 1 :]
    return itertools.dropwhile(lambda line: line.startswith(_CODE), rest)


def _without_library_frames(lines: list[str]) -> list[str]:
    kept: list[str] = []
    is_library = False
    # TensorFlow adds the empty lines.
    for line in filter(None, lines):
        if line.startswith(_FRAME):
            is_library = any(sign in line for sign in _NOT_OF_THE_USER)
        elif not line.startswith(_CODE):
            is_library = False
        if not is_library:
            kept.append(line)
    return kept
