"""The threads of a rank, from the text that `faulthandler` writes of them.

`faulthandler` writes in a signal handler, in C: also where the rank is blocked in MPI
or in TensorFlow, or holds the GIL. The main thread comes last.
"""

import dataclasses
import os
import pathlib
import re
import select

# `faulthandler` writes all threads within this, unless the process is blocked.
_STACK_SECONDS = 3.0
# A dump has no pauses: silence of this length ends it.
_QUIET_SECONDS = 0.2
_THREAD = re.compile(
    r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first"
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
# The thread that `answer.request_stacks` has sent the signal to.
_RECEIVER = re.compile(
    r'^Current thread.*\n(?:  File ".*/threading\.py", line \d+ in .*\n)+\n', re.M
)
# Parts of the paths of frames, with the phase that their callees are in.
_PHASES = (
    ("/keras/src/callbacks/callback_list.py", "callbacks"),
    ("/tensorflow/python/data/ops/from_generator_op.py", "input"),
)
# In the files of debuggers a frame waits for a command: pdb and what derives from it,
# and the one of editors.
_DEBUGGERS = ("/bdb.py", "/pydevd.py")
DEBUGGER = "debugger"
# A call of Python code by TensorFlow: `py_function`, `numpy_function`, generators.
_PYTHON_CALL = "/tensorflow/python/ops/script_ops.py"
# Frames of a later kind are named only where a thread has none of an earlier kind.
_USERS, _INSTALLED, _OURS, _STANDARD = range(4)
_PACKAGE = str(pathlib.Path(__file__).parents[1]) + os.sep
# The record names the collective. Prefer the frame that called it.
_COLLECTIVES = _PACKAGE + "collectives" + os.sep
_FRAMEWORKS = re.compile(r"/(?:site|dist)-packages/(?:tensorflow|keras|horovod)/")


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"

    @property
    def kind(self) -> int:
        """Whose code it is: see `_USERS` and the others."""
        if self.file.startswith(_COLLECTIVES):
            return _STANDARD
        if self.file.startswith(_PACKAGE):
            return _OURS
        if self.file.startswith("<") or _FRAMEWORKS.search(self.file):
            return _STANDARD
        if "-packages/" in self.file:
            return _INSTALLED
        return _STANDARD if re.search(r"/lib/python3[.\d]*/", self.file) else _USERS


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the code of a user is: the frame, and the phase that the others show."""

    frame: Frame
    phase: str = ""


def find_place(text: str) -> Place | None:
    """Return the place of the rank in the user's code, from the text of all threads.

    Python code that TensorFlow calls runs in threads of its own, while the main thread
    waits for them in `fit`: such a thread is preferred. Without a frame of the user,
    as in `hvdtrain.mnist`, the place is one of the library.
    """
    threads = _threads(text)
    if not threads:
        return None
    called = [t for t in threads[:-1] if any(_PYTHON_CALL in f.file for f in t)]
    places = [_place(thread) for thread in (*called, threads[-1]) if thread]
    return min(places, key=lambda place: place.frame.kind, default=None)


def has_ended_script(text: str) -> bool:
    """Return whether the main thread has ended, and Python joins the other threads."""
    main = (_threads(text) or [[]])[-1]
    is_library = bool(main) and os.path.basename(main[-1].file) == "threading.py"
    return is_library and main[-1].function == "_shutdown"


def read_stacks(pipe: int) -> str:
    """Read a text from the pipe to which a rank's `faulthandler` writes."""
    data = b""
    timeout = _STACK_SECONDS
    while select.select([pipe], [], [], timeout)[0]:
        received = os.read(pipe, 1 << 16)
        if not received:
            break
        data += received
        timeout = _QUIET_SECONDS
    return data.decode(errors="replace")


def without_receiver(text: str) -> str:
    """Return the text without the thread that waits for signals of the guard."""
    return _RECEIVER.sub("", text)


def _threads(text: str) -> list[list[Frame]]:
    threads: list[list[Frame]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif (match := _FRAME.match(line)) and threads:
            threads[-1].append(Frame(match[1], int(match[2]), match[3]))
    return threads


def _place(thread: list[Frame]) -> Place:
    number = min(range(len(thread)), key=lambda number: thread[number].kind)
    if any(frame.file.endswith(_DEBUGGERS) for frame in thread[:number]):
        return Place(thread[number], DEBUGGER)
    callers = (frame.file for frame in thread[number:])
    phases = (phase for file in callers for part, phase in _PHASES if part in file)
    return Place(thread[number], next(phases, ""))
