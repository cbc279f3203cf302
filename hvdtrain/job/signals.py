"""Signals, delivered to subscribers in a thread of their own.

Python runs a signal handler in the main thread, after it has returned from C code. A
thread that is blocked in a collective may never return. The interpreter's C handler
writes the number of the signal to a file descriptor at once, and a thread reads it.
"""

import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType

from hvdtrain import output
from hvdtrain.flight import member

Callback = Callable[[int], bool]
# Signals with their callback. Replaced and never changed: the thread iterates over it.
_subscribers: tuple[tuple[frozenset[int], Callback], ...] = ()
# Handlers before the first subscription, by number.
_replaced: dict[int, signal.Handlers | Callable | int] = {}
_thread: threading.Thread | None = None
# File descriptor; -1 is none, as for `signal.set_wakeup_fd`.
_writer = -1
# When a subscriber was called, by `time.monotonic`.
_received_seconds = -math.inf
# Set while no callback runs.
_is_idle = threading.Event()
_is_idle.set()


def subscribe(numbers: Iterable[int], callback: Callback) -> None:
    """Call `callback(number)` when a signal arrives. The main thread must call this.

    The newest subscriber is called first. A callback that returns True has handled the
    signal, and older subscribers are not called. A signal that no callback has handled
    ends the process at once with exit code 128 + its number. A SIGHUP that the process
    ignores, because nohup has started it, stays ignored.

    Args:
        numbers: signals, as `signal.SIGTERM`.
        callback: is called in a daemon thread, for one signal after the other. It must
            not write to a buffered stream: the main thread may hold its lock.
    """
    global _subscribers
    _start_thread()
    # nohup ignores SIGHUP, for a job that outlives its terminal.
    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = set(numbers) - ({signal.SIGHUP} if is_kept else set())
    _subscribers = (*_subscribers, (frozenset(numbers), callback))
    for number in numbers:
        handler = signal.signal(number, _handle)
        if handler is not _handle:
            # None is a handler that C code has installed, which Python cannot restore.
            _replaced[number] = handler or signal.SIG_DFL


def unsubscribe(callback: Callback) -> None:
    """Remove all subscriptions of `callback`. The main thread must call this.

    A signal without subscribers gets the handler that it had before the first one.
    """
    global _subscribers
    _subscribers = tuple(pair for pair in _subscribers if pair[1] != callback)
    subscribed = frozenset().union(*(numbers for numbers, _ in _subscribers))
    for number in _replaced.keys() - subscribed:
        handler = _replaced.pop(number)
        # Not in place of one that the user has installed since.
        if signal.getsignal(number) is _handle:
            signal.signal(number, handler)


def ends_process(number: int) -> bool:
    """Return whether the signal would end this process if it had no subscriber."""
    return _replaced.get(number, signal.getsignal(number)) == signal.SIG_DFL


def seconds_since_last() -> float:
    """Return the seconds since a signal arrived for a subscriber; infinity if none."""
    return time.monotonic() - _received_seconds


def wait_for_callbacks() -> None:
    """Block while a callback runs, which may end the process.

    An error of the main thread may be a consequence of what the callback does.
    """
    if threading.current_thread() is not _thread:
        _is_idle.wait()


def _handle(number: int, frame: FrameType | None) -> None:
    """Deliver a signal whose number the C handler has not written to our pipe.

    An asyncio loop has a file descriptor of its own for signals, and resets it to -1
    when it removes its last handler.
    """
    wakeup_fd = signal.set_wakeup_fd(_writer, warn_on_full_buffer=False)
    # Before the write: the next signal may be the loop's.
    if wakeup_fd not in (_writer, -1):
        signal.set_wakeup_fd(wakeup_fd)
    if wakeup_fd != _writer:
        os.write(_writer, bytes([number]))


def _start_thread() -> None:
    global _thread, _writer
    if _thread is None:
        reader, _writer = os.pipe()
        os.set_blocking(_writer, False)
        signal.set_wakeup_fd(_writer, warn_on_full_buffer=False)
        _thread = threading.Thread(target=_deliver, args=(reader,), daemon=True)
        _thread.start()


def _reset() -> None:
    # A forked child has no thread, and its file descriptor is this process' own: a
    # signal to the child would be delivered here.
    global _subscribers, _thread, _writer
    if _thread is None:
        return
    signal.set_wakeup_fd(-1)
    for number, handler in _replaced.items():
        signal.signal(number, handler)
    _subscribers = ()
    _replaced.clear()
    _is_idle.set()
    _thread, _writer = None, -1


os.register_at_fork(after_in_child=_reset)


def _deliver(reader: int) -> None:
    global _received_seconds
    while True:
        number = os.read(reader, 1)[0]
        # Other handlers of this process write their bytes, too.
        if signal.getsignal(number) is not _handle:
            continue
        _received_seconds = time.monotonic()
        _is_idle.clear()
        if not _is_handled(number):
            member.leave(128 + number)
            os._exit(128 + number)
        _is_idle.set()


def _is_handled(number: int) -> bool:
    for numbers, callback in reversed(_subscribers):
        try:
            if number in numbers and callback(number):
                return True
        except Exception:
            output.write_error(traceback.format_exc(), timeout_seconds=1)
    return False
