"""Which dtypes Horovod's operations can move and reduce, and how others are carried."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

# Dtypes that Horovod lacks are moved as the bits of another one: an allgather, a
# broadcast and an alltoall do no arithmetic.
_CARRIERS = {
    tf.bfloat16: tf.uint16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
    tf.complex64: tf.int64,
}
_MOVABLE = (
    tf.bool,
    tf.uint8,
    tf.int8,
    tf.uint16,
    tf.int16,
    tf.int32,
    tf.int64,
    tf.float16,
    tf.float32,
    tf.float64,
)
# Integers of eight bytes that each rank sends in the first exchange of bytes of unknown
# lengths: 4 KB, less where those of all ranks would be more than 256 KB.
_HEAD_WORDS, _LEAST_HEAD_WORDS, _WORDS_OF_ALL = 512, 32, 2**15
# Horovod adds no bfloat16: `transport` adds it in float32.
_SCATTERABLE = (
    *(tf.int32, tf.int64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
)
_REDUCIBLE = (tf.uint8, tf.int8, *_SCATTERABLE)
_ADASUM = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class BF16Compressor(hvd.compression.Compressor):
    """Casts floating point tensors to bfloat16: float32's range, half its bytes."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.DType]:
        """Round `tensor` to bfloat16; return it and its original dtype."""
        if tensor.dtype.is_floating:
            return tf.cast(tensor, tf.bfloat16), tensor.dtype
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: tf.DType) -> tf.Tensor:
        """Restore the dtype that `compress` returned as `ctx`."""
        return tf.cast(tensor, ctx)


class Compression(hvd.Compression):
    """Horovod's compressors (`none`, `fp16`) and `bf16`."""

    bf16 = BF16Compressor


# What `tf.convert_to_tensor` takes: arrays, numbers, tensors, variables, nested lists.
TensorLike = Any


def set_local_shard(variable: keras.Variable, shard: keras.Variable) -> None:
    """Record the flat `shard` of which layers see the full value as `variable`."""
    variable._hvdtrain_local_shard = shard


def local_shard(variable: Any) -> Any:
    """Return the variable that this rank stores for a fully sharded weight.

    `parallel.fully_shard` gives a weight such a flat shard. Any other variable is
    returned as it is.
    """
    return getattr(variable, "_hvdtrain_local_shard", variable)


def as_tensorflow(
    value: TensorLike | keras.Variable,
) -> tf.Tensor | tf.IndexedSlices | tf.Variable:
    """Return the TensorFlow object behind `value`; a tensor of anything else.

    Of a fully sharded weight, it is this rank's shard.
    """
    if isinstance(value, keras.Variable):
        return local_shard(value).value
    if isinstance(value, tf.IndexedSlices | tf.Variable | tf.Tensor):
        return value
    return tf.convert_to_tensor(value)


def mark_internal(variable: tf.Variable) -> tf.Variable:
    """Mark a variable of the package, which is no state of a training; return it."""
    variable._hvdtrain_internal = True
    return variable


def is_internal(variable: tf.Variable) -> bool:
    """Return whether `mark_internal` was called for a variable."""
    return hasattr(variable, "_hvdtrain_internal")


def as_tensors(values: Iterable[TensorLike | keras.Variable]) -> list[tf.Tensor]:
    """Return the dense tensors of a list of tensor-compatible values."""
    return [tf.convert_to_tensor(as_tensorflow(value)) for value in values]


