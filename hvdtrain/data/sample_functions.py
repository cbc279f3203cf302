"""Copies of samples, and the functions of the native library for samples.

Importing this module loads no TensorFlow, which the library needs. Without it NumPy
does the same, with equal results.
"""

import ctypes
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np

# EIGEN_MAX_ALIGN_BYTES of TensorFlow, which copies an array whose address is not a
# multiple of it. Those of NumPy's large arrays are not.
_ALIGNMENT = 64
# NumPy copies smaller rows as fast.
_MIN_NATIVE_ROW_BYTES = 256


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


def take_rows(array: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return `array[numbers]`, of shape (len(numbers), *array.shape[1:]).

    Args:
        array: of any dtype but object.
        numbers: integers, 0 to `len(array) - 1`.

    Raises:
        IndexError: a number is out of range.
    """
    numbers = np.ascontiguousarray(numbers, np.int64)
    taken = _aligned((len(numbers), *array.shape[1:]), array.dtype)
    row_bytes = math.prod(array.shape[1:]) * array.itemsize
    is_native = row_bytes >= _MIN_NATIVE_ROW_BYTES and array.flags.c_contiguous
    if not (SampleFunctions.take and is_native):
        # With mode="raise", NumPy buffers the result.
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(array):
            raise IndexError(f"numbers are not all within 0 to {len(array) - 1}")
        return np.take(array, numbers, axis=0, out=taken, mode="wrap")
    place = SampleFunctions.take(
        *(array.ctypes.data, len(array), row_bytes),
        *(numbers.ctypes.data, len(numbers), taken.ctypes.data),
    )
    if place >= 0:
        raise IndexError(f"{numbers[place]} is not within 0 to {len(array) - 1}")
    return taken


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
