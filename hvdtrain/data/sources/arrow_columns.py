"""Columns of Arrow tables as values for batches: numbers, bytes, and lists of numbers.

Types of Arrow that read as the same values have one name here: text and binary columns
are "bytes", with 32-bit or 64-bit offsets, and encoded by a dictionary or not.
"""

from typing import Any

import numpy as np

from hvdtrain.data.formats import DataError
from hvdtrain.data.sources.source import load_library

SUPPORTED = "numbers, booleans, text, binary values and lists of numbers"


class ArrowColumns:
    """Converts the columns of Arrow tables.

    Args:
        extra: the extra that installs pyarrow.

    Raises:
        DataError: pyarrow is not installed.
    """

    def __init__(self, extra: str) -> None:
        self._pa = load_library("pyarrow", extra)

    def name_of_type(self, dtype: Any) -> str | None:
        """Return the name of a type of Arrow; None if columns of it cannot be read."""
        if self._is(dtype, "boolean", "integer", "floating"):
            return str(dtype)
        if self._is(dtype, "dictionary"):
            return self.name_of_type(dtype.value_type)
        if self._is_bytes(dtype):
            return "bytes"
        if self._is_list(dtype):
            values = self.name_of_type(dtype.value_type)
            return None if values in (None, "bytes") else f"list of {values}"
        return None

    def convert(self, column: Any, *, label: str) -> Any:
        """Return the values of a column, of which `take` returns some.

        Args:
            column: a chunked array.
            label: the column and where it is stored, for errors.

        Raises:
            DataError: there are nulls, or the lists differ in length.
        """
        pa = self._pa
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if self._is_bytes(column.type):
            # Offsets of 32 bits cannot address a row group of more than 2 GB.
            column = column.cast(pa.large_binary())
        return self._convert(column.combine_chunks(), label)

    def take(self, values: Any, rows: np.ndarray) -> np.ndarray:
        """Return some values of a column that `convert` returned.

        Returns:
            An array of shape (rows, ...); of objects for bytes.
        """
        if isinstance(values, np.ndarray):
            return values[rows]
        return values.take(self._pa.array(rows)).to_numpy(zero_copy_only=False)

    def _convert(self, array: Any, label: str) -> Any:
        if array.null_count:
            raise DataError(
                f"Received {array.null_count} nulls in {label}; expected a value in "
                "each row: fill or drop them."
            )
        if self._is_bytes(array.type):
            # Stays in Arrow's form: an object of Python for each value takes several
            # times the memory.
            return array
        if not self._is_list(array.type):
            return array.to_numpy(zero_copy_only=False)
        items = self._convert(array.flatten(), label)
        lengths = np.unique(self._lengths(array))
        if len(lengths) > 1:
            raise DataError(
                f"Received lists of {lengths[0]} to {lengths[-1]} values in {label}; "
                "expected one length for all rows: pad them, or leave the column out."
            )
        return items.reshape(len(array), lengths[0], *items.shape[1:])

    def _lengths(self, array: Any) -> np.ndarray:
        if self._pa.types.is_fixed_size_list(array.type):
            return np.array([array.type.list_size])
        return np.diff(array.offsets.to_numpy())

    def _is_bytes(self, dtype: Any) -> bool:
        return self._is(
            dtype,
            "string",
            "binary",
            "large_string",
            "large_binary",
            "fixed_size_binary",
        )

    def _is_list(self, dtype: Any) -> bool:
        return self._is(dtype, "list", "large_list", "fixed_size_list")

    def _is(self, dtype: Any, *kinds: str) -> bool:
        return any(getattr(self._pa.types, f"is_{kind}")(dtype) for kind in kinds)
