"""The copy of a working directory in which a phase of a verification runs."""

import os
import shutil

import pytest

from hvdtrain.verify import isolation


@pytest.fixture
def project(tmp_path):
    """A working directory with data beside it."""
    directory = tmp_path.resolve() / "me" / "project"
    for path, text in {
        "train.py": "1",
        "runs/log.txt": "2",
        "runs/old/log.txt": "3",
        ".git/config": "4",
        "../data/x.txt": "5",
    }.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    (directory / "latest").symlink_to("runs/old")
    os.mkfifo(directory / "pipe")
    return directory


def make(tmp_path, directories):
    tree, excluded = tmp_path / "phases" / "tree", tmp_path / "phases"
    excluded.mkdir(exist_ok=True)
    isolation.make_tree(tree, directories, excluded=excluded)
    return lambda path: tree / path.relative_to("/")


def test_what_a_phase_writes_does_not_stay(project, tmp_path):
    place = make(tmp_path, {project, project / "runs"})
    copy = place(project)
    assert (copy / "train.py").read_text() == "1"
    for name in ("train.py", "new.txt", "runs/log.txt", "runs/new.txt"):
        (copy / name).write_text("changed")
    (copy / "results").mkdir()
    assert (copy / "latest" / "log.txt").read_text() == "3"
    assert (copy / ".git" / "config").read_text() == "4"
    assert (copy / ".." / "data" / "x.txt").read_text() == "5"
    shutil.rmtree(tmp_path / "phases" / "tree")
    assert (project / "train.py").read_text() == "1"
    assert (project / "runs" / "log.txt").read_text() == "2"
    assert (project.parent / "data" / "x.txt").read_text() == "5"
    assert not {"new.txt", "results"} & {*os.listdir(project)}
    assert sorted(os.listdir(project / "runs")) == ["log.txt", "old"]


def test_a_working_directory_that_contains_the_files_of_the_phases(project, tmp_path):
    place = make(tmp_path, {tmp_path.resolve()})
    assert sorted(os.listdir(place(tmp_path.resolve()))) == ["me"]


@pytest.mark.parametrize("limit", ["MAX_FILES", "MAX_BYTES"])
def test_what_is_too_large_is_linked(limit, project, tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, limit, 0)
    copy = make(tmp_path, {project})(project)
    linked = copy / ("runs" if limit == "MAX_FILES" else "runs/log.txt")
    assert linked.is_symlink()
    assert (copy / "runs" / "log.txt").read_text() == "2"
    # A new file is in the copy in any case.
    (copy / "new.txt").write_text("new")
    assert not (project / "new.txt").exists()
