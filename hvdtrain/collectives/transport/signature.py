"""What all ranks must agree on in one collective, checked while it is negotiated.

Horovod matches the tensors of a group by "i of n" in their names and reports the
status of the last one alone. Without a check, lists of different lengths wait for each
other until the stall limit, and a shape that differs before the last tensor returns
uninitialized memory. So the first of Horovod's operations in a collective is a group
of two, whatever is reduced or gathered, and the second tensor is a guard: it has no
elements, and its shape holds a checksum of the signature and the calling thread's
number. Ranks whose signatures differ fail in the negotiation, at once and all of them.
Where ranks share memory they compare the checksum there, before the negotiation.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.collectives import graph, threads


@dataclasses.dataclass(frozen=True)
class Signature:
    """Dtypes and shapes of the tensors of one collective, and what is done to them.

    Attributes:
        kind: the collective, with the options on which ranks must agree.
        has_free_rows: whether the length of the first axis may differ by rank.
    """

    kind: str
    tensors: Sequence[tf.Tensor | tf.IndexedSlices]
    has_free_rows: bool = False

    @property
    def operation(self) -> str:
        """The collective without its options, such as "broadcast"."""
        word = self.kind.replace(",", " ").split()[0]
        # The kind of an allreduce is the name of what it computes, such as "Sum".
        return word if word.islower() else "allreduce"

    def guard(self, dtype: tf.DType) -> tf.Tensor:
        """Return the guard: an empty tensor of `dtype`, compared by its shape.

        It also prevents constant folding of its group: see
        `graph.block_constant_folding`. A select without elements costs nothing.
        """
        shape = [0, len(self.tensors), self.checksum(), threads.number_variable()]
        guard = tf.zeros(shape, dtype)
        return graph.block_constant_folding(guard)

    def checksum(self) -> tf.Tensor:
        """Return the checksum as a scalar, int64, 0 to 2**31 - 2."""
        # A rank that knows a shape at trace time and one that does not must find the
        # same checksum: both hash the same text.
        texts = [self.kind, *(self._text(tensor) for tensor in self.tensors)]
        is_static = all(isinstance(text, str) for text in texts)
        joined = ";".join(texts) if is_static else tf.strings.join(texts, ";")
        return tf.strings.to_hash_bucket_fast(joined, 2**31 - 1)

    def describe(self) -> str:
        """Return the signature as one line of text for an error message."""
        return _line(self.kind, list(map(_description, self.tensors)))

    def lines(self) -> str:
        """Return the kind, then a line of each tensor: see `name_difference`.

        A line has what ranks must agree on, a tab, and what users see. Eagerly only.
        """
        tensors = [f"{self._text(t)}\t{_description(t)}" for t in self.tensors]
        return "\n".join([self.kind, *tensors])

    def _text(self, tensor: tf.Tensor | tf.IndexedSlices) -> str | tf.Tensor:
        if isinstance(tensor, tf.IndexedSlices):
            header = f"sparse {tensor.values.dtype.name} {tensor.indices.dtype.name}"
            return _shape_text(header, tensor.values, free_axes=1)
        free_axes = 1 if self.has_free_rows else 0
        return _shape_text(tensor.dtype.name, tensor, free_axes=free_axes)


def name_difference(texts: list[str]) -> list[str]:
    """Return a line for each rank's `Signature.lines()`: its first tensor that differs.

    A list of up to four tensors is shown completely.
    """
    kinds: list[str] = []
    lists: list[list[list[str]]] = []
    for kind, *tensors in map(str.splitlines, texts):
        kinds.append(kind)
        lists.append([line.split("\t") for line in tensors])
    compared = [[compared for compared, _ in tensors] for tensors in lists]
    texts_by_rank = itertools.zip_longest(*compared)
    first = next(
        (n for n, texts in enumerate(texts_by_rank) if len({*texts}) > 1), None
    )
    return [
        _line(kind, [shown for _, shown in tensors], first)
        for kind, tensors in zip(kinds, lists, strict=True)
    ]


def _line(kind: str, tensors: list[str], first: int | None = None) -> str:
    if len(tensors) <= 4:
        return f"{kind} of {', '.join(tensors)}"
    if first is None:
        return f"{kind} of {', '.join(tensors[:4])} and {len(tensors) - 4} more"
    shown = tensors[first] if first < len(tensors) else "none"
    return f"{kind} of {len(tensors)} tensors, number {first} (from 0): {shown}"


def _shape_text(header: str, tensor: tf.Tensor, *, free_axes: int) -> str | tf.Tensor:
    if tensor.shape.rank is not None:
        sizes = tensor.shape[free_axes:]
        if sizes.is_fully_defined():
            return f"{header} {','.join(map(str, sizes))}"
    sizes = tf.shape(tensor, out_type=tf.int64)[free_axes:]
    text = tf.strings.reduce_join(tf.strings.as_string(sizes), separator=",")
    return tf.strings.join([f"{header} ", text])


def _description(tensor: tf.Tensor | tf.IndexedSlices) -> str:
    if isinstance(tensor, tf.IndexedSlices):
        return f"IndexedSlices of {_description(tensor.values)}"
    sizes = "[...]" if tensor.shape.rank is None else list(tensor.shape)
    return f"{tensor.dtype.name}{sizes}"
