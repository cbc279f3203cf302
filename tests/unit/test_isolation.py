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
    (directory / "newest").symlink_to(directory / "runs" / "new.txt")
    (directory / ".data").symlink_to("../data")
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
    assert (copy / "latest" / "log.txt").read_text() == "3"
    # The last two are by links within the project.
    names = ("train.py", "new.txt", "runs/log.txt", "newest", "latest/log.txt")
    for name in names:
        (copy / name).write_text("changed")
    (copy / "results").mkdir()
    assert (copy / ".data" / "x.txt").read_text() == "5"
    assert (copy / ".git" / "config").read_text() == "4"
    assert (copy / ".." / "data" / "x.txt").read_text() == "5"
    shutil.rmtree(tmp_path / "phases" / "tree")
    assert (project / "train.py").read_text() == "1"
    assert (project / "runs" / "log.txt").read_text() == "2"
    assert (project / "runs" / "old" / "log.txt").read_text() == "3"
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
    # A search does not follow links to directories.
    found = {str(path.relative_to(copy)) for path in copy.rglob("*.txt")}
    assert found == {"runs/log.txt", "runs/old/log.txt"}
    assert (copy / "runs" / "log.txt").is_symlink()
    assert (copy / "runs" / "log.txt").read_text() == "2"
    # A new file is in the copy in any case.
    for name in ("new.txt", "runs/new.txt"):
        (copy / name).write_text("new")
        assert not (project / name).exists()


def test_a_directory_of_many_files_leaves_others_copied(project, tmp_path, monkeypatch):
    for number in range(5):
        (project / "images").mkdir(exist_ok=True)
        (project / "images" / f"{number}.png").touch()
    # Those at the top, and those in `runs`.
    monkeypatch.setattr(isolation, "MAX_FILES", len(os.listdir(project)) + 3)
    copy = make(tmp_path, {project})(project)
    assert all(path.is_symlink() for path in (copy / "images").iterdir())
    assert not (copy / "runs" / "log.txt").is_symlink()


def test_a_directory_above_with_many_files_is_not_linked(
    project, tmp_path, monkeypatch
):
    monkeypatch.setattr(isolation, "MAX_ENTRIES", 1)
    tree = tmp_path / "tree"
    unlinked = isolation.make_tree(tree, {project}, excluded=tree)
    copy = tree / project.relative_to("/")
    assert project.parent in unlinked
    assert os.listdir(copy.parent) == ["project"]
    assert (copy / "train.py").read_text() == "1"


def test_arguments_of_the_script(project, tmp_path):
    (tmp_path / "home").symlink_to(project.parent)
    tree = tmp_path / "tree"
    copy = tree / project.relative_to("/")
    for argument, expected in {
        f"{project}": f"{copy}",
        f"--model_dir={project}/run": f"--model_dir={copy}/run",
        f"--option=dir={tmp_path}/home/project/a=b": f"--option=dir={copy}/a=b",
        f"{project}/latest": f"{copy}/runs/old",
        f"{project}-2": f"{project}-2",
        f"--data={project.parent}/data": f"--data={project.parent}/data",
        f"{project}/.data/x.txt": f"{project}/.data/x.txt",
        "--model_dir=run": "--model_dir=run",
        "": "",
    }.items():
        assert isolation.moved(argument, tree, {project}) == expected
