"""Records the collectives and phases of this process in its ring.

A record is written by the native library without a system call. Without the library,
and before `open_ring`, nothing is recorded. `hvdtrain.flight.ring` reads a ring.
"""

import contextlib
import ctypes
import functools
import math
import mmap
import os
import pathlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import tensorflow as tf

from hvdtrain import native
from hvdtrain.flight import ring

# Of the header's 64-bit fields: the record of the collective in flight, nanoseconds by
# phase, those in collectives, and the number of trainings that have ended.
_CURRENT, _FITS = 3, 25
_IN_PHASES, _IN_COLLECTIVES = slice(9, 17), slice(17, 25)
_RECORD = np.dtype(
    [
        *(("sequence", "u8"), ("entered", "i8"), ("left", "i8")),
        *(("step", "u8"), ("number", "u8"), ("bytes", "u8")),
        *(("kind", "u4"), ("phase", "u4")),
        *(("name", "S48"), ("operation", "S24")),
    ]
)


@functools.cache
def _library() -> native.Library | None:
    try:
        library = native.load()
    except OSError:
        return None
    functions = library.functions
    functions.hvdtrain_ring_bytes.restype = ctypes.c_size_t
    functions.hvdtrain_enter_collective.restype = ctypes.c_uint64
    functions.hvdtrain_enter_collective.argtypes = [
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int)
    ]
    functions.hvdtrain_leave_collective.argtypes = [ctypes.c_uint64]
    functions.hvdtrain_set_step.argtypes = [ctypes.c_uint64]
    functions.hvdtrain_input_wait_microseconds.restype = ctypes.c_int64
    return library


class _OpenRing:
    """The mapping that Python reads, of the file that the library maps as well."""

    memory: mmap.mmap | None = None


def open_ring(path: str | os.PathLike | None = None) -> None:
    """Record from now on, in a new file at `path` or in memory without a name.

    A second call keeps the ring, and numbers collectives from 1 again, as all ranks of
    an elastic job do after a reset.

    Raises:
        OSError: the file cannot be written.
    """
    library = _library()
    if not library:
        return
    if _OpenRing.memory:
        renumber_collectives()
        return
    with _new_file(path) as file:
        count = library.functions.hvdtrain_ring_bytes()
        # Reserved: writing to a page without memory behind it would be a bus error.
        os.posix_fallocate(file, 0, count)
        _OpenRing.memory = mmap.mmap(file, count)
        name = f"/proc/self/fd/{file}"
        if error := library.functions.hvdtrain_open_ring(name.encode()):
            _OpenRing.memory = None
            raise OSError(error, os.strerror(error))


def renumber_collectives() -> None:
    """Number the next collective of all ranks 1; to be called on all ranks."""
    if library := _library():
        library.functions.hvdtrain_renumber_collectives()


@contextlib.contextmanager
def _new_file(path: str | os.PathLike | None) -> Iterator[int]:
    if path is None:
        file = os.memfd_create("hvdtrain-ring", os.MFD_CLOEXEC)
    else:
        pathlib.Path(path).unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def operations() -> ModuleType | None:
    """Return the operations that record within graphs; None without the library."""
    library = _library()
    return library.operations if library else None


@contextlib.contextmanager
def collective(
    name: str, operation: str, *, size_bytes: int, is_of_all_ranks: bool
) -> Iterator[None]:
    """Record that the block is a collective, which runs eagerly."""
    library = _library()
    if not library:
        yield
        return
    record = library.functions.hvdtrain_enter_collective(
        name.encode(), operation.encode(), size_bytes, is_of_all_ranks
    )
    try:
        yield
    finally:
        library.functions.hvdtrain_leave_collective(record)


def abandon_collective() -> None:
    """Record that this process is in no collective: a graph has failed in it."""
    fields = _fields()
    if fields is not None:
        fields[_CURRENT] = 0


def end_fit() -> None:
    """Record that a training by Keras' `fit` has ended."""
    fields = _fields()
    if fields is not None:
        fields[_FITS] += 1


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Record that the block is a phase of `ring.PHASES`, in place of the present one.

    The present phase goes on after the block.
    """
    library = _library()
    if not library:
        yield
        return
    previous = library.functions.hvdtrain_enter_phase(ring.PHASES.index(name))
    try:
        yield
    finally:
        library.functions.hvdtrain_enter_phase(previous)


def mark_phase(name: str, *, begins_step: bool = False) -> list[tf.Operation]:
    """Return operations of a graph that record a phase; empty without the library."""
    made = operations()
    if not made:
        return []
    operation = made.hvdtrain_enter_phase(
        token=_phase_token().handle,
        phase=ring.PHASES.index(name),
        begins_step=begins_step,
    )
    return [operation]


@functools.cache
def _phase_token() -> tf.Variable:
    # Orders phases among themselves alone, not with collectives.
    with tf.init_scope(), tf.device("CPU"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)


def set_step(step: int) -> None:
    """Record the number of steps that have been taken; see `mark_phase`."""
    if library := _library():
        library.functions.hvdtrain_set_step(step)


def seconds_in_collectives() -> float:
    """Return the seconds of this process in collectives, waits for ranks included.

    NaN where nothing is recorded.
    """
    fields = _fields()
    return math.nan if fields is None else 1e-9 * int(fields[_IN_COLLECTIVES].sum())


def seconds_of_input_waits() -> float:
    """Return for how long this process has waited for batches of any dataset.

    NaN without the native library.
    """
    if library := _library():
        return 1e-6 * library.functions.hvdtrain_input_wait_microseconds()
    return math.nan


def seconds_by_phase() -> dict[str, float]:
    """Return the seconds of this process in each phase; empty without records.

    Without the time in collectives. The present phase counts to its beginning.
    """
    fields = _fields()
    if fields is None:
        return {}
    totals = fields[_IN_PHASES].astype(float) - fields[_IN_COLLECTIVES].astype(float)
    return dict(zip(ring.PHASES, (1e-9 * totals).tolist(), strict=False))


def recent_waits(count: int = 64) -> tuple[int, np.ndarray]:
    """Return the seconds of the last complete collectives of all ranks.

    Returns:
        The number of the newest one, which is equal on all ranks that have completed
        it, and the seconds of up to `count` consecutive ones, the oldest first. 0 and
        no seconds where nothing is recorded.
    """
    if not _OpenRing.memory:
        return 0, np.zeros(0)
    records = np.frombuffer(_OpenRing.memory, _RECORD, offset=ring.HEADER_BYTES).copy()
    # Numbers start again in an elastic job, sequences do not.
    is_written = (records["sequence"] > 0) & (records["left"] > 0)
    complete = records[is_written & (records["number"] > 0)]
    records = np.sort(complete, order="sequence")
    if not len(records):
        return 0, np.zeros(0)
    newest = int(records["number"][-1])
    records = records[-min(count, newest) :]
    return newest, 1e-9 * (records["left"] - records["entered"])


def _fields() -> np.ndarray | None:
    if not _OpenRing.memory:
        return None
    return np.frombuffer(_OpenRing.memory, np.uint64, ring.HEADER_BYTES // 8)
