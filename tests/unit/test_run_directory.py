"""The directory of a run: its files are complete, or not there."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd
from hvdtrain import log
from hvdtrain.job import JobError, World
from hvdtrain.training import run_directory

NOBODY = 65534


@pytest.fixture(autouse=True)
def _horovod(monkeypatch):
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    hvd.init()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_json_replaces_what_was_there(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    run_directory.save_json({"steps": 5}, path)
    assert json.loads(path.read_text()) == {"steps": 5}
    assert names(tmp_path) == ["summary.json"]


def test_failure_leaves_the_old_file_and_no_rubbish(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        run_directory.save_json({"steps": object()}, path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["summary.json"]


def test_numbers_that_json_does_not_know_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        run_directory.save_json({"loss": float("nan")}, tmp_path / "summary.json")
    assert names(tmp_path) == []


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JobError, match=r"summary\.json: No space left on device"):
        run_directory.save_json({}, tmp_path / "summary.json")
    assert names(tmp_path) == []


def test_model_is_whole_and_obeys_umask(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    path = tmp_path / "model.keras"
    run_directory.save_model(model, path)
    assert names(tmp_path) == ["model.keras"]
    expected = model.get_weights()
    for a, b in zip(keras.models.load_model(path).get_weights(), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_directory_is_made_and_tried(tmp_path):
    run_directory.prepare(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == []


def test_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(JobError, match=rf"{path}.*--model_dir"):
            run_directory.prepare(path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["model.keras", "summary.json"])
def test_a_directory_in_the_place_of_a_file(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(JobError, match=rf"{name} is a directory"):
        run_directory.prepare(tmp_path)


def test_too_little_room(tmp_path):
    with pytest.raises(JobError, match=r"No space left|File too large"):
        run_directory.prepare(tmp_path, needed_bytes=1 << 60)
    assert names(tmp_path) == []


def test_a_disk_too_small_for_a_run(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        reason = rf"{tmp_path / 'run'}.*No space left.*32 MB of free space"
        with pytest.raises(JobError, match=reason):
            run_directory.prepare(tmp_path / "run")
        assert names(tmp_path / "run") == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_summary_never_stands_beside_the_model_of_another_run(tmp_path, monkeypatch):
    (tmp_path / "summary.json").write_text("old")
    (tmp_path / "model.keras").write_text("old")

    def full(model, path):
        raise JobError("full")

    monkeypatch.setattr(run_directory, "save_model", full)
    with pytest.raises(JobError, match="full"):
        run_directory.write(World(), tmp_path, model=keras.Sequential(), summary={})
    assert names(tmp_path) == ["model.keras"]


def test_only_the_chief_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "fail_together", contextlib.nullcontext)
    world = World(rank=1, size=2)
    run_directory.write(world, tmp_path, model=keras.Sequential(), summary={})
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    failing = mock.Mock(side_effect=OSError(errno.EOPNOTSUPP, "Not supported"))
    monkeypatch.setattr(fcntl, "flock", failing)
    with (
        pytest.warns(UserWarning, match="Cannot lock .* second job .* s3://bucket/run"),
        run_directory.locked(tmp_path),
    ):
        pass


def use(run):
    """Use the lock, the errors and the log of a run that fails."""
    with (
        run_directory.locked(run),
        contextlib.suppress(ZeroDivisionError),
        run_directory.recorded(run, World()),
    ):
        # Of the run before.
        assert not list(run.glob("errors/*"))
        log.JsonLog(run, warn=pytest.fail).on_evaluation(1, {})
        raise ZeroDivisionError


@pytest.mark.parametrize("name", [".lock", "errors", "log.jsonl"])
def test_a_link_in_a_shared_run_is_not_followed(tmp_path, name):
    """Another user of the run's directory may have made it."""
    victim, run = tmp_path / "victim", tmp_path / "run"
    for folder in (victim, run):
        folder.mkdir()
    (victim / "rank-0.json").write_text("content")
    (run / name).symlink_to(victim if name == "errors" else victim / "rank-0.json")
    with pytest.raises(JobError, match=rf"^Cannot write {run}/{name}: (it is|Not) a"):
        use(run)
    assert (victim / "rank-0.json").read_text() == "content"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a colleague")
def test_colleagues_continue_each_others_run():
    """A directory with the group of both, which is inherited."""
    run = pathlib.Path(tempfile.mkdtemp())
    previous = os.umask(0o002)
    try:
        os.chown(run, 0, NOBODY)
        run.chmod(0o2770)
        for user in (0, NOBODY, 0):
            os.setegid(NOBODY)
            os.seteuid(user)
            run_directory.prepare(run)
            use(run)
            run_directory.save_json({"user": user}, run / "summary.json")
            assert names(run / "errors") == ["rank-0.json"]
            os.seteuid(0)
        assert len((run / "log.jsonl").read_text().splitlines()) == 3
        assert (run / "summary.json").stat().st_gid == NOBODY
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.umask(previous)
        shutil.rmtree(run)
