"""Gather full values of sharded variables on the chief, and scatter them back.

Files of models and checkpoints hold full values; rank 0, the chief, reads and writes
them. `FullVariable` describes a variable of the full model and has this rank's shard.
`Block` says which elements of the full array a shard has. `FullValues` moves values,
in chunks, so that messages stay small however large a variable is:

    values = FullValues(map(FullVariable.of, variables))    # on all ranks
    full = values.gather(0)       # an array on the chief, None on other ranks
    values.scatter(0, full)       # assigns its shard on each rank
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.collectives.dtypes import local_shard
from hvdtrain.collectives.objects import allgather_object, exchange_arrays
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.sharding.shards import Shape, Sharding, get_sharding

# MPI counts elements in 32 bits, and each message is copied a few times.
_CHUNK_BYTES = 64 << 20
# Smaller arrays are kept in memory: a file for each would be slow.
_LEAST_FILE_BYTES = 1 << 20
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Block:
    """The elements of a full array that a rank holds.

    Attributes:
        bounds: (start, stop) on each axis.
        start: first element of the rank, in the flattened array of these bounds.
        stop: the element after the last one.
    """

    bounds: tuple[tuple[int, int], ...]
    start: int
    stop: int

    @classmethod
    def of(cls, shape: Shape, sharding: Sharding | None) -> "Block":
        """Return the block of a shard; without a sharding, all of the full shape."""
        shardings: list[Sharding] = []
        while sharding:
            shardings.insert(0, sharding)
            sharding = sharding.within
        bounds = [(0, size) for size in shape]
        flat = None
        for outer_first in shardings:
            local = outer_first.local_slice
            if outer_first.shape is not None:
                flat = local
            else:
                start = bounds[outer_first.axis][0]
                bounds[outer_first.axis] = (start + local.start, start + local.stop)
        count = math.prod(stop - start for start, stop in bounds)
        flat = flat or slice(0, count)
        return cls(tuple(bounds), flat.start, flat.stop)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def read(self, full: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return elements `start` to `stop` of this block of a full array."""
        return self._view(full).flat[self.start + start : self.start + stop]

    def write(self, full: np.ndarray, start: int, values: np.ndarray) -> None:
        """Write elements of this block, from `start` on, into a full array."""
        first = self.start + start
        self._view(full).flat[first : first + len(values)] = values

    def _view(self, full: np.ndarray) -> np.ndarray:
        # Without the ellipsis, the index of a scalar would return a copy.
        index: tuple[Any, ...] = (*(slice(*bounds) for bounds in self.bounds), ...)
        return full[index]


@dataclasses.dataclass(frozen=True)
class FullVariable:
    """A variable of the full model; `variable` is None on a rank without a shard."""

    path: str
    shape: Shape
    dtype: str
    variable: keras.Variable | None

    @classmethod
    def of(cls, variable: keras.Variable) -> "FullVariable":
        """Describe the full variable; `variable` may be a shard of it."""
        variable = local_shard(variable)
        sharding, shape = get_sharding(variable), tuple(variable.shape)
        return cls(
            path=getattr(variable, "path", variable.name),
            shape=sharding.full_shape(shape) if sharding else shape,
            dtype=keras.backend.standardize_dtype(variable.dtype),
            variable=variable,
        )

    @property
    def is_full(self) -> bool:
        """Whether every rank that holds elements of it holds all of them."""
        # One rank may hold all of a slot while the others hold nothing of it: then the
        # variable has a sharding, and its block is full.
        is_sharded = self.variable is not None and get_sharding(self.variable)
        return not is_sharded and self.block == Block.of(self.shape, None)

    def local_value(self) -> np.ndarray | None:
        """Return a copy of this rank's shard; None without one."""
        # On the CPU, numpy() of a variable may share its memory.
        return None if self.variable is None else np.array(self.variable.numpy())

    @property
    def block(self) -> Block | None:
        """The `Block` that this rank holds; None without a variable."""
        if self.variable is None:
            return None
        return Block.of(self.shape, get_sharding(self.variable))


def assemble(
    described: FullVariable,
    shards_by_rank: Iterable[tuple[Block | None, np.ndarray | None]],
) -> np.ndarray:
    """Return the full value of a variable, of the blocks and shards of all ranks."""
    shards = [
        (block, value)
        for block, value in shards_by_rank
        if block is not None and value is not None
    ]
    block, value = shards[0]
    if block == Block.of(described.shape, None):
        return value
    full = np.empty(described.shape, described.dtype)
    for block, value in shards:
        block.write(full, 0, value.reshape(-1))
    return full


