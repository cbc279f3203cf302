"""Placement of embedding tables on ranks. A pure function of sizes.

The options, their order and their defaults follow NVIDIA Merlin's
distributed-embeddings (user guide, "Mix Matching Distribution Strategies").
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from hvdtrain.sharding.shards import even_sizes

_STRATEGIES = ("basic", "memory_balanced", "memory_optimized")


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a table is sharded.

    Attributes:
        axis: 0 for rows, 1 for columns.
        sizes: number of rows or columns by rank; 0 for a rank without a shard.
    """

    axis: int
    sizes: tuple[int, ...]


def place(
    shapes: Sequence[tuple[int, int]],
    ranks: int,
    *,
    strategy: str = "basic",
    column_slice_threshold: float | None = None,
    row_slice_threshold: float | None = None,
    data_parallel_threshold: float | None = None,
) -> list[Placement | None]:
    """Return the `Placement` of each table; None for a table that is replicated.

    Thresholds are numbers of elements. A table of at most `data_parallel_threshold` is
    replicated. Another one of at least `row_slice_threshold` is sharded by rows over
    all ranks. The others are cut into column shards by `column_slice_threshold`, and
    `strategy` assigns these to ranks.

    Args:
        shapes: (rows, columns) of each table.
        ranks: number of ranks.
        strategy: "basic" deals the column shards to the ranks in the order of tables.
            "memory_balanced" deals them by size, the largest first, to ranks in
            ascending, then descending order. "memory_optimized" assigns each, the
            largest first, to the rank with the fewest elements so far.
        column_slice_threshold: a larger table is cut along its columns into the
            smallest power of two of shards that are not larger, at most one for each
            rank and column. By default the largest threshold that gives as many shards
            as there are ranks.
        row_slice_threshold: see above.
        data_parallel_threshold: see above.

    Raises:
        ValueError: for another strategy.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(
            f"strategy must be one of {', '.join(_STRATEGIES)}. Received: {strategy!r}"
        )
    placements: list[Placement | None] = [None] * len(shapes)
    by_column = []
    for i, (rows, columns) in enumerate(shapes):
        if rows * columns <= (data_parallel_threshold or 0):
            continue
        if row_slice_threshold and rows * columns >= row_slice_threshold:
            placements[i] = Placement(0, tuple(even_sizes(rows, ranks)))
        else:
            by_column.append(i)
    threshold = column_slice_threshold
    if threshold is None:
        threshold = _default_threshold([math.prod(shapes[i]) for i in by_column], ranks)
    counts = {i: _count_shards(*shapes[i], threshold, ranks) for i in by_column}
    for i, holders in _assign_ranks(counts, shapes, ranks, strategy).items():
        placements[i] = _make_placement(*shapes[i], holders, ranks)
    return placements


def _default_threshold(elements: Sequence[float], ranks: int) -> float:
    # Halves the largest shard until there are as many as ranks.
    elements, threshold = list(elements), math.inf
    while elements and len(elements) < ranks:
        elements.sort()
        largest = elements.pop()
        threshold = largest - 1
        elements += [largest / 2, largest / 2]
    return threshold


def _count_shards(rows: int, columns: int, threshold: float, ranks: int) -> int:
    most, count = min(ranks, columns), 1
    while count < most and rows * columns > threshold * count:
        count *= 2
    return min(count, most)


def _assign_ranks(
    counts: Mapping[int, int],
    shapes: Sequence[tuple[int, int]],
    ranks: int,
    strategy: str,
) -> dict[int, list[int]]:
    """Return the ranks of the column shards of each table, by the table's number."""
    shards = [i for i, count in counts.items() for _ in range(count)]
    if strategy != "basic":
        shards.sort(key=lambda i: -math.prod(shapes[i]) / counts[i])
    holders: dict[int, list[int]] = {i: [] for i in counts}
    elements_by_rank = [0.0] * ranks
    for position, i in enumerate(shards):
        turn, rank = divmod(position, ranks)
        if strategy == "memory_balanced" and turn % 2:
            rank = ranks - 1 - rank
        if strategy == "memory_optimized":
            rank = elements_by_rank.index(min(elements_by_rank))
        elements_by_rank[rank] += math.prod(shapes[i]) / counts[i]
        holders[i].append(rank)
    return holders


def _make_placement(
    rows: int, columns: int, holders: Sequence[int], ranks: int
) -> Placement:
    sizes = [0] * ranks
    if len(holders) == 1:
        sizes[holders[0]] = rows
        return Placement(0, tuple(sizes))
    widths = even_sizes(columns, len(holders))
    for rank, width in zip(sorted(holders), widths, strict=True):
        sizes[rank] += width
    return Placement(1, tuple(sizes))
