"""Checkpoint files: what is written is read, and what is damaged is found."""

import contextlib
import errno
import hashlib
import json
import os
import pathlib
import resource
import stat
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvdtrain.checkpoint.directories import DiskDirectory
from hvdtrain.checkpoint.header import Checkpoint, FirstBatch, Header
from hvdtrain.checkpoint.storage import (
    CheckpointError,
    CheckpointFiles,
    UnreadableError,
)

ARRAYS = {
    "shared/0000/kernel": np.arange(12, dtype="float32").reshape(3, 4),
    "shared/0001/iterations": np.array(7, "int64"),
    "rank0/0000/seed": np.array([3, 4], "uint32"),
    "rank0/0001/empty": np.zeros((0, 2), "float16"),
}


def header(step=300):
    return Header(
        step=step,
        local_batch_sizes=(3, 2),
        global_batch_size=5,
        first_batch=FirstBatch(step=0, digests=["a", "b"]),
        sample=5 * step,
        original_size=2,
        fit_epoch_steps=6,
        steps_per_execution=1,
        history={"loss": [0.5]},
    )


def checkpoint(step=300, arrays=ARRAYS):
    return Checkpoint(header=header(step), arrays=arrays)


@pytest.fixture
def files(tmp_path):
    return CheckpointFiles(tmp_path / "checkpoints", keep_max=3)


def arrays_path(files, step=300):
    (path,) = files.path(0).parent.glob(f"step-{step:08}-*.safetensors")
    return path


def names(files):
    return sorted(path.name for path in files.path(0).parent.iterdir())


def test_what_is_written_is_read(files):
    files.write(checkpoint())
    found = files.read(300)
    assert found.header == header(300)
    assert found.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found.arrays[name], array, strict=True)
    assert names(files) == [arrays_path(files).name, "step-00000300.json"]


def test_bfloat16_is_stored_as_its_bits(files):
    weights = np.array([1.0, -2.5], "float32").astype("bfloat16")
    files.write(checkpoint(1, {"w": weights}))
    found = files.read(1).arrays["w"]
    np.testing.assert_array_equal(found, weights, strict=True)
    stored = load_file(arrays_path(files, 1))["w"]
    np.testing.assert_array_equal(stored, [0x3F80, 0xC020])


