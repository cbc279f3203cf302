"""Formats of files of predictions. A file has the columns of one part, as arrays."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.sources.source import load_library
from hvdtrain.job import JobError

NUMBER = "number"  # The column of a sample's number in the source.
Columns = dict[str, np.ndarray]
Writer = Callable[[pathlib.Path, Columns], None]


def as_columns(outputs: Any, batch: Any) -> Columns:
    """Return a model's outputs for a batch by name; bfloat16 as float32.

    Raises:
        JobError: an output does not have one value for each sample.
    """
    columns: Columns = {}
    count = tf.nest.flatten(batch)[0].shape[0]
    for keys, value in keras.tree.flatten_with_path(outputs):
        prefix = [] if keys and isinstance(keys[0], str) else ["output"]
        name = "_".join(map(str, [*prefix, *keys]))
        shape, is_dense = getattr(value, "shape", ()), isinstance(value, tf.Tensor)
        if not is_dense or shape[:1] != (count,) or name in (NUMBER, *columns):
            raise JobError(
                f"Received the output {name}, {type(value).__name__} of shape {shape} "
                f"for {count} samples; expected a name of its own other than {NUMBER}, "
                f"and a dense tensor of shape ({count}, ...): change the model or its "
                "predict_step."
            )
        is_short = value.dtype == tf.bfloat16
        columns[name] = (tf.cast(value, tf.float32) if is_short else value).numpy()
    return columns


def describe(columns: Columns) -> dict[str, str]:
    """Return the dtype and shape of a sample's outputs."""
    return {n: f"{c.dtype.name}{list(c.shape[1:])}" for n, c in columns.items()}


def _write_parquet(path: pathlib.Path, columns: Columns) -> None:
    """Write one row group. Each axis of a sample is a list of fixed size."""
    arrow = load_library("pyarrow", "parquet")

    def column(values: np.ndarray) -> Any:
        result = arrow.array(values.reshape(-1))
        for size in reversed(values.shape[1:]):
            result = arrow.FixedSizeListArray.from_arrays(result, size)
        return result

    table = arrow.table({name: column(values) for name, values in columns.items()})
    load_library("pyarrow.parquet", "parquet").write_table(table, path)


def _write_npy(path: pathlib.Path, columns: Columns) -> None:
    """Write the output; several of them as the fields of a structured array."""
    outputs = {name: columns[name] for name in columns if name != NUMBER}
    fields = [(name, a.dtype, a.shape[1:]) for name, a in outputs.items()]
    rows = np.empty(len(columns[NUMBER]), fields)
    for name, values in outputs.items():
        rows[name] = values
    np.save(path, rows if len(outputs) > 1 else values)


def _write_tfrecord(path: pathlib.Path, columns: Columns) -> None:
    """Write a `tf.train.Example` of each sample, whose features are flat."""
    count = len(columns[NUMBER])
    flat, kinds = {}, {"O": ("bytes_list", "O"), "f": ("float_list", "float32")}
    for name, column in columns.items():
        field, dtype = kinds.get(column.dtype.kind, ("int64_list", "int64"))
        flat[name, field] = column.reshape(count, -1).astype(dtype)
    with tf.io.TFRecordWriter(str(path)) as file:
        for row in range(count):
            example = tf.train.Example()
            for (name, field), values in flat.items():
                getattr(example.features.feature[name], field).value.extend(values[row])
            # The bytes of a map have no order otherwise.
            file.write(example.SerializePartialToString(deterministic=True))


# By suffix: the function, and the characters of NumPy's dtypes that it can write. A
# feature of an Example has floats of 32 bits, and signed integers of 64.
FORMATS: Mapping[str, tuple[Writer, str]] = {
    ".parquet": (_write_parquet, "?bhilqBHILQefdO"),
    ".npy": (_write_npy, "?bhilqBHILQefdFD"),
    ".tfrecord": (_write_tfrecord, "?bhilqBHIefO"),
}


def check(suffix: str, columns: Columns) -> None:
    """Raise `JobError` unless files of this suffix can hold the outputs."""
    if suffix == ".parquet":
        load_library("pyarrow.parquet", "parquet")
    for name, column in columns.items():
        if column.dtype.char not in FORMATS[suffix][1] or 0 in column.shape:
            raise JobError(
                f"Received the output {name}, {describe(columns)[name]}, for {suffix} "
                "files; expected values of a dtype that they hold: cast it, or choose "
                "another suffix."
            )
