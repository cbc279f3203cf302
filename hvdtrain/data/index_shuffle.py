"""A permutation in constant memory: the shuffled index of one sample at a time.

The indices are cells of a grid of `rows` by `columns`. Each round of a Feistel network
adds a hash of the column to the row, then a hash of the new row to the column, both
modulo the size of the grid: each round is invertible, and so the network permutes the
cells. The grid has fewer than `rows` cells too many; an index that leaves the samples
is permuted again until it returns (cycle walking), which keeps the map a bijection.

Eight rounds reach all permutations of 5 and of 6 samples equally often. Where rows and
columns are odd and fill the grid, as for 9 samples, only even permutations are reached.

Sources: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002;
the hash is the finalizer of SplitMix64 (G. Steele et al., OOPSLA 2014). Grain's
`index_shuffle` serves the same purpose with another cipher.
"""

import math

import numpy as np

from hvdtrain.data.sample_functions import SampleFunctions

# Every constant is part of the order of the samples: a job that continues with other
# constants would read other samples.
_ROUNDS = 8
_MASK = (1 << 64) - 1
_HALF = np.uint64(32)
_INCREMENT = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def index_shuffle(
    indices: np.ndarray, *, num_samples: int, seed: int, epoch: int
) -> np.ndarray:
    """Return the images of indices under a permutation of 0 to `num_samples - 1`.

    Args:
        indices: int64, of any shape; 0 to `num_samples - 1`.
        num_samples: up to 2**62.
        seed: with `epoch`, selects the permutation; 0 or more.

    Returns:
        int64, of the shape of `indices`. The same under every version of NumPy.
    """
    rows = math.isqrt(num_samples - 1) + 1
    columns = -(-num_samples // rows)
    keys = _keys(seed, epoch)
    shuffled = indices.astype(np.uint64).ravel()
    if SampleFunctions.shuffle:
        count, words = shuffled.size, np.array(keys, np.uint64)
        sizes = num_samples, rows, columns
        SampleFunctions.shuffle(shuffled.ctypes, count, *sizes, words.ctypes, len(keys))
    else:
        _shuffle(shuffled, num_samples, rows, columns, keys)
    return shuffled.astype(np.int64).reshape(indices.shape)


def _shuffle(
    shuffled: np.ndarray, num_samples: int, rows: int, columns: int, keys: list[int]
) -> None:
    """Shuffle in place, as the native library does."""
    outside = np.arange(shuffled.size)
    while outside.size:
        shuffled[outside] = _permute(shuffled[outside], rows, columns, keys)
        outside = outside[shuffled[outside] >= num_samples]


def _permute(cells: np.ndarray, rows: int, columns: int, keys: list[int]) -> np.ndarray:
    row, column = np.divmod(cells, np.uint64(columns))
    for key in range(0, len(keys), 2):
        row = _add(row, column, keys[key], rows)
        column = _add(column, row, keys[key + 1], columns)
    return row * np.uint64(columns) + column


def _add(values: np.ndarray, others: np.ndarray, key: int, size: int) -> np.ndarray:
    """Return `values + hash(others)`, modulo `size`."""
    hashed = others + np.uint64(key)
    hashed *= np.uint64(_FACTORS[0])
    hashed ^= hashed >> _HALF
    hashed *= np.uint64(_FACTORS[1])
    # The upper half, scaled to 0 to size - 1: a multiplication takes a tenth of the
    # time of a remainder.
    hashed >>= _HALF
    hashed *= np.uint64(size)
    hashed >>= _HALF
    hashed += values
    # Unsigned: where `hashed` is less than `size`, the difference wraps around and is
    # the greater one.
    return np.minimum(hashed, hashed - np.uint64(size), out=hashed)


def _keys(seed: int, epoch: int) -> list[int]:
    state = _mix(_mix(seed + _INCREMENT) + epoch)
    return [_mix(state + number * _INCREMENT) for number in range(2 * _ROUNDS)]


def _mix(value: int) -> int:
    """Return the finalizer of SplitMix64 of an integer."""
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1])):
        value &= _MASK
        value = (value ^ value >> shift) * factor
    value &= _MASK
    return value ^ value >> 31
