"""Which gradients are reduced together, by hand-computed bytes."""

import keras
import pytest

from hvdtrain.keras import gradients

MB = 1 << 20


def variables_of(*megabytes, dtype="float32"):
    size = keras.backend.standardize_dtype(dtype)
    elements = 4 if size == "float32" else 2
    return [
        keras.Variable(
            lambda shape, dtype: keras.ops.zeros(shape, dtype),
            shape=(round(n * MB / elements),),
            dtype=dtype,
        )
        for n in megabytes
    ]


@pytest.mark.parametrize(
    ("megabytes", "expected"),
    [
        # Up to 16 MB are one group.
        ([1, 1, 1], [[0, 1, 2]]),
        ([15, 1], [[0, 1]]),
        # The first group takes what starts below 4 MB, the others 16 MB each.
        ([3, 2, 7, 9, 1], [[0, 1], [2, 3], [4]]),
        ([1, 40, 1], [[0, 1], [2]]),
        ([4, 16, 16], [[0], [1], [2]]),
    ],
)
def test_groups_go_by_bytes(megabytes, expected):
    variables = variables_of(*megabytes)
    assert (
        gradients.split_into_groups(list(range(len(variables))), variables, None)
        == expected
    )


def test_bytes_are_those_of_the_dtype():
    variables = variables_of(8, 8, 8, dtype="float16")
    assert gradients.split_into_groups([0, 1, 2], variables, None) == [[0], [1, 2]]


def test_places_that_are_left_out_are_in_no_group():
    variables = variables_of(3, 100, 3, 14)
    assert gradients.split_into_groups([0, 2, 3], variables, None) == [[0, 2], [3]]
