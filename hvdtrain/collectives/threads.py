"""Which Python thread calls the collectives: one at a time, the same on all ranks.

Collectives have one order, the same on all ranks. Two threads that call them as they
come have none, and one thread's tensors would be added to the other's on another rank.
So a call while a call of another thread is in flight is refused, and every collective
is compared with the description of its thread: ranks on which different threads have
called it fail together. The main thread is equal on all ranks. Any other is described
by its class, its target and its name without digits, since ranks may number theirs
differently; if several that are alive have one description, nothing shows which of
them another rank's is, and the rank's number makes their collectives differ.
"""

import contextlib
import ctypes
import functools
import re
import threading
import zlib
from collections.abc import Iterator

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.eager import context

from hvdtrain.collectives.process_sets import global_process_set, needs_communication

_END_SECONDS = 5.0
# A length of an axis, for Horovod as for TensorFlow.
_MAX_NUMBER = 2**31 - 1
_lock = threading.Lock()
_local = threading.local()


class _Caller:
    """The thread that calls, or called last."""

    thread = threading.main_thread()
    is_in_call = False
    text = ""
    # Of all ranks' callers, equal or not: 0 for the main thread.
    number = 0
    # The native library's C functions; None where it is not used.
    native = None


@functools.cache
def number_variable() -> tf.Variable:
    """Returns the variable with the caller's number, which guards compare."""
    with tf.init_scope(), tf.device("CPU"):
        return tf.Variable(_Caller.number, trainable=False, dtype=tf.int64)


def use_native(functions) -> None:
    """Let the native library compare callers as well; None: no longer."""
    with _lock:
        _Caller.native = functions
        _publish()


def description() -> str:
    """Returns the caller as the beginning of a text; empty for the main thread."""
    return f"in {_Caller.text}: " if _Caller.text else ""


def act_for(thread: threading.Thread) -> None:
    """Make this thread's calls those of `thread`, which waits for it."""
    _local.principal = thread


def current() -> threading.Thread:
    """Returns this thread, or the one that it acts for."""
    thread = getattr(_local, "principal", None) or threading.current_thread()
    # Not started by Python: a thread in which TensorFlow runs the Python code of a
    # function, for the thread that has called it.
    is_foreign = isinstance(thread, threading._DummyThread)
    return _Caller.thread if is_foreign else thread


@contextlib.contextmanager
def in_call() -> Iterator[None]:
    """A block that runs collectives, as a call of this thread.

    Raises:
        RuntimeError: a call of another thread is in flight. The job has ended.
    """
    is_outermost = _enter(current())
    try:
        yield
    finally:
        if is_outermost:
            _Caller.is_in_call = False


def watch(token: tf.Variable, prepare) -> None:
    """Put all calls of functions that hold collectives into `in_call`.

    Args:
        token: the variable that every such function reads.
        prepare: called before each of them, without arguments.
    """
    runtime = context.context()
    call_function = runtime.call_function
    handle, reads_token = token.handle, {}

    def watched(name, inputs, num_outputs):
        if name not in reads_token:
            reads_token[name] = any(each is handle for each in inputs)
        if not reads_token[name]:
            return call_function(name, inputs, num_outputs)
        prepare()
        with in_call():
            return call_function(name, inputs, num_outputs)

    runtime.call_function = watched


@contextlib.contextmanager
def uncompared():
    """Compare no callers: all ranks are known to have failed in one collective."""
    number_variable().assign(0)
    try:
        yield
    finally:
        number_variable().assign(_Caller.number)


def _enter(thread):
    """Returns whether this call is not a part of another one."""
    with _lock:
        if not _Caller.is_in_call:
            if thread is not _Caller.thread:
                _take_over(thread)
            _Caller.is_in_call = True
            return True
        before = _Caller.thread
    if thread is before or not needs_communication(global_process_set):
        return False
    reason = (
        f"Received a collective in {_name(thread)} while one in {_name(before)} is in "
        "flight; expected collectives of one thread at a time. Those of several "
        "threads have no order that is equal on all ranks. Call all of them in one "
        "thread, or let the threads wait for each other."
    )
    _end_job(f"rank {hvd.rank()}: {reason}")
    raise RuntimeError(reason)


def _take_over(thread):
    _Caller.thread = thread
    _Caller.text = _text(thread)
    _Caller.number = zlib.crc32(_Caller.text.encode()) & _MAX_NUMBER
    number_variable().assign(_Caller.number)
    _publish()


def _publish():
    if _Caller.native:
        number = ctypes.c_uint64(_Caller.number)
        _Caller.native.hvdtrain_set_caller(number, _Caller.text.encode())


def _text(thread):
    if thread is threading.main_thread():
        return ""
    text = _describe(thread)
    alike = [each for each in threading.enumerate() if _describe(each) == text]
    if len(alike) < 2:
        return text
    return f"{text}, one of {len(alike)} such threads of rank {hvd.rank()}"


def _name(thread):
    is_main = thread is threading.main_thread()
    return "the main thread" if is_main else f"thread {thread.name!r}"


def _describe(thread):
    # Python's own attribute; without it, threads of one class and name are alike.
    runs = getattr(thread, "_target", None) or type(thread)
    source = f"{runs.__module__}.{getattr(runs, '__qualname__', type(runs).__name__)}"
    return f"{re.sub(r'[0-9]+', '#', _name(thread))} of {source}"


def _end_job(reason):
    # The call in flight may wait for a thread of another rank that was refused there.
    if _Caller.native:
        _Caller.native.hvdtrain_fail(reason.encode())
    stopper = threading.Thread(target=hvd.shutdown, daemon=True)
    stopper.start()
    stopper.join(_END_SECONDS)
