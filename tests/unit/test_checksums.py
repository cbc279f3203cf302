"""Checksums of variables, by which ranks find that theirs differ."""

import tracemalloc
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.keras.consistency import compute_checksum

VALUES = np.arange(6, dtype="float32").reshape(2, 3)


def checksum_of_bytes(value, header):
    checksum = zlib.crc32(value.tobytes(), zlib.crc32(header))
    return zlib.crc32(np.array([checksum], "uint32").tobytes())


@pytest.mark.parametrize("make", [keras.Variable, tf.Variable])
def test_dtype_shape_and_bytes_count(make):
    variable = make(VALUES)
    assert compute_checksum([variable]) == checksum_of_bytes(VALUES, b"float32 (2, 3)")
    half = make(VALUES, dtype="bfloat16")
    value = half.numpy()
    assert compute_checksum([half]) == checksum_of_bytes(value, b"bfloat16 (2, 3)")


def test_no_variable_is_copied():
    variable = keras.Variable(np.ones(1 << 20, "float32"))
    compute_checksum([variable])
    tracemalloc.start()
    try:
        compute_checksum([variable])
        _, peak = tracemalloc.get_traced_memory()
        # NumPy's memory is traced: a copy would be found.
        copy = variable.numpy()
        _, with_copy = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < copy.nbytes / 4
    assert with_copy >= copy.nbytes
