"""Which elements of each variable a rank updates, by hand."""

from hvdtrain.keras.sharded_updates import sizes_by_shards, sizes_by_variable


def test_the_largest_variables_are_dealt_out_first():
    sizes = sizes_by_variable([3, 10, 8, 5, 2], ranks=2)
    # 10; 8, 5; 3 to the first, which has 10 then 13; 2 to either, the first of equals.
    assert sizes == [(3, 0), (10, 0), (0, 8), (0, 5), (2, 0)]
    assert sizes_by_variable([7], ranks=3) == [(7, 0, 0)]


def test_slices_are_cut_at_multiples_of_16_within_a_variable():
    # Cuts at 100 and 200 of 300: after the first, and at 100 of the second, so at 96.
    assert sizes_by_shards([100, 200], ranks=3) == [(100, 0, 0), (0, 96, 104)]
    assert sizes_by_shards([5, 1, 10], ranks=2) == [(5, 0), (1, 0), (0, 10)]
    assert sizes_by_shards([64], ranks=2) == [(32, 32)]
