"""Which samples the ranks have read in their steps."""

import collections
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from hvdtrain.verify.trajectory import Directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of a training.

    Attributes:
        sizes: numbers of samples in the batches of the ranks: of the first step in
            which they differ, else of the first step.
        number: of samples that were read; 0 if they cannot be told apart.
        shared: share of the samples that more than one rank has read.
        has_equal_batches: whether two ranks have read the same batch in one step.
        has_unequal_orders: whether ranks have shards of data in other orders.
        is_distinct: whether no rank has read two equal samples in one stream.
    """

    sizes: list[int]
    number: int
    shared: float
    has_equal_batches: bool
    has_unequal_orders: bool
    is_distinct: bool


def read_by_ranks(files: Directory, *, size: int) -> Samples:
    """Return what the recorded batches of the training have in common."""
    batches_by_rank = [list(_batches(files, rank)) for rank in range(size)]
    steps = list(zip(*batches_by_rank, strict=False))
    sizes_by_step = [[batch.size for batch in step] for step in steps]
    unequal = [sizes for sizes in sizes_by_step if len(set(sizes)) > 1]
    readers = collections.defaultdict(set)
    for rank, batches in enumerate(batches_by_rank):
        for batch in batches:
            for digest in batch.digests:
                readers[digest].add(rank)
    reads = [
        d for batches in batches_by_rank for batch in batches for d in batch.digests
    ]
    shared = sum(len(readers[digest]) > 1 for digest in reads)
    return Samples(
        sizes=next(iter(unequal or sizes_by_step), []),
        number=len(reads),
        shared=shared / len(reads) if reads else 0.0,
        has_equal_batches=any(_has_equal(step) for step in steps),
        has_unequal_orders=_have_unequal_orders(files, size),
        is_distinct=all(map(_is_distinct, batches_by_rank)),
    )


def _have_unequal_orders(files: Directory, size: int) -> bool:
    orders_by_rank = [
        [
            files.read("shuffles", rank, stream) or []
            for stream in files.last_numbers("training", rank)
        ]
        for rank in range(size)
    ]
    # A rank may have read fewer streams than the others.
    by_stream = list(zip(*orders_by_rank, strict=False))
    # Seeds of 0 are another order in each process.
    is_random = any((0, 0) in orders[0] for orders in by_stream)
    return is_random or any(other != each[0] for each in by_stream for other in each)


@dataclasses.dataclass(frozen=True)
class _RecordedBatch:
    stream: int
    size: int
    # Of the samples; empty where a component has no row for each sample.
    digests: tuple[bytes, ...]


def _is_distinct(batches: Sequence[_RecordedBatch]) -> bool:
    digests = [(each.stream, digest) for each in batches for digest in each.digests]
    return len(set(digests)) == len(digests)


def _has_equal(batches: Sequence[_RecordedBatch]) -> bool:
    known = [batch.digests for batch in batches if batch.digests]
    return len(set(known)) < len(known)


def _batches(files: Directory, rank: int) -> Iterator[_RecordedBatch]:
    names: list[tuple] = [
        ("batch", stream, number)
        for stream in files.last_numbers("training", rank)
        for number in files.last_numbers("batch", rank, stream)
    ]
    names += [("call", number) for number in files.last_numbers("call", rank)]
    for kind, *numbers in names:
        arrays = files.read(kind, rank, *numbers)
        columns = [a for a in arrays if a is not None and np.ndim(a)]
        if columns:
            # The labels are last, and dense.
            size = len(columns[-1])
            is_dense = all(len(column) == size for column in columns)
            rows = zip(*columns, strict=True) if is_dense else ()
            stream = numbers[0] if kind == "batch" else -1
            yield _RecordedBatch(stream, size, tuple(map(_digest, rows)))


def _digest(row: Sequence[np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=12)
    for value in map(np.asarray, row):
        is_text = value.dtype == object
        digest.update(repr(value.tolist()).encode() if is_text else value.tobytes())
    return digest.digest()
