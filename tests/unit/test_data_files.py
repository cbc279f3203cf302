"""Which files a path or a pattern names, and the errors."""

import os

import pytest

from hvdtrain.data.formats import DataError
from hvdtrain.data.sources.data_files import find_files


def test_patterns_are_expanded_and_sorted(tmp_path, monkeypatch):
    names = ["b-1", "b-0", "a-0", "odd[1]", "odd1"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    monkeypatch.setenv("HOME", str(tmp_path))

    def found(patterns):
        return [file.name for file in find_files(patterns)]

    assert found("~/b-*") == ["b-0", "b-1"]
    # The order of a list is the user's.
    assert found([tmp_path / "b-*", str(tmp_path / "a-?")]) == ["b-0", "b-1", "a-0"]
    assert found(tmp_path / "odd[1]") == ["odd[1]"]


def test_errors_name_the_file_and_the_remedy(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    cases = {
        str(tmp_path / "none-*"): "none-*, which matches no file; expected the path",
        "memory://bucket/none-*": "memory://bucket/none-*, which matches no file; expe",
        "other://bucket/a": "Cannot open other://bucket/a: ValueError: Protocol not",
        tmp_path: f"the directory {tmp_path}; expected files: name them by a pattern",
        tmp_path / "pipe": "pipe; expected a regular file",
    }
    for pattern, text in cases.items():
        with pytest.raises(DataError) as caught:
            find_files(pattern)
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="Received no files"):
        find_files([])
    with pytest.raises(DataError, match=r"one file as .*; expected each file once"):
        find_files([file, tmp_path / "fil*"])
    (tmp_path / "link").symlink_to(file)
    for other in (tmp_path / "link", tmp_path / ".." / tmp_path.name / file.name):
        with pytest.raises(DataError, match=f"as {file} and as {other}; expected"):
            find_files([file, other])
    # Root may read every file.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DataError, match="Permission denied; expected a file that"):
        find_files(file)
