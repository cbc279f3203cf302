"""Which Python thread calls the collectives: one at a time, the same on all ranks.

Collectives must have one order on all ranks. Two threads that call them concurrently
have no such order: one thread's tensors would be added to the other's on another rank.
So a call is refused while a call of another thread is in flight, and every collective
compares the description of its thread: ranks on which different threads have called it
fail together. The main thread is equal on all ranks. Another thread is described by its
class, its target and its name without digits, since ranks may number their threads
differently. Living threads with equal descriptions cannot be matched across ranks.
Their description gets the rank, so their collectives fail.
"""

import contextlib
import ctypes
import dataclasses
import functools
import re
import threading
import zlib
from collections.abc import Callable, Iterator

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.eager import context

from hvdtrain.collectives.dtypes import mark_internal
from hvdtrain.collectives.process_sets import global_process_set, needs_communication
from hvdtrain.native import recorder

_END_SECONDS = 5.0
# A length of an axis, for Horovod as for TensorFlow.
_MAX_NUMBER = 2**31 - 1
_local = threading.local()


@dataclasses.dataclass
class _Caller:
    """The thread that calls, or called last; `lock` guards the other fields."""

    thread: threading.Thread
    is_in_call: bool = False
    # Empty for the main thread.
    text: str = ""
    # Hash of `text`, compared across ranks; 0 for the main thread.
    number: int = 0
    native: ctypes.CDLL | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_caller = _Caller(threading.main_thread())


@functools.cache
def number_variable() -> tf.Variable:
    """Return the variable with the caller's number, which guards compare."""
    with tf.init_scope(), tf.device("CPU"):
        variable = tf.Variable(_caller.number, trainable=False, dtype=tf.int64)
        return mark_internal(variable)


def use_native(functions: ctypes.CDLL | None) -> None:
    """Let the native library compare callers as well; None ends this."""
    with _caller.lock:
        _caller.native = functions
        _publish(_caller.number)


def description() -> str:
    """Return the caller as the beginning of a text; empty for the main thread."""
    return f"in {_caller.text}: " if _caller.text else ""


def act_for(thread: threading.Thread) -> None:
    """Attribute this thread's calls to `thread`, which waits for it."""
    _local.principal = thread


def current() -> threading.Thread:
    """Return this thread, or the one that it acts for."""
    thread = getattr(_local, "principal", None) or threading.current_thread()
    # TensorFlow runs `py_function`s in threads that Python did not start. They act for
    # the thread that called the function.
    is_foreign = isinstance(thread, threading._DummyThread)
    return _caller.thread if is_foreign else thread


@contextlib.contextmanager
def in_call() -> Iterator[None]:
    """Mark the enclosed block, which runs collectives, as a call of this thread.

    Raises:
        RuntimeError: a call of another thread is in flight. The job has ended.
    """
    is_outermost = _enter(current())
    try:
        yield
    finally:
        if is_outermost:
            _caller.is_in_call = False


def watch(token: tf.Variable, prepare: Callable[[], None]) -> None:
    """Put all calls of functions that read `token`, as collectives do, into `in_call`.

    `prepare` is called before each of these calls.
    """
    runtime = context.context()
    call_function = runtime.call_function
    handle = token.handle
    reads_token: dict[str, bool] = {}

    def watched(name: str, inputs: list[tf.Tensor], num_outputs: int) -> object:
        if name not in reads_token:
            reads_token[name] = any(tensor is handle for tensor in inputs)
        if not reads_token[name]:
            return call_function(name, inputs, num_outputs)
        prepare()
        with in_call():
            try:
                return call_function(name, inputs, num_outputs)
            except Exception:
                # The operation that would record the end has not run.
                recorder.abandon_collective()
                raise

    runtime.call_function = watched


@contextlib.contextmanager
def uncompared() -> Iterator[None]:
    """Compare no callers: all ranks are known to have failed in one collective."""
    number_variable().assign(0)
    _publish(0)
    try:
        yield
    finally:
        number_variable().assign(_caller.number)
        _publish(_caller.number)


def _enter(thread: threading.Thread) -> bool:
    """Return whether this call is not nested in another one."""
    with _caller.lock:
        if not _caller.is_in_call:
            if thread is not _caller.thread:
                _take_over(thread)
            _caller.is_in_call = True
            return True
        before = _caller.thread
    if thread is before or not needs_communication(global_process_set):
        return False
    reason = (
        f"Received a collective in {_name(thread)} while one in {_name(before)} is in "
        "flight; expected collectives of one thread at a time. Collectives of several "
        "threads have no order that is equal on all ranks. Call all of them in one "
        "thread, or let the threads wait for each other, with names that differ in "
        "more than digits."
    )
    _end_job(f"rank {hvd.rank()}: {reason}")
    raise RuntimeError(reason)


def _take_over(thread: threading.Thread) -> None:
    text = _text(thread)
    number = zlib.crc32(text.encode()) & _MAX_NUMBER
    number_variable().assign(number)
    # After the lines that may raise: a thread without a text of its own would be
    # compared as the previous one.
    _caller.thread, _caller.text, _caller.number = thread, text, number
    _publish(number)


def _publish(number: int) -> None:
    """Give the caller to the native library; 0 is equal on all ranks."""
    if _caller.native:
        text = _caller.text.encode()
        _caller.native.hvdtrain_set_caller(ctypes.c_uint64(number), text)


def _text(thread: threading.Thread) -> str:
    if thread is threading.main_thread():
        return ""
    text = _describe(thread)
    alike = [other for other in threading.enumerate() if _describe(other) == text]
    if len(alike) < 2:
        return text
    return (
        f"{text}, one of {len(alike)} such threads of rank {hvd.rank()} (set the "
        "thread's name to one that differs in more than digits)"
    )


def _name(thread: threading.Thread) -> str:
    is_main = thread is threading.main_thread()
    return "the main thread" if is_main else f"thread {thread.name!r}"


def _describe(thread: threading.Thread) -> str:
    # Python's own attribute; without it, threads of one class and name are alike.
    runs = getattr(thread, "_target", None) or type(thread)
    while isinstance(runs, functools.partial):
        runs = runs.func
    # Callables that are implemented in C may have neither.
    module = getattr(runs, "__module__", None)
    name = getattr(runs, "__qualname__", type(runs).__name__)
    return f"{re.sub(r'[0-9]+', '#', _name(thread))} of {module}.{name}"


def _end_job(reason: str) -> None:
    # The call in flight may wait for a thread of another rank that was refused there.
    if _caller.native:
        _caller.native.hvdtrain_fail(reason.encode())
    stopper = threading.Thread(target=hvd.shutdown, daemon=True)
    stopper.start()
    stopper.join(_END_SECONDS)
