"""The arrangement of ranks along the axes of a mesh, by hand."""

import pytest

from hvdtrain.job import JobError
from hvdtrain.job.world import MeshShape


def test_ranks_of_a_model_group_are_adjacent():
    shape = MeshShape(model=2, pipeline=2).of(8)
    assert shape.data == 2
    assert shape.groups("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shape.groups("pipeline") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert shape.groups("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shape.coordinates(6) == {"data": 1, "pipeline": 1, "model": 0}


def test_groups_of_one_and_of_all_ranks_need_no_process_set():
    assert MeshShape(model=4).of(4).process_sets() == []
    assert MeshShape(model=2).of(4).process_sets() == [[0, 2], [1, 3], [0, 1], [2, 3]]


def test_successive_stages_have_process_sets():
    assert MeshShape(pipeline=3).of(3).process_sets() == [[0, 1], [1, 2]]
    shape = MeshShape(pipeline=2).of(4)
    assert shape.neighbours() == shape.groups("pipeline") == [[0, 1], [2, 3]]
    assert shape.process_sets() == [[0, 2], [1, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("shape", "size", "reason"),
    [
        (
            {"model": 2},
            3,
            "3 ranks for a mesh with .*model=2; .* multiple of 2",
        ),
        (
            {"model": 2, "pipeline": 2, "data": 2},
            4,
            "with data=2, .*; expected 8",
        ),
        ({"model": 4}, 2, "2 ranks .* a multiple of 4"),
    ],
)
def test_a_mesh_that_does_not_fit(shape, size, reason):
    with pytest.raises(JobError, match=reason):
        MeshShape(**shape).of(size)


def test_a_number_out_of_range():
    with pytest.raises(JobError, match="model=0; expected a number, 1 or more"):
        MeshShape(model=0)
