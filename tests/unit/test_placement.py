"""Embedding tables over ranks, against numbers computed by hand."""

import pytest

from hvdtrain.parallel.placement import Placement, place

# 80, 20, 60 and 40 elements.
SHAPES = [(20, 4), (5, 4), (20, 3), (10, 4)]


def whole(rank, rows, ranks=2):
    return Placement(0, tuple(rows * (each == rank) for each in range(ranks)))


@pytest.mark.parametrize(
    ("strategy", "holders"),
    [
        ("basic", [0, 1, 0, 1]),
        # By size 0, 2, 3, 1: to the ranks 0, 1, then 1, 0.
        ("memory_balanced", [0, 0, 1, 1]),
        # 80 to 0, 60 and 40 to 1, then 20 to 0.
        ("memory_optimized", [0, 0, 1, 1]),
    ],
)
def test_whole_tables_are_placed_by_a_strategy(strategy, holders):
    found = place(SHAPES, 2, strategy=strategy)
    pairs = zip(holders, SHAPES, strict=True)
    assert found == [whole(holder, rows) for holder, (rows, _) in pairs]


def test_memory_optimized_may_give_a_rank_fewer_tables():
    found = place([(90, 1), (30, 1), (30, 1)], 2, strategy="memory_optimized")
    assert found == [whole(0, 90), whole(1, 30), whole(1, 30)]


def test_thresholds_apply_in_their_order():
    found = place(
        SHAPES,
        2,
        data_parallel_threshold=20,
        row_slice_threshold=80,
        column_slice_threshold=40,
    )
    assert found == [
        Placement(0, (10, 10)),
        None,
        Placement(1, (2, 1)),
        whole(0, 10),
    ]


def test_columns_are_cut_into_a_power_of_two_of_pieces():
    # 80 / 4 <= 25, 4 pieces of 1 column on 3 ranks: 3 pieces of 2, 1 and 1.
    assert place([(20, 4)], 3, column_slice_threshold=25) == [Placement(1, (2, 1, 1))]
    # Both pieces of the second table are on ranks 2 and 0.
    found = place([(20, 4), (20, 4)], 3, column_slice_threshold=40)
    assert found == [Placement(1, (2, 2, 0)), Placement(1, (2, 0, 2))]


def test_fewer_tables_than_ranks_are_cut_so_that_each_rank_has_a_piece():
    # The larger one, of 80 elements, into 2, then its halves of 40 as well: not needed.
    found = place([(20, 4), (5, 4)], 3)
    assert found == [Placement(1, (2, 2, 0)), whole(2, 5, ranks=3)]
