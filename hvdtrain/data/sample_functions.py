"""Functions of the native library that the input pipeline calls, where it is loaded.

Importing this module loads no TensorFlow, which the library needs. Without it NumPy
does the same, with equal results.
"""

import ctypes
from collections.abc import Callable
from typing import ClassVar


class SampleFunctions:
    """The functions of native/samples.cc; None where they are not used."""

    shuffle: ClassVar[Callable[..., None] | None] = None
    take: ClassVar[Callable[..., int] | None] = None


def use_library(functions: ctypes.CDLL) -> None:
    """Call the native library from now on."""
    shuffle = functions.hvdtrain_index_shuffle
    shuffle.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int64),  # indices
        *(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64),  # samples, rows, columns
        *(ctypes.c_void_p, ctypes.c_int64),  # keys
    ]
    shuffle.restype = None
    take = functions.hvdtrain_take_rows
    take.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t),  # array, its rows, bytes
        *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),  # numbers, count, result
    ]
    take.restype = ctypes.c_int64
    SampleFunctions.shuffle, SampleFunctions.take = shuffle, take
