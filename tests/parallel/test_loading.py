"""One rank of each node reads the data, and the other ranks map its arrays."""

import numpy as np
import pytest

import hvdtrain.keras as hvd
from hvdtrain import data
from hvdtrain.data import datasets, loading, node_memory
from hvdtrain.job import World


def world():
    return World(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
    )


@pytest.fixture
def reads(monkeypatch):
    """The data sets that this rank has read."""
    reads = []

    def load(name, **arguments):
        reads.append(name)
        return data.load(name, **arguments)

    monkeypatch.setattr(datasets, "load", load)
    return reads


def assert_equal(dataset, expected):
    assert (dataset.name, dataset.num_classes) == ("synthetic", 10)
    for key in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(
            getattr(dataset, key), getattr(expected, key), strict=True
        )


def test_one_rank_of_a_node_reads(reads):
    dataset, warning = loading.load_everywhere(world(), "synthetic")
    assert warning == ""
    assert reads == ["synthetic"] * (hvd.local_rank() == 0)
    assert not dataset.x_train.flags.writeable
    assert_equal(dataset, data.load("synthetic"))


@pytest.mark.parametrize("name", ["share", "attach"])
def test_a_rank_that_cannot_map_reads(reads, monkeypatch, name):
    def fail(*_):
        raise OSError("not here")

    # On the last rank alone: the others map what local rank 0 shares, if they can.
    if name == "share" or hvd.rank() == hvd.size() - 1:
        monkeypatch.setattr(node_memory, name, fail)
    dataset, _ = loading.load_everywhere(world(), "synthetic")
    expected = name == "share" or hvd.rank() in (0, hvd.size() - 1)
    assert reads == ["synthetic"] * expected
    assert_equal(dataset, data.load("synthetic"))
