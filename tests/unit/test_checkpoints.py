"""Checkpoint files: what is written is read, and what is damaged is found."""

import json
import os
import stat

import numpy as np
import pytest

from hvdtrain.training.checkpoints import Checkpoint, CheckpointError, CheckpointFiles

ARRAYS = {
    "shared/0000/kernel": np.arange(12, dtype="float32").reshape(3, 4),
    "shared/0001/iterations": np.array(7, "int64"),
    "rank0/0000/seed": np.array([3, 4], "uint32"),
    "rank0/0001/empty": np.zeros((0, 2), "float16"),
}


def checkpoint(step=300):
    return Checkpoint(step=step, arrays=ARRAYS, metadata={"size": 2})


@pytest.fixture
def files(tmp_path):
    return CheckpointFiles(tmp_path / "checkpoints", keep_max=3)


def names(files):
    return sorted(path.name for path in files.path(0).parent.iterdir())


def test_what_is_written_is_read(files):
    files.write(checkpoint())
    found = files.read(300)
    assert (found.step, found.metadata) == (300, {"size": 2})
    assert found.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found.arrays[name], array, strict=True)
    assert names(files) == ["step-00000300.json", "step-00000300.safetensors"]


def test_bfloat16_is_stored_as_its_bits(files):
    weights = np.array([1.0, -2.5], "float32").astype("bfloat16")
    files.write(Checkpoint(step=1, arrays={"w": weights}, metadata={}))
    stored = files.read(1).arrays["w"]
    assert stored.dtype == np.uint16
    np.testing.assert_array_equal(stored.view("bfloat16"), weights)


def test_permissions_are_those_of_any_file(files):
    before = os.umask(0o027)
    try:
        files.write(checkpoint())
    finally:
        os.umask(before)
    assert stat.S_IMODE(files.path(300).stat().st_mode) == 0o640


def test_the_newest_are_kept(files):
    for step in (10, 20, 30, 40):
        files.write(checkpoint(step))
    assert files.steps() == [40, 30, 20]
    assert len(names(files)) == 6


def test_one_of_every_so_many_hours_is_kept(tmp_path):
    hours = iter(range(5))
    files = CheckpointFiles(
        tmp_path, keep_max=1, keep_every_hours=2, clock=lambda: 3600 * next(hours)
    )
    for step in (1, 2, 3, 4, 5):
        files.write(checkpoint(step))
    assert files.steps() == [5, 3, 1]


def test_those_of_later_steps_are_of_a_run_before(files):
    for step in (10, 20, 30):
        files.write(checkpoint(step))
    files.write(checkpoint(20))
    assert files.steps() == [20, 10]


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


def empty_json(path):
    path.with_suffix(".json").write_text("{}")


def truncated_json(path):
    truncate(path.with_suffix(".json"))
    truncate(path.with_suffix(".json"))


@pytest.mark.parametrize(
    "damage", [truncate, flip_a_bit, remove, empty_json, truncated_json]
)
def test_damage_is_found(files, damage):
    files.write(checkpoint())
    damage(files.path(300))
    with pytest.raises(CheckpointError) as caught:
        files.read(300)
    assert str(files.path(300)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_newer_format_is_named(files):
    files.write(checkpoint())
    path = files.path(300).with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        files.read(300)


def test_leftovers_of_a_killed_writer_are_deleted(files):
    files.write(checkpoint())
    directory = files.path(0).parent
    (directory / ".partial-0123abcd-step-00000400.safetensors").touch()
    files.path(400).touch()  # its JSON file was never written
    assert files.steps() == [300]
    files.delete_leftovers()
    assert names(files) == ["step-00000300.json", "step-00000300.safetensors"]


def test_a_failed_write_leaves_the_others(files):
    files.write(checkpoint(300))
    blocked = files.path(400)
    blocked.mkdir()  # the rename to this name fails
    with pytest.raises(CheckpointError, match=f"Cannot write {blocked}"):
        files.write(checkpoint(400))
    blocked.rmdir()
    assert files.read(300).step == 300
    assert names(files) == ["step-00000300.json", "step-00000300.safetensors"]
