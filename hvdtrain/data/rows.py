"""Copies of rows of an array in memory that TensorFlow can use without another copy."""

import math

import numpy as np

from hvdtrain.data.sample_functions import SampleFunctions

# EIGEN_MAX_ALIGN_BYTES of TensorFlow, which copies an array whose address is not a
# multiple of it. Those of NumPy's large arrays are not.
_ALIGNMENT = 64
# NumPy copies smaller rows as fast.
_MIN_NATIVE_ROW_BYTES = 256


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
