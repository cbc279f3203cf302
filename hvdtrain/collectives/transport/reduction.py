"""The options of a reduction as one value."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.collectives import dtypes
from hvdtrain.collectives.dtypes import Compression
from hvdtrain.collectives.process_sets import (
    ProcessSet,
    global_process_set,
    size_of,
)

Average, Sum, Adasum = hvd.Average, hvd.Sum, hvd.Adasum
Min, Max, Product = hvd.Min, hvd.Max, hvd.Product
_OP_NAMES = {
    getattr(hvd, name): name
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")
}


def op_name(op: object) -> str:
    """Return Horovod's name of a reduction operation; `op` itself is a number."""
    return _OP_NAMES.get(op, str(op))


def check_compression(compression: object) -> None:
    """Raise a ValueError for anything but a compressor of `hvd.Compression`."""
    if not hasattr(compression, "compress") or not hasattr(compression, "decompress"):
        raise ValueError(
            "compression must be one of hvd.Compression.none, fp16 and bf16, or a "
            f"class with the same methods. Received: {compression!r}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """How tensors are reduced over ranks.

    Attributes:
        op: `Average`, `Sum`, `Adasum`, `Min`, `Max` or `Product`.
        prescale_factor: multiplies the inputs before they are compressed.
        postscale_factor: multiplies the decompressed results.
        compression: the compressor of dense tensors, one of `Compression`.
        device_dense: device of the reduction of dense tensors; "" is the default.
        device_sparse: the same for `tf.IndexedSlices`.
    """

    op: object = Average
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: type[hvd.compression.Compressor] = Compression.none
    device_dense: str = ""
    device_sparse: str = ""
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        _check_op(self.op, self.process_set)
        check_compression(self.compression)
        for name in ("prescale_factor", "postscale_factor"):
            # Ranks compare the text of factors, which numbers of NumPy would change.
            object.__setattr__(self, name, _as_float(name, getattr(self, name)))

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], **fields: Any) -> "Reduction":
        """Make a reduction of the arguments of a function with Horovod's signature.

        `arguments` is `locals()` at the start of the function, of which only fields are
        used. `fields` take precedence.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        same = {name: arguments[name] for name in names & arguments.keys()}
        return cls(**{**same, **fields})

    def prepare(
        self, values: Sequence[tf.Tensor | tf.IndexedSlices]
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices], list[Any]]:
        """Return what is sent for `values`, and what `finish` needs.

        Factors apply here and in `finish` alone, in the precision of `dtypes.scaled`,
        so that they do not depend on which operation reduces the tensors.
        """
        scale = functools.partial(dtypes.scaled, factor=self.prescale_factor)
        scaled = [dtypes.map_values(scale, value) for value in values]
        # Horovod compresses dense tensors only, too.
        pairs = [
            (value, None) if is_sparse(value) else self.compression.compress(value)
            for value in scaled
        ]
        return [sent for sent, _ in pairs], [context for _, context in pairs]

    def finish(
        self, results: Sequence[tf.Tensor | tf.IndexedSlices], contexts: Sequence[Any]
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Return the results of a reduction of what `prepare` has returned."""
        return [
            dtypes.map_values(
                self._finish_values,
                result
                if is_sparse(result)
                else self.compression.decompress(result, context),
            )
            for result, context in zip(results, contexts, strict=True)
        ]

    def _finish_values(self, values: tf.Tensor) -> tf.Tensor:
        divides = self.op != self.operation(values.dtype)
        divisor = size_of(self.process_set, tf.float64) if divides else None
        return dtypes.scaled(values, self.postscale_factor, divisor)

    def operation(self, dtype: tf.DType) -> object:
        """Return the op by which tensors of `dtype` are reduced, before `finish`.

        `finish` divides sums of integers, which are then truncated only once.
        """
        is_mean_of_integers = self.op == Average and not dtype.is_floating
        return Sum if is_mean_of_integers else self.op

    def describe(self) -> str:
        """Return what ranks must agree on, as text."""
        factors = (self.prescale_factor, self.postscale_factor)
        scaled = "" if factors == (1.0, 1.0) else f" scaled by {factors}"
        return op_name(self.op) + scaled


def is_sparse(value: object) -> bool:
    """Return whether a value is `tf.IndexedSlices`."""
    return isinstance(value, tf.IndexedSlices)


def _as_float(name: str, factor: Any) -> float:
    try:
        return float(factor)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a number. Received: {factor!r}. Multiply the tensor by a "
            "factor that is a tensor of a tf.function."
        ) from None


def _check_op(op: object, process_set: ProcessSet) -> None:
    if op not in _OP_NAMES:
        names = ", ".join(f"hvd.{name}" for name in _OP_NAMES.values())
        raise ValueError(f"op must be one of {names}. Received: op={op!r}")
    if op == Adasum:
        _check_adasum(process_set)


def _check_adasum(process_set: ProcessSet) -> None:
    # Horovod blocks over another set, and MPI aborts for another number of ranks.
    if process_set.process_set_id != 0:
        received = f"a process set of ranks {process_set.ranks}"
    elif not hvd.mpi_enabled():
        received = "a job that was started with Gloo"
    elif hvd.size() & (hvd.size() - 1):
        received = f"{hvd.size()} ranks"
    else:
        return
    raise ValueError(
        "op=hvd.Adasum reduces over all ranks of a job under MPI, whose number is a "
        f"power of two. Received: {received}. Use op=hvd.Average."
    )
