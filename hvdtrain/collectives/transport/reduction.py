"""The options of a reduction as one value."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd

from hvdtrain.collectives.dtypes import Compression
from hvdtrain.collectives.process_sets import global_process_set

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
        prescale_factor: multiplies the inputs.
        postscale_factor: multiplies the results.
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
    process_set: hvd.ProcessSet = global_process_set

    def __post_init__(self) -> None:
        check_compression(self.compression)

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], **fields: Any) -> "Reduction":
        """Make a reduction of the arguments of a function with Horovod's signature.

        `arguments` is `locals()` at the start of the function, of which only fields are
        used. `fields` take precedence.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        same = {name: arguments[name] for name in names & arguments.keys()}
        return cls(**{**same, **fields})

    @property
    def factor(self) -> float:
        """The product of both factors."""
        return self.prescale_factor * self.postscale_factor

    def describe(self) -> str:
        """Return what ranks must agree on, as text."""
        factors = (self.prescale_factor, self.postscale_factor)
        scaled = "" if factors == (1.0, 1.0) else f" scaled by {factors}"
        return op_name(self.op) + scaled
