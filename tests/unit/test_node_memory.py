"""Arrays that several processes map: equal, unchangeable, freed, refused elsewhere."""

import dataclasses
import os
import pickle
import resource
import subprocess
import sys

import numpy as np
import pytest

from hvdtrain.data import node_memory

ARRAYS = {
    "images": np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5),
    "labels": np.array([7, -1, 3], np.int32),
    "every second": np.arange(10.0)[::2],
    "none": np.empty((0, 4), np.float32),
}
# Prints the arrays that the handle in its argument describes, and its private memory.
OTHER = """
import pickle, sys
from hvdtrain.data import node_memory
arrays = node_memory.attach([pickle.loads(bytes.fromhex(sys.argv[1]))])
private = mapped = False
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0]:
        mapped = "memfd:hvdtrain" in line
    elif mapped and line.startswith("Private"):
        private += int(line.split()[1])
plain = {key: array.copy() for key, array in arrays.items()}
sys.stdout.buffer.write(pickle.dumps((plain, private)))
"""


@pytest.fixture
def shared():
    descriptor, handle = node_memory.share(ARRAYS)
    yield descriptor, handle
    os.close(descriptor)


def assert_same(arrays):
    assert list(arrays) == list(ARRAYS)
    for key, expected in ARRAYS.items():
        np.testing.assert_array_equal(arrays[key], expected, strict=True)


def test_another_process_maps_the_same_arrays():
    large = {**ARRAYS, "large": np.ones(1 << 22, np.uint8)}
    descriptor, handle = node_memory.share(large)
    code = [sys.executable, "-c", OTHER, pickle.dumps(handle).hex()]
    try:
        # Populated here too, as by rank 0: pages of one process only count as private.
        own = node_memory.attach([handle])
        output = subprocess.run(
            code, stdout=subprocess.PIPE, check=True, timeout=60
        ).stdout
    finally:
        os.close(descriptor)
    arrays, private_kilobytes = pickle.loads(output)
    assert own.keys() == arrays.keys()
    np.testing.assert_array_equal(arrays.pop("large"), large["large"], strict=True)
    assert_same(arrays)
    assert private_kilobytes == 0


def test_the_arrays_outlive_the_descriptor():
    descriptor, handle = node_memory.share(ARRAYS)
    arrays = node_memory.attach([handle])
    os.close(descriptor)
    assert_same(arrays)
    with pytest.raises(OSError, match="no process of this node"):
        node_memory.attach([handle])


def test_nobody_can_change_the_arrays(shared):
    descriptor, handle = shared
    arrays = node_memory.attach([handle])
    with pytest.raises(ValueError, match="read-only"):
        arrays["labels"][0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        arrays["labels"].setflags(write=True)
    # A mapping of a truncated file raises SIGBUS.
    for change in (
        lambda: os.ftruncate(descriptor, 0),
        lambda: os.pwrite(descriptor, b"x", 0),
    ):
        with pytest.raises(PermissionError):
            change()
    assert_same(arrays)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_files_of_other_nodes_are_not_opened(shared, monkeypatch, place):
    _, handle = shared
    identity = list(handle.identity)
    identity[place] = "another" if place == 0 else -1
    other = dataclasses.replace(handle, identity=tuple(identity))
    # The own node's handle may be any of them.
    assert_same(node_memory.attach([other, handle]))
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    with pytest.raises(OSError, match="no process of this node"):
        node_memory.attach([other])


def test_memory_that_cannot_be_reserved_is_an_error():
    before = os.listdir("/proc/self/fd")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            node_memory.share(ARRAYS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir("/proc/self/fd") == before


def test_a_system_without_anonymous_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no anonymous files"):
        node_memory.share(ARRAYS)