def buckets(values: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[list[int]]:
    """Return one list of indices into `values` for each (sparse, dtype) among them."""
    indices_by_key: dict[tuple[bool, tf.DType], list[int]] = {}
    for index, value in enumerate(values):
        key = (isinstance(value, tf.IndexedSlices), value.dtype)
        indices_by_key.setdefault(key, []).append(index)
    return list(indices_by_key.values())


def to_carrier(tensor: tf.Tensor) -> tf.Tensor:
    """Return `tensor` in a dtype that Horovod can move, with the same bits.

    Raises:
        TypeError: for a dtype without such a counterpart, such as strings.
    """
    if tensor.dtype in _CARRIERS:
        return tf.bitcast(tensor, _CARRIERS[tensor.dtype])
    _check_dtype(tensor, (*_MOVABLE, *_CARRIERS), "be moved between ranks")
    return tensor


def from_carrier(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Undo `to_carrier`: return `tensor` in `dtype`, with the same bits."""
    return tf.bitcast(tensor, dtype) if dtype in _CARRIERS else tensor


def map_values(
    function: Callable[[tf.Tensor], tf.Tensor], value: tf.Tensor | tf.IndexedSlices
) -> tf.Tensor | tf.IndexedSlices:
    """Return a dense or sparse tensor with a function applied to its values."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(
            function(value.values), value.indices, value.dense_shape
        )
    return function(value)


def scaled(
    tensor: tf.Tensor, factor: float, divisor: tf.Tensor | None = None
) -> tf.Tensor:
    """Return `tensor * factor / divisor` in the dtype of `tensor`.

    Integers are scaled in float64 and truncated, 16-bit floats in float32: a loss scale
    overflows float16 although the product does not.
    """
    if factor != 1.0:
        check_reducible(tensor)
    elif divisor is None:
        return tensor
    is_short = tensor.dtype.is_floating and tensor.dtype.size <= 4
    wide = tf.cast(tensor, tf.float32 if is_short else tf.float64) * factor
    return tf.cast(wide if divisor is None else wide / divisor, tensor.dtype)


def pack_head(data: bytes, ranks: int) -> np.ndarray:
    """Return the beginning of `data` with its length, as integers, for `unpack_heads`.

    All ranks of a job return equally many.
    """
    words = min(_HEAD_WORDS, max(_LEAST_HEAD_WORDS, _WORDS_OF_ALL // ranks))
    head = np.zeros(1 + words, np.int64)
    # Of a rank that has joined, a sum has zeros.
    head[0] = len(data) + 1
    short = data[: 8 * words]
    head[1:].view(np.uint8)[: len(short)] = np.frombuffer(short, np.uint8)
    return head


def unpack_heads(heads: np.ndarray) -> tuple[np.ndarray, list[bytes]]:
    """Return lengths, and the data of all ranks unless one's is longer than its head.

    Args:
        heads: of all ranks, one row for each.
    """
    lengths, content = heads[:, 0] - 1, heads[:, 1:].copy().view(np.uint8)
    if lengths.min() < 0 or lengths.max() > content.shape[1]:
        return lengths, []
    return lengths, [row[:n].tobytes() for row, n in zip(content, lengths, strict=True)]


def split_bytes(content: tf.Tensor, lengths: np.ndarray) -> list[bytes]:
    """Return byte strings of these lengths from their concatenation, a uint8 tensor."""
    data, ends = content.numpy().tobytes(), np.cumsum(lengths)
    return [data[end - n : end] for n, end in zip(lengths, ends, strict=True)]


def check_has_rows(tensor: tf.Tensor) -> None:
    """Raise a ValueError for a scalar: it has no axis to gather or split."""
    if tensor.shape.rank == 0:
        raise ValueError(
            "Ranks gather and exchange rows: a tensor needs one axis or more. Received "
            "a scalar; pass tf.reshape(value, [1])."
        )


def check_reducible(tensor: tf.Tensor) -> None:
    """Raise a TypeError unless an allreduce supports `tensor`'s dtype."""
    _check_dtype(tensor, _REDUCIBLE, "be reduced over ranks")


def check_scatterable(tensor: tf.Tensor) -> None:
    """Raise a TypeError unless a reducescatter supports `tensor`'s dtype."""
    _check_dtype(tensor, _SCATTERABLE, "be reduced and scattered over ranks")


def check_adasum(tensor: tf.Tensor) -> None:
    """Raise a TypeError unless Adasum supports `tensor`'s dtype."""
    _check_dtype(tensor, _ADASUM, "be reduced with op=hvd.Adasum")


def _check_dtype(
    tensor: tf.Tensor, supported: Iterable[tf.DType], purpose: str
) -> None:
    if tensor.dtype not in supported:
        names = ", ".join(dtype.name for dtype in supported)
        raise TypeError(
            f"A tensor of dtype {tensor.dtype.name} cannot {purpose}. Cast it to one "
            f"of {names}."
        )
