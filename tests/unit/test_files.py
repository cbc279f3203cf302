"""The atomic write of files and directories, and errors of files in one line."""

import importlib.util
import os
import time

import pytest

from hvdtrain.data import DataError
from hvdtrain.job import JobError
from hvdtrain.job.files import (
    atomic_directory,
    atomic_write,
    check_output,
    check_picture,
    one_line_errors,
    remove_partial,
)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_two_writers_of_one_path(tmp_path):
    path = tmp_path / "a.keras"
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert first.suffix == second.suffix == ".keras"
        assert not path.exists()
    assert path.read_text() == "first"  # renamed last
    assert names(tmp_path) == ["a.keras"]


def test_files_of_killed_writers_are_removed_when_they_are_old(tmp_path):
    path = tmp_path / "a[b].npz"
    old, recent = (tmp_path / f".partial-{part * 8}-a[b].npz" for part in "01")
    other = tmp_path / ".partial-00000000-x-a[b].npz"
    for left in (old, recent, other):
        left.write_text("half")
    an_hour_ago = time.time() - 3700
    for left in (old, other):
        os.utime(left, (an_hour_ago, an_hour_ago))
    with atomic_write(path) as temporary:
        temporary.write_text("whole")
    # The recent one may be that of another job, which still writes to it.
    assert names(tmp_path) == sorted([other.name, recent.name, "a[b].npz"])


def test_a_directory_is_complete_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "a"
    synchronized = []
    monkeypatch.setattr(
        os, "fsync", lambda number: synchronized.append(os.fstat(number).st_ino)
    )
    for content in ("first", "second"):
        with atomic_directory(path) as temporary:
            (temporary / "inner").mkdir()
            (temporary / "inner" / "file").write_text(content)
            seen = [each.stat().st_ino for each in temporary.rglob("*")]
            assert path.exists() == (content == "second")
        assert (path / "inner" / "file").read_text() == content
        assert {*seen, path.stat().st_ino, tmp_path.stat().st_ino} <= {*synchronized}
    with pytest.raises(OSError, match="full"), atomic_directory(path) as temporary:
        write_half(temporary)
    assert (path / "inner" / "file").read_text() == "second"
    assert names(tmp_path) == ["a"]


def write_half(directory):
    (directory / "half").write_text("half")
    raise OSError(28, "full")


def test_what_killed_writers_have_left_is_removed(tmp_path):
    (tmp_path / ".partial-00000000-a" / "inner").mkdir(parents=True)
    (tmp_path / ".partial-00000000-b").write_text("half")
    (tmp_path / "c").write_text("whole")
    remove_partial(tmp_path)
    assert names(tmp_path) == ["c"]


def test_an_error_names_the_file_the_reason_and_the_remedy(tmp_path):
    with (
        pytest.raises(DataError) as caught,
        one_line_errors("read x", remedy="do y", raises=DataError),
    ):
        (tmp_path / "none").read_bytes()
    assert str(caught.value) == "Cannot read x: No such file or directory; do y."
    assert isinstance(caught.value, (JobError, ValueError))


def test_errors_that_are_explained_already_pass():
    with (
        pytest.raises(DataError, match=r"^explained$"),
        one_line_errors("read x", remedy="do y", errors=(ValueError,)),
    ):
        raise DataError("explained")


def test_an_error_without_a_message():
    with (
        pytest.raises(JobError, match=r"^Cannot read x: EOFError; do y\.$"),
        one_line_errors("read x", remedy="do y", errors=(EOFError,)),
    ):
        raise EOFError


@pytest.mark.parametrize("name", ["missing/result", ".", "file/result"])
def test_a_path_that_cannot_be_written_is_an_error_before_the_work(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="--json"):
        check_output(tmp_path / name, "--json")
    check_output(tmp_path / "result", "--json")
    assert names(tmp_path) == ["file"]


def test_a_picture_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        JobError, match=r"matplotlib is missing; --output .*pip install"
    ):
        check_picture(tmp_path / "a.png", "--output")
