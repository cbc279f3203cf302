"""Which elements of each variable a rank updates, by hand."""

from hvdtrain.keras.sharded_updates import sizes_by_variable
from hvdtrain.parallel.gathering import flat_sizes


def test_the_largest_variables_are_dealt_out_first():
    sizes = sizes_by_variable([3, 10, 8, 5, 2], ranks=2)
    # 10; 8, 5; 3 to the first, which has 10 then 13; 2 to either, the first of equals.
    assert sizes == [(3, 0), (10, 0), (0, 8), (0, 5), (2, 0)]
    assert sizes_by_variable([7], ranks=3) == [(7, 0, 0)]


def test_flat_shards_start_at_multiples_of_16():
    assert flat_sizes(300, ranks=3) == (96, 96, 108)
    assert flat_sizes(10, ranks=2) == (0, 10)
    assert flat_sizes(64, ranks=2) == (32, 32)
