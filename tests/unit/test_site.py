"""The generated tables, and the pages of the API, have all of the package's names."""

import importlib
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

import pytest

from hvdtrain import environment, program
from hvdtrain.job.world import JobError, PreemptedError

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = [*ROOT.glob("hvdtrain/**/*.py")]
PAGES = {
    "hvdtrain.keras": "keras.md",
    "hvdtrain.keras.callbacks": "keras.md",
    "hvdtrain.keras.elastic": "keras.md",
    "hvdtrain.training": "training.md",
    "hvdtrain.data": "data.md",
    "hvdtrain.parallel": "parallel.md",
    "hvdtrain.distribution": "distribution.md",
    "hvdtrain.job": "job.md",
}


@pytest.fixture(scope="module")
def site_pages():
    path = ROOT / "scripts" / "site_pages.py"
    spec = importlib.util.spec_from_file_location("site_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_all_flags_variables_and_exit_codes(site_pages):
    text = site_pages.fill((DOCS / "reference.md").read_text())
    assert "<!--" not in text
    for name in site_pages.PROGRAMS:
        assert f"### `hvdtrain.{name}`" in text
    for flag in ("model_dir", "strategy", "output", "hosts", "wheels"):
        assert f"\n| `--{flag}` |" in text
    for name in {**environment.VARIABLES, **environment.HOROVOD_VARIABLES}:
        assert f"\n| `{name}` |" in text
    assert "\n| 75 |" in text
    assert "\n| `--model` | `mlp` | The network. One of `mlp`, `cnn`. |" in text
    assert "&lt;auto" not in text
    # A cell may not end at a | of its text.
    rows = re.findall(r"^\|.*", text, re.M)
    cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(cells) == {3, 4}


def test_a_marker_that_is_missing_is_an_error(site_pages):
    with pytest.raises(ValueError, match="0 blocks 'exit codes'"):
        site_pages.fill("# Flags\n")


def test_all_programs_are_in_the_reference(site_pages):
    programs = {
        path.stem
        for path in ROOT.glob("hvdtrain/*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    programs |= {path.parent.name for path in ROOT.glob("hvdtrain/*/__main__.py")}
    programs.remove("__main__")
    assert programs == set(site_pages.PROGRAMS)


def test_the_package_lists_its_programs(site_pages):
    command = [sys.executable, "-m", "hvdtrain"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    for name in site_pages.PROGRAMS:
        assert f"\npython -m hvdtrain.{name} " in done.stdout, done


def test_all_variables_that_are_read_are_listed():
    read = set()
    for path in SOURCES:
        calls = r"environ(?:\.get\(|\.setdefault\(|\[)\"(HVDTRAIN_\w+)\""
        read |= set(re.findall(calls, path.read_text()))
    limits = re.findall(r"_number\(([A-Z_]+),", inspect.getsource(environment))
    named = {getattr(environment, name) for name in limits}
    read |= {name for name in named if name.startswith("HVDTRAIN_")}
    assert read == set(environment.VARIABLES)


def test_exit_codes_of_errors_are_listed():
    for error in (JobError, PreemptedError):
        assert str(error.exit_code) in program.EXIT_CODES


@pytest.mark.parametrize("module", PAGES)
def test_every_public_name_has_an_entry(module):
    text = (DOCS / "api" / PAGES[module]).read_text()
    package = importlib.import_module(module)
    public = [
        name
        for name in getattr(package, "__all__", vars(package))
        if not name.startswith("_")
        and getattr(getattr(package, name), "__module__", "").startswith("hvdtrain.")
    ]
    missing = [name for name in public if not re.search(rf"\.{name}$", text, re.M)]
    assert not missing
    # Each where it is defined.
    for path, name in re.findall(r"^::: ([\w.]+)\.(\w+)$", text, re.M):
        assert hasattr(importlib.import_module(path), name), f"{path}.{name}"


def test_each_mark_of_the_features_names_its_test(site_pages):
    page = (DOCS / "choosing.md").read_text()
    _, *rows = re.findall(r"^\| (.*) \|$", page.partition("## Features")[2], re.M)
    marks = {row.split(" | ")[0]: row.split(" | ")[1] for row in rows}
    assert len(marks) > 10
    for feature, mark in marks.items():
        if mark == "no":
            continue
        [(path, name)] = re.findall(r'^\[yes\]\((\S+) "(\w+)"\)$', mark)
        source = (DOCS / path).read_text()
        assert f"\ndef {name}(" in source, feature
        shown = site_pages.without_links_to_tests(mark)
        assert shown == f'<abbr title="{path[3:]}::{name}">yes</abbr>'


def test_every_page_but_the_home_starts_with_a_command_or_code():
    late = []
    for page in {*DOCS.glob("**/*.md")} - {DOCS / "index.md"}:
        lines = page.read_text().splitlines()
        first = next(line for line in lines[1:] if line)
        if not (lines[0].startswith("# ") and first.startswith("```")):
            late.append(page.name)
    assert not late


def test_the_home_shows_the_commands_before_tables_and_pictures():
    home = (DOCS / "index.md").read_text()
    first = re.search(r"^(```|\||!).*", home, re.M)
    assert first.group() == "```sh"
    assert first.start() < 600
