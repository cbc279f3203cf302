"""Arrays that several processes map: equal, read-only, freed, refused elsewhere."""

import contextlib
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
# Prints the arrays that the handles in its argument describe, and its private memory.
OTHER = """
import pickle, sys
from hvdtrain.data import node_memory
arrays = node_memory.attach(pickle.loads(bytes.fromhex(sys.argv[1])))
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
def handles():
    with contextlib.ExitStack() as files:
        yield node_memory.share(ARRAYS, files)


def assert_same(arrays):
    assert list(arrays) == list(ARRAYS)
    for key, expected in ARRAYS.items():
        np.testing.assert_array_equal(arrays[key], expected, strict=True)


def test_another_process_maps_the_same_arrays():
    large = {**ARRAYS, "large": np.ones(1 << 22, np.uint8)}
    with contextlib.ExitStack() as files:
        handles = node_memory.share(large, files)
        code = [sys.executable, "-c", OTHER, pickle.dumps(handles).hex()]
        # Mapped here too, as by rank 0: pages of one process only count as private.
        own = node_memory.attach(handles)
        output = subprocess.run(
            code, stdout=subprocess.PIPE, check=True, timeout=60
        ).stdout
    arrays, private_kilobytes = pickle.loads(output)
    assert own.keys() == arrays.keys()
    np.testing.assert_array_equal(arrays.pop("large"), large["large"], strict=True)
    assert_same(arrays)
    # A copy would have 4,096. A page that the kernel maps ahead of an access, in one of
    # the two processes, counts as private.
    assert private_kilobytes < 100


def test_the_arrays_outlive_the_files():
    with contextlib.ExitStack() as files:
        handles = node_memory.share(ARRAYS, files)
        arrays = node_memory.attach(handles)
    assert_same(arrays)
    with pytest.raises(OSError, match="No such file"):
        node_memory.attach(handles)


def test_the_arrays_are_read_only(handles):
    arrays = node_memory.attach(handles)
    with pytest.raises(ValueError, match="read-only"):
        arrays["labels"][0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        arrays["labels"].setflags(write=True)
    assert_same(arrays)


@pytest.mark.parametrize(
    "change", [{"boot_id": "another"}, {"device": -1}, {"inode": -1}]
)
def test_files_of_other_nodes_are_not_opened(handles, monkeypatch, change):
    others = {
        key: handle._replace(identity=handle.identity._replace(**change))
        for key, handle in handles.items()
    }
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(OSError, match="no process of this node"):
        node_memory.attach(others)


def test_memory_that_is_missing_is_an_error():
    before = os.listdir("/proc/self/fd")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"), contextlib.ExitStack() as files:
            node_memory.share(ARRAYS, files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir("/proc/self/fd") == before


def test_a_system_without_anonymous_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no anonymous files"):
        node_memory.share(ARRAYS, contextlib.ExitStack())
