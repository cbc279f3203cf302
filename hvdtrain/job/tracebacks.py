"""What is printed of an exception that a program does not catch."""

import itertools
import re
import traceback

# TensorFlow puts the traceback of Python code that it calls, as in `tf.numpy_function`
# and `Dataset.from_generator`, into the message of an error of its own, and names of
# nodes after it.
_EMBEDDED = re.compile(r"^Traceback \(most.*?(?=\n\s*\[\[\{\{|\Z)", re.S | re.M)
_FRAME, _CODE = "  File ", "    "
_NOT_OF_THE_USER = ("/tensorflow/python/", "__autograph_generated_file")


def describe(error):
    """Return what Python prints of an exception: its last lines, and all.

    For an exception in Python code that TensorFlow has called, in an input function
    for example, it is that exception with the user's frames.
    """
    embedded = None
    if type(error).__module__.startswith("tensorflow."):
        embedded = _EMBEDDED.search(str(error))
    if not embedded:
        whole = "".join(traceback.format_exception(error)).rstrip()
        return "".join(traceback.format_exception_only(error)).rstrip(), whole
    lines = _without_library_frames(embedded[0].splitlines())
    return "\n".join(_last_lines(lines)), "\n".join(lines)


def _last_lines(lines):
    starts = ("Traceback (most", _FRAME)
    last = max(n for n, line in enumerate(lines) if line.startswith(starts))
    rest = lines[last + 1 :]
    return itertools.dropwhile(lambda line: line.startswith(_CODE), rest)


def _without_library_frames(lines):
    kept, is_library = [], False
    # TensorFlow adds the empty lines.
    for line in filter(None, lines):
        if line.startswith(_FRAME):
            is_library = any(sign in line for sign in _NOT_OF_THE_USER)
        elif not line.startswith(_CODE):
            is_library = False
        if not is_library:
            kept.append(line)
    return kept