class FullValues:
    """Moves full values of variables to the chief and back.

    All ranks construct it together, and call its methods together.

    Args:
        variables: `FullVariable`s, the same ones in the same order on all ranks.
        directory: where the chief keeps the values of sharded variables, in a file
            without a name; by default in memory.
    """

    def __init__(
        self,
        variables: Iterable[FullVariable],
        *,
        directory: pathlib.Path | None = None,
    ) -> None:
        self.variables = list(variables)
        self._directory = directory
        self._rank = global_process_set.rank()
        local_blocks = [variable.block for variable in self.variables]
        self._blocks_by_rank: list[list[Block | None]] = allgather_object(
            local_blocks, name="DenseBlocks"
        )

    def gather(self, number: int) -> np.ndarray | None:
        """Return the full value on the chief, a copy; None on others. A collective."""
        described = self.variables[number]
        blocks = [blocks[number] for blocks in self._blocks_by_rank]
        if blocks[0] == Block.of(described.shape, None):
            return described.local_value() if self._rank == 0 else None
        # Of the ranks that hold the same block, only the first sends it.
        senders = {block: r for r, block in reversed(list(enumerate(blocks))) if block}
        sizes = [b.size if b and senders[b] == r else 0 for r, b in enumerate(blocks)]
        full, local = None, np.zeros([0], described.dtype)
        if self._rank == 0:
            full = self._allocate(number)
        if described.variable is not None and sizes[self._rank]:
            local = described.variable.numpy().reshape(-1)
        for start, stop in self._chunks(described, sizes):
            splits = [0] * len(blocks)
            splits[0] = len(local[start:stop])
            received = exchange_arrays([local[start:stop]], splits, name="FullValues")
            for rank, values in enumerate(received):
                block = blocks[rank]
                if len(values) and block is not None and full is not None:
                    block.write(full, start, values)
        return full

    def scatter(self, number: int, full: np.ndarray | None) -> None:
        """Assign to each rank its shard of a value of the chief. A collective.

        `full` is not used on other ranks.
        """
        described = self.variables[number]
        blocks = [blocks[number] for blocks in self._blocks_by_rank]
        sizes = [block.size if block else 0 for block in blocks]
        local = np.empty([sizes[self._rank]], described.dtype)
        for start, stop in self._chunks(described, sizes):
            sent: list[np.ndarray] = []
            if self._rank == 0 and full is not None:
                ends = [min(stop, size) for size in sizes]
                sent = [
                    block.read(full, start, max(start, end)) if block else local[:0]
                    for block, end in zip(blocks, ends, strict=True)
                ]
            splits = [len(values) for values in sent] or [0] * len(blocks)
            received, *_ = exchange_arrays(
                sent or [local[:0]], splits, name="FullValues"
            )
            local[start : start + len(received)] = received
        if described.variable is not None:
            described.variable.assign(local.reshape(described.variable.shape))

    def _allocate(self, number: int) -> np.ndarray:
        described = self.variables[number]
        start, size = self._starts[number], _bytes_of(described)
        if self._file is None or size < _LEAST_FILE_BYTES:
            return np.empty(described.shape, described.dtype)
        values = self._file[start : start + size].view(described.dtype)
        return values.reshape(described.shape)

    @functools.cached_property
    def _starts(self) -> list[int]:
        """The places of the values in the file, and its size."""
        sizes = (-(-_bytes_of(each) // _ALIGNMENT) for each in self.variables)
        return [_ALIGNMENT * n for n in itertools.accumulate(sizes, initial=0)]

    @functools.cached_property
    def _file(self) -> np.memmap | None:
        """The bytes of one file; None without a directory, or space in it."""
        if self._directory is None:
            return None
        # A full disk is an error here, and would be a signal at the first access.
        with (
            contextlib.suppress(OSError),
            tempfile.TemporaryFile(dir=self._directory) as file,
        ):
            os.posix_fallocate(file.fileno(), 0, self._starts[-1])
            return np.memmap(file, np.uint8, "r+")
        return None

    def _chunks(
        self, described: FullVariable, sizes: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of the elements that each rank moves in one message."""
        element_bytes = np.dtype(described.dtype).itemsize
        step = max(1, _CHUNK_BYTES // element_bytes // len(sizes))
        for start in range(0, max(sizes), step):
            yield start, start + step


def _bytes_of(described: FullVariable) -> int:
    return math.prod(described.shape) * np.dtype(described.dtype).itemsize
