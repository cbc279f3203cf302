"""Which ranks hold which part of which table. A pure function of sizes.

The options, their order and their defaults are those of NVIDIA Merlin's
distributed-embeddings (user guide, "Mix Matching Distribution Strategies").
"""

import dataclasses
import math

from hvdtrain.sharding.shards import even_sizes

_STRATEGIES = ("basic", "memory_balanced", "memory_optimized")


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a table is divided.

    Attributes:
        axis: 0 for rows, 1 for columns.
        sizes: number of rows or columns of each rank; 0 for a rank without a part.
    """

    axis: int
    sizes: tuple


def place(
    shapes,
    ranks,
    *,
    strategy="basic",
    column_slice_threshold=None,
    row_slice_threshold=None,
    data_parallel_threshold=None,
):
    """Return the `Placement` of each table, None for one that all ranks hold.

    Thresholds are numbers of elements. A table of at most `data_parallel_threshold` is
    held by all ranks; of the others, one of at least `row_slice_threshold` has its rows
    divided among all. The rest is cut into pieces by `column_slice_threshold`, and the
    pieces are placed by `strategy`.

    Args:
        shapes: list of (rows, columns).
        ranks: number of ranks.
        strategy: "basic" deals the pieces to the ranks in their order,
            "memory_balanced" by size, forth and back, and "memory_optimized" gives
            each, the largest first, to the rank with the fewest elements.
        column_slice_threshold: a larger table is cut along its columns into the
            smallest power of two of pieces that are not larger, at most one for each
            rank and column. By default the largest threshold that gives as many pieces
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
    placements = [None] * len(shapes)
    pieces = []
    for i, (rows, columns) in enumerate(shapes):
        if rows * columns <= (data_parallel_threshold or 0):
            continue
        if row_slice_threshold and rows * columns >= row_slice_threshold:
            placements[i] = Placement(0, tuple(even_sizes(rows, ranks)))
        else:
            pieces.append(i)
    threshold = column_slice_threshold
    if threshold is None:
        threshold = _threshold_for([math.prod(shapes[i]) for i in pieces], ranks)
    cuts = {i: _number_of_pieces(*shapes[i], threshold, ranks) for i in pieces}
    for i, holders in _holders(cuts, shapes, ranks, strategy).items():
        placements[i] = _of_holders(*shapes[i], holders, ranks)
    return placements


def _threshold_for(sizes, ranks):
    sizes, threshold = list(sizes), math.inf
    while sizes and len(sizes) < ranks:
        sizes.sort()
        largest = sizes.pop()
        threshold = largest - 1
        sizes += [largest / 2, largest / 2]
    return threshold


def _number_of_pieces(rows, columns, threshold, ranks):
    most, number = min(ranks, columns), 1
    while number < most and rows * columns > threshold * number:
        number *= 2
    return min(number, most)


def _holders(cuts, shapes, ranks, strategy):
    """Return the rank of each piece of each table."""
    pieces = [i for i, number in cuts.items() for _ in range(number)]
    if strategy != "basic":
        pieces.sort(key=lambda i: -math.prod(shapes[i]) / cuts[i])
    holders, held = {i: [] for i in cuts}, [0] * ranks
    for place, i in enumerate(pieces):
        turn, rank = divmod(place, ranks)
        if strategy == "memory_balanced" and turn % 2:
            rank = ranks - 1 - rank
        if strategy == "memory_optimized":
            rank = held.index(min(held))
        held[rank] += math.prod(shapes[i]) / cuts[i]
        holders[i].append(rank)
    return holders


def _of_holders(rows, columns, holders, ranks):
    sizes = [0] * ranks
    if len(holders) == 1:
        sizes[holders[0]] = rows
        return Placement(0, tuple(sizes))
    for rank, width in zip(
        sorted(holders), even_sizes(columns, len(holders)), strict=True
    ):
        sizes[rank] += width
    return Placement(1, tuple(sizes))
