"""The scripts, as a person calls them: what set-up says and leaves alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What setup.sh calls before it makes an environment.
TOOLS = """bash cat cksum cut dirname env flock grep python3 readlink sed sha256sum
    sort""".split()  # noqa: SIM905

is_set_up = pytest.mark.skipif(
    not (ROOT / ".venv/.set-up").exists(),
    reason="scripts/setup.sh has not run in this clone",
)


def call(script, *arguments, cwd=None, **environment):
    """Runs one of the scripts; gives what it said and its exit code."""
    return subprocess.run(
        [str(script), *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=240,
    )


@pytest.fixture
def clone(tmp_path):
    """A clone of its own, where nothing is set up yet; with a space in its path."""
    clone = tmp_path / "a clone"
    for name in ("scripts", "hvdtrain/native", "hvdtrain/install"):
        shutil.copytree(ROOT / name, clone / name)
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, clone)
    return clone


@pytest.fixture
def bare_path(tmp_path):
    """A PATH of the tools that every system has: no compiler, no MPI."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(os.path.realpath(shutil.which(name)))
    (folder / "python3").unlink()
    (folder / "python3").symlink_to(sys._base_executable)
    return folder


def assert_one_line(result, *words):
    """The call failed, with one line for the user that holds all the words."""
    assert result.returncode != 0
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


@is_set_up
def test_set_up_again_does_nothing(tmp_path):
    log = ROOT / ".venv.log"
    link = tmp_path / "setup"
    link.symlink_to(ROOT / "scripts/setup.sh")
    before = log.stat().st_mtime_ns
    # Where there is something to do, pip fails, and the environment is restored.
    no_index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    said = call(link, cwd=tmp_path, **no_index)
    assert (said.returncode, said.stderr) == (0, "")
    assert re.fullmatch(r"Horovod \S+ is installed, nothing to do\n", said.stdout)
    quiet = call(link, "--quiet", cwd=tmp_path, **no_index)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert log.stat().st_mtime_ns == before


@is_set_up
@pytest.mark.parametrize(
    "changed",
    [
        "requirements",
        pytest.param("mpi", marks=pytest.mark.release),
        pytest.param("installed", marks=pytest.mark.release),
    ],
)
def test_an_environment_for_other_inputs_is_made_again(clone, changed):
    """The record of a set-up that is complete, with one line changed."""
    venv = clone / ".venv"
    venv.mkdir()
    (venv / "bin").symlink_to(ROOT / ".venv/bin")
    (venv / "lib").symlink_to(ROOT / ".venv/lib")
    text = (ROOT / ".venv/.set-up").read_text().replace(str(ROOT), str(clone))
    (venv / ".set-up").write_text(re.sub(f"(?m)^{changed}: .*", f"{changed}: x", text))
    # pip finds no package, so that set-up ends.
    result = call(clone / "scripts/setup.sh", PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert result.returncode == 1
    assert "installing TensorFlow and the other packages ... failed" in result.stdout
    # The environment that was there is kept.
    assert (venv / "bin/horovodrun").exists()
    assert sorted(clone.glob(".venv*")) == [
        venv,
        clone / ".venv.lock",
        clone / ".venv.log",
    ]


@is_set_up
def test_installed_packages_are_within_the_declared_ranges():
    python = ROOT / ".venv/bin/python"
    result = call(python, "-m", "pip", "check", "--disable-pip-version-check")
    assert result.returncode == 0, result.stdout


@is_set_up
def test_a_directory_of_its_name_does_not_hide_the_package(tmp_path):
    # The clone's own, where people stand above it.
    (tmp_path / "hvdtrain").mkdir()
    python = ROOT / ".venv/bin/python"
    result = call(python, "-m", "hvdtrain.doctor", "--version", cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_missing_python_is_one_line(clone, bare_path):
    (bare_path / "python3").unlink()
    result = call(clone / "scripts/setup.sh", PATH=str(bare_path))
    assert_one_line(result, "Python 3.11, 3.12 or 3.13 is missing", "PYTHON")


def test_unsuitable_python_is_named(clone):
    result = call(clone / "scripts/setup.sh", PYTHON="/bin/false")
    assert_one_line(result, "PYTHON=/bin/false", "3.11")


def test_missing_venv_module_is_one_line(clone, tmp_path):
    """Debian's python3 comes without ensurepip: here, a Python that lost its own."""
    base = Path(sys._base_executable).resolve()
    library = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
    home = tmp_path / "python"
    (home / library).mkdir(parents=True)
    (home / "bin").mkdir()
    shutil.copy(base, home / "bin/python3")
    for entry in (Path(sys.base_prefix) / library).iterdir():
        if entry.name != "ensurepip":
            (home / library / entry.name).symlink_to(entry)
    result = call(clone / "scripts/setup.sh", PYTHON=str(home / "bin/python3"))
    assert_one_line(result, "Python's venv module is missing", "-venv")


def test_a_venv_of_somebody_else_is_left_alone(clone, tmp_path):
    other = clone / ".venv/precious"
    other.parent.mkdir()
    other.write_text("mine")
    result = call(clone / "scripts/setup.sh", HVDTRAIN_CACHE_DIR=str(tmp_path))
    assert_one_line(result, "was not made by this script")
    assert other.read_text() == "mine"


def test_unknown_argument_of_setup_is_one_line():
    assert_one_line(call(ROOT / "scripts/setup.sh", "--fast"), "--fast", "usage")


def test_unknown_tier_of_test_is_one_line():
    assert_one_line(call(ROOT / "scripts/test.sh", "quick"), "'quick'", "unit")


@pytest.mark.parametrize("ranks", [[], ["two"], ["0"]])
def test_train_wants_a_number_of_ranks(ranks):
    assert_one_line(call(ROOT / "scripts/train.sh", "-np", *ranks), "-np")


@is_set_up
def test_train_hands_flags_on_and_passes_the_failure_on():
    result = call(ROOT / "scripts/train.sh", "--no_such_flag", "-np", "2")
    assert result.returncode != 0
    assert "no_such_flag" in result.stdout + result.stderr


def test_importing_the_package_loads_no_tensorflow():
    code = "import hvdtrain, sys; sys.exit('tensorflow' in sys.modules)"
    assert call(sys.executable, "-c", code, cwd=ROOT).returncode == 0
