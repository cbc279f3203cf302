"""Image data sets as files: npz and IDX, and the digests of MNIST.

IDX is the format of the original MNIST files (LeCun, Cortes, Burges): two zero bytes,
a type (8: unsigned byte), the number of dimensions, each dimension as a big-endian
32-bit number, then the values. The npz form has the array names of Keras' `mnist.npz`.
"""

import gzip
import hashlib
import math
import os
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import IO, TypeVar

import numpy as np

from hvdtrain.job.files import one_line_errors
from hvdtrain.job.world import JobError


class DataError(JobError, ValueError):
    """Bad or missing data. The message is one line: the reason and the remedy."""


Path = str | os.PathLike[str]
Contents = TypeVar("Contents")

IDX_NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
# MD5 of the original files, unpacked.
_MNIST_MD5 = {
    "x_train": "6bbc9ace898e44ae57da46a324031adb",
    "y_train": "a25bea736e30d166cdddb491f175f624",
    "x_test": "2646ac647ad5339dbf082846283269ea",
    "y_test": "27ae3e4e09519cfbb04c329615203637",
}
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,  # zipfile: encrypted, or an unknown compression
    MemoryError,  # a damaged header with too large a shape
    zipfile.BadZipFile,
    zlib.error,
)


def changed(path: Path) -> DataError:
    """Return the error of a file that was written to after the source was created."""
    return DataError(
        f"Received {path}, which has changed since the job has started; expected files "
        "that stay the same: start the job again."
    )


def read_directory(
    directory: Path, *, npz_pattern: str = "*.npz"
) -> dict[str, np.ndarray]:
    """Return x_train, y_train, x_test and y_test from a directory, as they are stored.

    Read the npz file if there is one, else the four IDX files, plain or `.gz`, named
    as the originals (`train-images-idx3-ubyte`) or with a dot before `idx`.

    Raises:
        DataError: nothing usable is there, or a file cannot be read.
    """
    directory = pathlib.Path(directory)
    names = _list_names(directory)
    archives = [name for name in names if pathlib.PurePath(name).match(npz_pattern)]
    if len(archives) > 1:
        raise DataError(
            f"Received {len(archives)} npz files in {directory}, {archives[0]} and "
            f"{archives[1]} among them; expected one: give each a directory of its own."
        )
    if archives:
        return _read(directory / archives[0], read_npz)
    paths = {
        key: directory / _find_idx(directory, names, key=key, npz=npz_pattern)
        for key in IDX_NAMES
    }
    return {key: _read(path, read_idx) for key, path in paths.items()}


def _list_names(directory: pathlib.Path) -> list[str]:
    with one_line_errors(
        f"use {directory} as data directory",
        remedy="expected a readable directory that holds the data set",
        raises=DataError,
    ):
        # File managers write hidden files. To open a pipe would block.
        return sorted(
            entry.name
            for entry in directory.iterdir()
            if not entry.name.startswith(".") and not entry.is_fifo()
        )


def _find_idx(directory: pathlib.Path, names: list[str], *, key: str, npz: str) -> str:
    # Images with channels have four dimensions; some copies of MNIST are named with a
    # dot instead of the dash.
    original = IDX_NAMES[key]
    for name in (original, original.replace("idx3", "idx4")):
        for variant in (name, name.replace("-idx", ".idx")):
            for suffix in ("", ".gz"):
                if variant + suffix in names:
                    return variant + suffix
    raise DataError(
        f"Received {directory} with neither {npz} nor {original}; expected the npz "
        "file, or the four IDX files, plain or .gz."
    )


def _read(path: pathlib.Path, reader: Callable[..., Contents]) -> Contents:
    with _reading(path):
        if path.is_dir():
            raise DataError(
                f"Received the directory {path}; expected a file of this name: move "
                "the directory away, or move the file out of it."
            )
        with open(path, "rb") as file:
            return reader(file, label=path)


def read_mnist(path: Path) -> dict[str, np.ndarray]:
    """Return the four arrays of an npz file that holds exactly MNIST."""
    arrays = _read(pathlib.Path(path), read_npz)
    check_mnist(arrays, label=path)
    return arrays


def _reading(label: Path) -> AbstractContextManager[None]:
    return one_line_errors(
        f"read {label}",
        errors=_UNREADABLE,
        remedy="expected a complete file that this user may read: fetch it again, or "
        "change its permissions",
        raises=DataError,
    )


def read_npz(file: IO[bytes], *, label: Path) -> dict[str, np.ndarray]:
    """Return the four arrays in an open npz file; `label` names it in errors."""
    with _reading(label):
        if file.read(2) != b"PK" or not zipfile.is_zipfile(file):
            raise ValueError("this is not an npz file, or not all of it")
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            missing = [key for key in IDX_NAMES if key not in archive]
            if missing:
                raise DataError(
                    f"Received {label} without {', '.join(missing)}; expected the "
                    f"arrays {', '.join(IDX_NAMES)}."
                )
            return {
                key: np.ascontiguousarray(_member(archive, key, label=label))
                for key in IDX_NAMES
            }


def _member(archive: np.lib.npyio.NpzFile, key: str, *, label: Path) -> np.ndarray:
    try:
        return archive[key]
    except ValueError as error:
        # NumPy raises the same exception for damaged members.
        if "Object arrays" not in str(error):
            raise
        raise DataError(
            f"Received {key} in {label} as an array of Python objects, which only "
            "pickle can read; expected uint8 images and integer labels: save it with "
            "such a dtype."
        ) from None


def read_idx(file: IO[bytes], *, label: Path) -> np.ndarray:
    """Return the array in an open IDX file, unpacked if `label` ends in `.gz`."""
    with _reading(label):
        content = file.read()
        if str(label).endswith(".gz"):
            content = gzip.decompress(content)
        kind, ndim = content[2:4] if len(content) >= 4 else (None, 0)
        start = 4 + 4 * ndim
        if content[:2] != b"\0\0" or not 1 <= ndim <= 4 or len(content) < start:
            raise ValueError("this is not an IDX file, or not all of it")
        if kind != 8:
            raise DataError(
                f"Received {label} with values of IDX type {kind}; expected unsigned "
                "bytes, type 8: convert it."
            )
        shape = struct.unpack(f">{ndim}I", content[4:start])
        if len(content) - start != math.prod(shape):
            raise ValueError(
                f"it holds {len(content) - start} bytes for the shape {shape}"
            )
        return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def check_mnist(arrays: Mapping[str, np.ndarray], *, label: Path) -> None:
    """Raise `DataError` unless the arrays hold exactly MNIST, by the MD5 of each."""
    for key, expected in _MNIST_MD5.items():
        digest = _idx_md5(arrays[key])
        if digest != expected:
            raise DataError(
                f"Received {key} in {label} with MD5 {digest}; expected {expected}, "
                "the MD5 of MNIST: fetch it again, or use the data set custom."
            )


def _idx_md5(array: np.ndarray) -> str:
    """Return the MD5 of an array of small integers in IDX form."""
    if array.dtype.kind not in "iu":
        return f"of no IDX file ({array.dtype})"
    header = struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape)
    digest = hashlib.md5(header, usedforsecurity=False)
    content = np.ascontiguousarray(array, dtype=np.uint8)
    # NumPy declares the buffer protocol from Python 3.12 on.
    digest.update(content)  # type: ignore[arg-type]
    return digest.hexdigest()
