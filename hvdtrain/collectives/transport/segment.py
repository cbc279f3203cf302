"""The memory that the ranks of a host share, and what connects it to other hosts."""

import contextlib
import ctypes
import os
import socket
import tempfile
from collections.abc import Sequence
from typing import IO

from hvdtrain.collectives.transport.places import RankPlaces
from hvdtrain.environment import stall_limits
from hvdtrain.open_directory import open_regular

# A chunk of each rank: larger ones leave the second-level cache, smaller ones need more
# barriers. All slots together stay below the 64 MB of /dev/shm in a container.
_MAX_SLOT_BYTES = 1 << 20
_MAX_SEGMENT_BYTES = 32 << 20
_LINE_BYTES = 128
# To sleep and be woken takes 50 us and more on a virtual machine, and the steps of
# ranks that share a machine differ by some 100 us. A rank that spins longer takes
# processor time from the threads that compute.
_SPIN_SECONDS = 1e-3


def reserve(functions: ctypes.CDLL, places: RankPlaces) -> IO[bytes]:
    """Return an open file for the memory of a host, removed when it is closed.

    Raises:
        OSError: there is no room for it.
    """
    count = functions.hvdtrain_segment_bytes
    count.restype = ctypes.c_size_t
    count.argtypes = [ctypes.c_int, ctypes.c_size_t]
    size = len(places.local_ranks)
    return _reserved_file(count(size, _slot_bytes(places.largest_host)))


def attach(
    functions: ctypes.CDLL,
    file: str,
    places: RankPlaces,
    sockets: Sequence[socket.socket | None] = (),
) -> str:
    """Map the `file` of this host, and return the reason if this fails.

    Args:
        sockets: connections to the peers on other hosts, which the library then owns.
    """
    connect = functions.hvdtrain_connect
    connect.restype = ctypes.c_char_p
    integers = ctypes.POINTER(ctypes.c_int)
    connect.argtypes = [
        *(ctypes.c_int, ctypes.c_size_t),
        *[ctypes.c_double] * 3,
        *[ctypes.c_int] * 5,
        *(integers, integers),
    ]
    largest = places.largest_host
    # A rank that spins would take the core of another one.
    spin_seconds = 0.0 if places.is_core_shared else _SPIN_SECONDS
    ranks = [r for host in places.hosts for r in (host + [-1] * largest)[:largest]]
    try:
        with open(file, "r+b", opener=open_regular) as opened:
            links = [made.detach() if made else -1 for made in sockets]
            reason = connect(
                *(opened.fileno(), _slot_bytes(largest), spin_seconds, *stall_limits()),
                *(len(places.hosts), places.host, places.mine.local_rank),
                *(places.smallest_host, largest, _integers(ranks)),
                _integers(links) if links else None,
            )
    except OSError as error:
        return str(error)
    return reason.decode() if reason else ""


def _integers(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int]":
    return (ctypes.c_int * len(values))(*values)


def _slot_bytes(size: int) -> int:
    """Return the bytes of the slot of each of `size` ranks, the same on all hosts."""
    share = _MAX_SEGMENT_BYTES // (size + 1) // _LINE_BYTES * _LINE_BYTES
    return min(_MAX_SLOT_BYTES, share)


def _directories() -> tuple[str, str]:
    # The first is memory; pages of the second may be written to a disk.
    return "/dev/shm", tempfile.gettempdir()


def _reserved_file(size: int) -> IO[bytes]:
    errors = []
    for directory in _directories():
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile(prefix="hvdtrain-", dir=directory)
                )
                # Without reserved blocks, a full file system would kill the process
                # when it writes to the mapped memory (SIGBUS).
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                errors.append(f"{directory}: {error.strerror}")
                continue
            stack.pop_all()
            return file
    raise OSError(f"no {size:,} bytes of shared memory: {'; '.join(errors)}")