def test_permissions_are_those_of_any_file(files):
    before = os.umask(0o027)
    try:
        files.write(checkpoint())
    finally:
        os.umask(before)
    for path in (files.path(300), arrays_path(files)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


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


def test_a_damaged_one_is_not_of_an_hour(tmp_path):
    files = CheckpointFiles(tmp_path, keep_max=1, keep_every_hours=1)
    files.write(checkpoint(10))
    truncate(files.path(10), size=5)
    files.write(checkpoint(20))
    files.write(checkpoint(30))
    assert files.steps() == [30, 20]


def test_one_of_an_hour_that_cannot_be_read_now_is_kept(tmp_path, monkeypatch):
    files = CheckpointFiles(tmp_path, keep_max=1, keep_every_hours=1)
    files.write(checkpoint(10))
    read_text = pathlib.Path.read_text

    def fail(path):
        if path == files.path(10):
            raise OSError(5, "Input/output error")
        return read_text(path)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_text", fail)
        files.write(checkpoint(20))
    assert files.read(10).step == 10


def test_those_that_were_passed_over_are_deleted_once_newer_ones_are_complete(files):
    for step in (10, 20, 30):
        files.write(checkpoint(step))
    files.supersede_after(10)
    assert files.steps() == [30, 20, 10]
    # Not before: they may be a copy in progress.
    files.write(checkpoint(15))
    assert files.steps() == [30, 20, 15, 10]
    files.write(checkpoint(20))
    assert files.steps() == [30, 20, 15, 10]
    # They do not count.
    files.write(checkpoint(25))
    assert files.steps() == [30, 25, 20, 15]
    files.write(checkpoint(31))
    assert files.steps() == [31, 25, 20]
    assert len(names(files)) == 6


def test_a_step_is_replaced_at_once(files, monkeypatch):
    files.write(checkpoint())
    with monkeypatch.context() as patch:
        # A writer that is killed before the JSON file is written.
        patch.setattr("json.dumps", mock.Mock(side_effect=ValueError("killed")))
        with pytest.raises(CheckpointError):
            files.write(checkpoint(300, {}))
    assert files.read(300).arrays.keys() == ARRAYS.keys()
    files.write(checkpoint(300, {}))
    assert files.read(300).arrays == {}
    assert len(names(files)) == 2


def truncate(path, *, size=-1):
    os.truncate(path, size % path.stat().st_size)


def replace(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def rewrite(path, change):
    """Change the values of a JSON file, and its digest as this package computes it."""
    values = json.loads(path.read_text())
    change(values)
    del values["digest"]
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    path.write_text(json.dumps(values | {"digest": digest}))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def describe_arrays(files, text):
    """Replace what describes the arrays; digest and size are of the new file."""
    path, contents = arrays_path(files), json.loads(files.path(300).read_text())
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    contents["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    contents["bytes"] = path.stat().st_size
    del contents["digest"]
    contents["digest"] = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
    files.path(300).write_text(json.dumps(contents))


@pytest.mark.parametrize(
    "damage",
    [
        lambda files: truncate(arrays_path(files)),
        lambda files: flip_a_bit(arrays_path(files)),
        lambda files: arrays_path(files).unlink(),
        lambda files: files.path(300).write_text("{}"),
        lambda files: files.path(300).write_text("[" * 200_000),
        lambda files: describe_arrays(files, b"[" * 200_000),
        lambda files: files.path(300).write_text(files.path(200).read_text()),
        lambda files: truncate(files.path(300), size=-2),
        # One bit: ASCII 6 and 7.
        lambda files: replace(files.path(300), '_steps": 6', '_steps": 7'),
        lambda files: replace(files.path(300), '"digest": "', '"digest": "0'),
        lambda files: replace(files.path(300), '"loss"', '"lost"'),
    ],
)
def test_damage_is_found(files, damage):
    files.write(checkpoint(200))
    files.write(checkpoint())
    damage(files)
    with pytest.raises(CheckpointError) as caught:
        files.read(300)
    assert str(files.path(300)) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def no_more_files():
    """A function that lets this process open no file; `end` lets it again."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit():
        os.close(free := os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))

    def end(seconds=0):
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    limit.end = end
    yield limit
    end()


@pytest.mark.parametrize("is_verified", [False, True])
def test_an_error_that_passes_is_no_damage(tmp_path, no_more_files, is_verified):
    files = CheckpointFiles(tmp_path, sleep=no_more_files.end)
    files.write(checkpoint())
    if is_verified:
        assert files.verify(300) == header(300)
    no_more_files()
    found = files.read(300)
    np.testing.assert_array_equal(
        found.arrays["shared/0000/kernel"], ARRAYS["shared/0000/kernel"]
    )
    no_more_files()
    assert files.steps() == [300]


def test_an_error_that_stays_is_one_line_and_nothing_is_deleted(tmp_path, monkeypatch):
    pauses = []
    files = CheckpointFiles(tmp_path, sleep=pauses.append)
    files.write(checkpoint())
    complete = names(files)
    error = OSError(5, "Input/output error")
    monkeypatch.setattr(hashlib, "file_digest", mock.Mock(side_effect=error))
    with pytest.raises(UnreadableError, match=r"json: Input.* may be intact") as caught:
        files.read(300)
    assert "\n" not in str(caught.value)
    assert 5 < sum(pauses) < 60
    assert names(files) == complete


def test_damage_is_found_in_the_arrays_of_a_checkpoint_verified_before(files):
    files.write(checkpoint())
    assert files.verify(300) == header(300)
    (arrays,) = files.path(300).parent.glob("*.safetensors")
    content = bytearray(arrays.read_bytes())
    content[-1] ^= 1
    arrays.write_bytes(content)
    with pytest.raises(CheckpointError, match="another digest"):
        files.read(300)


def test_a_file_that_cannot_be_deleted_keeps_no_other(files):
    blocked = files.path(5)
    blocked.mkdir(parents=True)
    for step in (10, 20, 30):
        files.write(checkpoint(step))
    left = files.write(checkpoint(40))
    assert str(blocked) in left
    assert "\n" not in left
    assert files.steps() == [40, 30, 20, 5]
    assert len(names(files)) == 7
    blocked.rmdir()
    assert files.write(checkpoint(50)) == ""


def test_a_newer_format_is_named(files):
    files.write(checkpoint())
    path = files.path(300)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        files.read(300)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sample": None}, "sample is None, expected <class 'int'>"),
        ({"fit_epoch_steps": True}, "fit_epoch_steps is True"),
        ({"local_batch_sizes": [3, "2"]}, "local_batch_sizes is '2'"),
        ({"first_batch": {"step": 0}}, "it has no digests"),
        ({"history": []}, r"history is \[\], expected dict"),
    ],
)
def test_a_key_of_another_type_is_named(files, change, reason):
    files.write(checkpoint())
    change = change | {"a key of a newer version": 1}
    rewrite(files.path(300), lambda values: values["metadata"].update(change))
    with pytest.raises(CheckpointError, match=reason) as caught:
        files.read(300)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=reason):
        files.verify(300)


def test_a_missing_key_is_named(files):
    files.write(checkpoint())
    rewrite(files.path(300), lambda values: values["metadata"].pop("original_size"))
    with pytest.raises(CheckpointError, match="it has no original_size"):
        files.read(300)


def test_arrays_without_a_json_file_are_kept_until_newer_ones_are_complete(files):
    """A writer was killed, or a copy is in progress."""
    files.write(checkpoint(10))
    directory = files.path(0).parent
    (directory / ".partial-0123abcd-step-00000015-0.json").touch()
    # The library of safetensors was writing the arrays.
    (directory / ".tmpAb3x9Z").touch()
    left = "step-00000015-a123abcd.safetensors"
    own = ["step-00000015-my.safetensors", "step-00000015-20261129.safetensors"]
    for name in (left, *own):
        (directory / name).touch()
    with pytest.warns(UserWarning, match=f"{left} is not used.* 3 newer") as caught:
        files.prepare()
    assert len(caught) == 1
    assert set(names(files)) > {left, *own}
    assert len(names(files)) == 5
    for step in (20, 30):
        files.write(checkpoint(step))
        assert left in names(files)
    files.write(checkpoint(40))
    assert files.steps() == [40, 30, 20]
    assert len(names(files)) == 6 + len(own)
    # A user's files are never deleted.
    assert set(names(files)) > set(own)


@pytest.mark.parametrize("options", [{}, {"keep_every_hours": 1}])
@pytest.mark.parametrize("keep_max", [1, 2])
def test_what_is_missing_for_a_moment_deletes_nothing(tmp_path, options, keep_max):
    """As in a store whose lists and objects are consistent later."""
    options |= {"sleep": lambda seconds: None}
    directory = Late(tmp_path)
    files = CheckpointFiles(directory, keep_max=keep_max, **options)
    for step in (10, 20, 20, 30):
        assert files.write(checkpoint(step)) == ""
    for step in (30, 20)[:keep_max]:
        assert files.read(step).step == step
    directory.hidden.add("step-00000030.json")
    with pytest.warns(UserWarning, match="is not used") as caught:
        files.prepare()
    assert len(caught) == 1
    directory.hidden.clear()
    assert files.read(30).step == 30


class Late(DiskDirectory):
    """The first time that a JSON file is read, and listed, it is missing."""

    reads_late = True

    def __init__(self, path):
        super().__init__(path)
        self._read, self._listed, self.hidden = set(), set(), set()

    def read(self, name):
        if name not in self._read:
            self._read.add(name)
            raise FileNotFoundError(name)
        return super().read(name)

    def names(self):
        listed = set(super().names())
        late = {name for name in listed - self._listed if name.endswith(".json")}
        self._listed |= listed
        return list(listed - late - self.hidden)


def test_a_put_that_is_refused_and_was_served_keeps_its_arrays(tmp_path, monkeypatch):
    directory = Late(tmp_path)
    files = CheckpointFiles(directory, keep_max=1, sleep=lambda seconds: None)
    write = directory.write

    @contextlib.contextmanager
    def cut(name):
        with write(name) as path:
            yield path
        if name.endswith(".json"):
            raise OSError("connection cut")

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write", cut)
        with pytest.raises(CheckpointError, match="connection cut"):
            files.write(checkpoint(10))
    assert files.read(10).step == 10


@pytest.mark.parametrize("place", ["file", "link"])
def test_a_directory_that_cannot_be_made_is_an_error_at_the_start(tmp_path, place):
    """A link to a disk that is not mounted; otherwise each save would fail."""
    if place == "file":
        (tmp_path / "checkpoints").touch()
    else:
        (tmp_path / "checkpoints").symlink_to(tmp_path / "not_mounted")
    reason = {"file": "File exists", "link": f"a link to {tmp_path}/not_mounted, which"}
    with pytest.raises(
        CheckpointError,
        match=f"^Cannot write {tmp_path}/checkpoints: .*{reason[place]}",
    ):
        CheckpointFiles(tmp_path / "checkpoints").prepare()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_lacks_operations(tmp_path, monkeypatch, code):
    """As a mounted bucket may: without the first two, checkpoints are complete."""
    failing = mock.Mock(side_effect=OSError(code, os.strerror(code)))
    files = CheckpointFiles(tmp_path / "checkpoints")
    monkeypatch.setattr(os, "fsync", failing)
    monkeypatch.setattr(pathlib.Path, "chmod", failing)
    files.prepare()
    assert names(files) == []
    files.write(checkpoint())
    assert files.read(300).step == 300
    complete = names(files)
    monkeypatch.setattr(pathlib.Path, "replace", failing)
    with pytest.raises(
        CheckpointError, match=f"^Cannot write .*{os.strerror(code)}; .*s3://bucket/run"
    ):
        files.prepare()
    assert names(files) == complete


@pytest.mark.parametrize("is_json", [False, True])
def test_a_file_that_was_cut_anywhere_is_found(files, is_json):
    """As by a cache of a mounted bucket that is written later."""
    files.write(checkpoint(300, {"a": np.arange(5000.0)}))
    path = files.path(300) if is_json else arrays_path(files)
    content = path.read_bytes()
    assert files.verify(300)
    for size in range(0, len(content), 16 if is_json else 4096):
        # With zeros in place of pages that were not written, too.
        for end in (b"", b"\0" * (len(content) - size)):
            path.write_bytes(content[:size] + end)
            with pytest.raises(CheckpointError):
                files.read(300)


def test_arrays_that_have_lost_their_json_files_are_not_deleted(files):
    for step in (100, 200):
        files.write(checkpoint(step))
    for step in (100, 200):
        files.path(step).unlink()
    with pytest.raises(CheckpointError, match="arrays of 2 checkpoints, and no JSON"):
        files.prepare()
    assert len(names(files)) == 2


def test_a_removed_directory_is_not_made_again(tmp_path):
    files = CheckpointFiles(tmp_path / "removed" / "checkpoints")
    with pytest.raises(CheckpointError, match="No such file or directory"):
        files.write(checkpoint())


def test_a_failed_write_leaves_the_others(files):
    files.write(checkpoint(300))
    complete = names(files)
    blocked = files.path(400)
    blocked.mkdir()  # the rename to this name fails
    with pytest.raises(CheckpointError, match=f"Cannot write {blocked}"):
        files.write(checkpoint(400))
    blocked.rmdir()
    assert files.read(300).step == 300
    assert names(files) == complete
