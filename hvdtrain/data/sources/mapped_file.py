"""Files in memory, without a file descriptor for each.

Python's `mmap` keeps a descriptor, of which a process usually has 1,024: a source of
1,000 files would open and close them all the time.
"""

import ctypes
import mmap
import os

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t),
    *([ctypes.c_int] * 3),
    ctypes.c_ssize_t,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A mapping that ends with the last array that refers to it."""

    def __init__(self, descriptor: int, size: int) -> None:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, True),
        }

    def __del__(self) -> None:
        if interface := getattr(self, "__array_interface__", None):
            _libc.munmap(interface["data"][0], *interface["shape"])


def map_file(path: str | os.PathLike[str]) -> np.ndarray:
    """Return the bytes of a file as a read-only array: uint8 (size,).

    An access beyond the end of a file that was truncated later ends the process.

    Raises:
        OSError: the file cannot be read, or is empty.
    """
    # Not blocking: the file may be a FIFO, which cannot be mapped.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return np.asarray(_Mapping(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)
