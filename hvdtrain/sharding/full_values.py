"""Values of dense variables, of which each rank holds a part, on the chief and back."""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.objects import allgather_object
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.sharding.shards import get_sharding

# MPI counts elements in 32 bits, and each message is copied a few times.
_CHUNK_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Block:
    """Which elements of a dense variable a rank holds.

    Attributes:
        bounds: (start, stop) on each axis.
        start: the first element that it holds of this block, flattened.
        stop: the element after the last one.
    """

    bounds: tuple
    start: int
    stop: int

    @classmethod
    def of(cls, shape, sharding):
        """Returns that of a dense shape and a `Sharding`, None for all of it."""
        chain = []
        while sharding:
            chain.insert(0, sharding)
            sharding = sharding.within
        bounds = [(0, size) for size in shape]
        flat = None
        for each in chain:
            part = each.local_slice
            if each.shape is not None:
                flat = part
            else:
                start = bounds[each.axis][0]
                bounds[each.axis] = (start + part.start, start + part.stop)
        count = math.prod(stop - start for start, stop in bounds)
        flat = flat or slice(0, count)
        return cls(tuple(bounds), flat.start, flat.stop)

    @property
    def size(self):
        """Number of elements."""
        return self.stop - self.start

    def read(self, dense, start, stop):
        """Returns the elements [start, stop) of this block of a dense array."""
        return self._view(dense).flat[self.start + start : self.start + stop]

    def write(self, dense, start, values):
        """Writes elements of this block, from `start` on, into a dense array."""
        first = self.start + start
        self._view(dense).flat[first : first + len(values)] = values

    def _view(self, dense):
        # With the ellipsis also of a scalar a view.
        return dense[(*(slice(*bounds) for bounds in self.bounds), ...)]


def assemble(described, parts):
    """Returns the dense value of a variable.

    Args:
        described: the `FullVariable`.
        parts: list of `Block` and array, each the part of a rank; None for a rank
            without one.
    """
    parts = [(block, value) for block, value in parts if block is not None]
    block, value = parts[0]
    if block == Block.of(described.shape, None):
        return value
    dense = np.empty(described.shape, described.dtype)
    for block, value in parts:
        block.write(dense, 0, value.reshape(-1))
    return dense


@dataclasses.dataclass(frozen=True)
class FullVariable:
    """A variable of the dense model.

    Attributes:
        path: its path.
        shape: its shape.
        dtype: its dtype, as a string.
        variable: this rank's part of it, a Keras variable; None without one.
    """

    path: str
    shape: tuple
    dtype: str
    variable: object

    @classmethod
    def of(cls, variable):
        """Returns that of a Keras variable, which may be a part of it."""
        sharding, shape = get_sharding(variable), tuple(variable.shape)
        return cls(
            path=getattr(variable, "path", variable.name),
            shape=sharding.full_shape(shape) if sharding else shape,
            dtype=keras.backend.standardize_dtype(variable.dtype),
            variable=variable,
        )

    @property
    def is_full(self):
        """Whether every rank that has it holds all of it."""
        # A rank may hold all of an optimizer's slot, and others nothing of it.
        is_sharded = self.variable is not None and get_sharding(self.variable)
        return not is_sharded and self.block == Block.of(self.shape, None)

    def local_value(self):
        """Returns a copy of this rank's part as an array; None without one."""
        # On the CPU, numpy() of a variable may share its memory.
        return None if self.variable is None else np.array(self.variable.numpy())

    @property
    def block(self):
        """The `Block` that this rank holds; None without a variable."""
        if self.variable is None:
            return None
        return Block.of(self.shape, get_sharding(self.variable))


class FullValues:
    """Moves the values of dense variables to the chief and back. All ranks make it.

    Each moves in chunks, from and to the ranks that hold its parts.

    Args:
        variables: list of `FullVariable`, the same ones in the same order on all
            ranks of the job.
    """

    def __init__(self, variables):
        self.variables = list(variables)
        self._rank = global_process_set.rank()
        mine = [each.block for each in self.variables]
        self._blocks = allgather_object(mine, name="DenseBlocks")

    def gather(self, number):
        """Returns a copy of the value on the chief, None on others. A collective.

        Args:
            number: of the variable in the list.
        """
        described = self.variables[number]
        blocks = [each[number] for each in self._blocks]
        if blocks[0] == Block.of(described.shape, None):
            return described.local_value() if self._rank == 0 else None
        # Of the ranks that hold the same part, the first sends it.
        senders = {block: r for r, block in reversed(list(enumerate(blocks))) if block}
        sizes = [b.size if b and senders[b] == r else 0 for r, b in enumerate(blocks)]
        dense, local = None, np.zeros([0], described.dtype)
        if self._rank == 0:
            dense = np.empty(described.shape, described.dtype)
        if sizes[self._rank]:
            local = described.variable.numpy().reshape(-1)
        for start, stop in self._chunks(described, sizes):
            splits = [0] * len(blocks)
            splits[0] = len(local[start:stop])
            for rank, values in enumerate(_exchange([local[start:stop]], splits)):
                if len(values):
                    blocks[rank].write(dense, start, values)
        return dense

    def scatter(self, number, dense):
        """Assigns to each rank its part of a value of the chief. A collective.

        Args:
            number: of the variable in the list.
            dense: a NumPy array on the chief; not used elsewhere.
        """
        described = self.variables[number]
        blocks = [each[number] for each in self._blocks]
        sizes = [block.size if block else 0 for block in blocks]
        local = np.empty([sizes[self._rank]], described.dtype)
        for start, stop in self._chunks(described, sizes):
            parts = []
            if self._rank == 0:
                ends = [min(stop, size) for size in sizes]
                parts = [
                    block.read(dense, start, max(start, end)) if block else local[:0]
                    for block, end in zip(blocks, ends, strict=True)
                ]
            splits = [len(part) for part in parts] or [0] * len(blocks)
            values, *_ = _exchange(parts or [local[:0]], splits)
            local[start : start + len(values)] = values
        if described.variable is not None:
            described.variable.assign(local.reshape(described.variable.shape))

    def _chunks(self, described, sizes):
        """Yields (start, stop) of the elements of each rank that move together."""
        bytes_each = np.dtype(described.dtype).itemsize
        step = max(1, _CHUNK_BYTES // bytes_each // len(sizes))
        for start in range(0, max(sizes), step):
            yield start, start + step


def _exchange(parts, splits):
    """Returns what each rank has sent to this one, as arrays."""
    sent = np.concatenate(parts)
    received, counts = transport.alltoall(
        tf.constant(sent), tf.constant(splits, tf.int32), name="FullValues"
    )
    ends = np.cumsum(counts.numpy())
    return np.split(received.numpy(), ends[:-1])
