"""The scripts, as a person calls them: what set-up says and leaves alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What setup.sh calls before it builds anything; a compiler is not among them.
TOOLS = """bash cat cksum cut dirname env flock grep head mkdir mktemp python3
    readlink sed sha256sum sort""".split()  # noqa: SIM905

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
    for name in ("scripts", "hvdtrain/native", "hvdtrain/installer"):
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


@pytest.fixture
def build_path(bare_path):
    """The same with a compiler and patch, as far as set-up looks."""
    for name in ("c++", "patch"):
        (bare_path / name).symlink_to("/bin/true")
    return bare_path


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
    said = call(link, cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == "set-up: .venv is ready, nothing to do\n"
    quiet = call(link, "--quiet", cwd=tmp_path)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert log.stat().st_mtime_ns == before


CHANGES = ["clone", "python", "mpi", "requirements", "scripts", "package", "installed"]
NOTHING_TO_DO = "set-up: .venv is ready, nothing to do\n"


@pytest.fixture
def record(clone):
    """Makes the clone one that is set up; with a function, changes the record of it."""
    (clone / ".venv").mkdir()
    (clone / ".venv/lib").symlink_to(ROOT / ".venv/lib")
    text = (ROOT / ".venv/.set-up").read_text().replace(str(ROOT), str(clone))

    def write(change=str):
        (clone / ".venv/.set-up").write_text(change(text))

    return write


@pytest.fixture
def set_up(clone, tmp_path):
    """Calls the clone's set-up; a broken compiler stops it if there is work to do."""
    path = os.environ["PATH"].split(os.pathsep)
    path = [folder for folder in path if not folder.startswith(f"{ROOT}/.venv")]

    def call_it(*, path=path, cxx="/bin/false", **environment):
        return call(
            clone / "scripts/setup.sh",
            PATH=os.pathsep.join(path),
            CXX=cxx,
            HVDTRAIN_CACHE_DIR=str(tmp_path / "cache"),
            **environment,
        )

    call_it.path = path
    return call_it


@is_set_up
def test_set_up_that_is_complete_has_nothing_to_do(record, set_up, tmp_path):
    record()
    assert set_up().stdout == NOTHING_TO_DO
    # Another environment that is active, with an MPI in it, is no change.
    other = tmp_path / "other"
    other.joinpath("bin").mkdir(parents=True)
    other.joinpath("bin/mpicxx").symlink_to("/bin/false")
    result = set_up(path=[f"{other}/bin", *set_up.path], VIRTUAL_ENV=str(other))
    assert result.stdout == NOTHING_TO_DO, result


@is_set_up
@pytest.mark.parametrize("changed", CHANGES)
def test_set_up_notices_each_change(record, set_up, changed):
    def change(text):
        assert f"{changed}: " in text
        return re.sub(f"(?m)^{changed}: .*", f"{changed}: another", text)

    record(change)
    assert_one_line(set_up(), "missing: a C++ compiler")


@is_set_up
def test_set_up_for_other_build_variables_is_another_one(record, set_up):
    record()
    assert_one_line(set_up(HOROVOD_GPU_OPERATIONS="NCCL"), "missing: a C++ compiler")
    assert_one_line(set_up(HOROVOD_WITHOUT_GLOO="1"), "missing: a C++ compiler")
    # Those of Horovod's runtime have no effect on its build.
    assert set_up(HOROVOD_CYCLE_TIME="1").stdout == NOTHING_TO_DO


@is_set_up
def test_later_calls_keep_the_build_variables_of_the_set_up(record, set_up):
    record(
        lambda text: text.replace("scripts: ", "horovod: HOROVOD_DEBUG=1\nscripts: ")
    )
    assert set_up().stdout == NOTHING_TO_DO
    assert set_up(HOROVOD_DEBUG="1").stdout == NOTHING_TO_DO
    # Clusters set those of CUDA for everybody.
    assert set_up(HOROVOD_CUDA_HOME="/opt/cuda").stdout == NOTHING_TO_DO
    assert_one_line(set_up(HOROVOD_DEBUG=""), "missing: a C++ compiler")


@is_set_up
def test_an_interrupted_set_up_goes_on_with_its_build_variables(record, set_up):
    record(lambda text: "horovod: HOROVOD_GPU_OPERATIONS=NCCL\n")
    cuda = {"cxx": "/bin/true", "HOROVOD_CUDA_HOME": "/nonexistent"}
    words = ("HOROVOD_GPU_OPERATIONS=NCCL needs", "/nonexistent/bin/nvcc is missing")
    assert_one_line(set_up(**cuda), *words)
    assert_one_line(
        set_up(HOROVOD_GPU_OPERATIONS=""), "missing: a C++ compiler (CXX=/bin/false"
    )


def test_a_wheel_of_horovod_is_used_only_for_the_build_that_made_it(clone, tmp_path):
    """The name that set-up gives to the wheel, from `bash -x`, for each difference.

    And to the native library, whose name depends on the compiler as well.
    """
    libraries = []

    def wheels(**environment):
        result = call(
            "bash", "-x", str(clone / "scripts/setup.sh"), PATH=path, **environment
        )
        assert result.returncode == 1
        [name] = re.findall(r"(?m)^\+ wheels=(.*)$", result.stderr)
        libraries.extend(re.findall(r"(?m)^\+ native=(.*)$", result.stderr))
        return name

    def compiler(name, version):
        """Makes one that compiles nothing, so that set-up ends before it starts."""
        file = tmp_path / "tools" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {version}\nexit 1\n")
        file.chmod(0o755)

    for name in ("g++-a", "g++-b", "nvcc"):
        compiler(name, "13.2")
    path = os.pathsep.join([str(tmp_path / "tools"), os.environ["PATH"]])
    base = {"CXX": "g++-a", "HVDTRAIN_CACHE_DIR": str(tmp_path / "cache")}
    first = wheels(**base)
    assert wheels(**base) == first
    assert wheels(**base, HOROVOD_CYCLE_TIME="1") == first
    assert wheels(**base, HOROVOD_CUDA_HOME="/opt/cuda") == first
    gpu = {"HOROVOD_GPU_OPERATIONS": "NCCL"}
    changed = [
        {"CXX": "g++-b"},
        {"CXXFLAGS": "-march=native"},
        {"CPATH": "/opt/include"},
        gpu,
        {**gpu, "HOROVOD_NCCL_LINK": "STATIC"},
        {"HOROVOD_WITHOUT_GLOO": "1"},
    ]
    assert len(set(libraries)) == 1
    names = [wheels(**{**base, **change}) for change in changed]
    assert len(set(libraries)) > 3  # for CXX, CXXFLAGS and CPATH
    with (clone / "hvdtrain/installer/patches/04-ninja.patch").open("a") as file:
        file.write("\n")
    names.append(wheels(**base))
    compiler("g++-a", "13.3")
    names.append(wheels(**base))
    compiler("nvcc", "12.9")
    names.append(wheels(**base, **gpu))
    requirements = clone / "scripts/requirements.txt"
    tensorflow = re.sub(r"(tensorflow.*==2\.21)\.0", r"\1.1", requirements.read_text())
    requirements.write_text(tensorflow)
    names.append(wheels(**base))
    assert len({first, *names}) == 1 + len(names)


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


def test_missing_tools_are_one_line_and_change_nothing(clone, bare_path, tmp_path):
    (bare_path / "apt-get").symlink_to("/bin/true")
    result = call(
        clone / "scripts/setup.sh",
        PATH=str(bare_path),
        CXX="",
        HVDTRAIN_CACHE_DIR=str(tmp_path / "cache"),
    )
    words = ("missing: a C++ compiler, patch.", "apt-get install g++ patch")
    assert_one_line(result, *words)
    assert not (clone / ".venv").exists()


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
    assert_one_line(result, "missing: Python's venv module", "venv")


def test_a_venv_of_somebody_else_is_left_alone(clone, tmp_path):
    other = clone / ".venv/precious"
    other.parent.mkdir()
    other.write_text("mine")
    result = call(clone / "scripts/setup.sh", HVDTRAIN_CACHE_DIR=str(tmp_path))
    assert_one_line(result, "was not made by this script")
    assert other.read_text() == "mine"


def test_unknown_gpu_operations_are_one_line(clone):
    result = call(clone / "scripts/setup.sh", HOROVOD_GPU_OPERATIONS="CUDA")
    assert_one_line(result, "HOROVOD_GPU_OPERATIONS=CUDA", "expected NCCL or MPI")


def test_gpu_operations_of_one_kind_alone_are_one_line(clone):
    result = call(clone / "scripts/setup.sh", HOROVOD_GPU_ALLREDUCE="NCCL")
    assert_one_line(result, "HOROVOD_GPU_ALLREDUCE=NCCL needs HOROVOD_GPU_OPERATIONS")


def test_a_path_that_open_mpi_cannot_be_used_in_is_one_line(
    clone, build_path, tmp_path
):
    cache = str(tmp_path / "cache")
    environment = {"PATH": str(build_path), "CXX": "", "HVDTRAIN_CACHE_DIR": cache}
    result = call(clone / "scripts/setup.sh", **environment)
    assert_one_line(result, f"'{clone}'", "spaces")


def test_a_cache_that_cannot_be_written_is_one_line(clone, build_path, tmp_path):
    (tmp_path / "file").touch()
    without_space = tmp_path / "clone"
    clone.rename(without_space)
    cache = str(tmp_path / "file/cache")
    environment = {"PATH": str(build_path), "CXX": "", "HVDTRAIN_CACHE_DIR": cache}
    result = call(without_space / "scripts/setup.sh", **environment)
    assert_one_line(result, cache, "set HVDTRAIN_CACHE_DIR")


def test_missing_cuda_compiler_is_one_line(clone, build_path, tmp_path):
    result = call(
        clone / "scripts/setup.sh",
        PATH=str(build_path),
        CXX="",
        HOROVOD_GPU_OPERATIONS="NCCL",
        HOROVOD_CUDA_HOME=str(tmp_path / "cuda"),
        HVDTRAIN_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert_one_line(result, "nvcc", "HOROVOD_CUDA_HOME")
    assert not (clone / ".venv").exists()


LOGS = {
    "compiler": (
        """
      [3/9] Building CXX object CMakeFiles/tensorflow.dir/horovod/common/common.cc.o
      FAILED: CMakeFiles/tensorflow.dir/horovod/common/common.cc.o
      In file included from /tmp/build-horovod.Ab1/horovod-0.28.1/horovod/common/a.h:1:
      /tmp/build-horovod.Ab1/horovod-0.28.1/common/a.h:343:21: error: no 'logic_error'
      ninja: build stopped: subcommand failed.
      subprocess.CalledProcessError: Command '['cmake']' returned exit status 1.
  note: This error originates from a subprocess, and is likely not a problem with pip.
  ERROR: Failed building wheel for horovod
""",
        "horovod-0.28.1/common/a.h:343:21: error: no 'logic_error'\n",
    ),
    "linker": (
        "ld: cannot find -lmpi: No such file\ncollect2: error: ld returned 1\n"
        "make: *** [all] Error 2\nERROR: Failed building wheel for horovod\n",
        "ld: cannot find -lmpi: No such file\ncollect2: error: ld returned 1\n",
    ),
    "binary": (
        "\udcff: error: no such \udcfe\n",
        "\udcff: error: no such \udcfe\n",
    ),
    "cuda": (
        "nvcc fatal   : Unsupported gpu architecture\nCMake Error at a:1 (message):\n",
        "nvcc fatal   : Unsupported gpu architecture\n",
    ),
    "cmake": (
        "  -- Configuring\n  CMake Error at CMakeLists.txt:7 (message):\n    no CUDA\n",
        "CMake Error at CMakeLists.txt:7 (message):\nno CUDA\n",
    ),
    "pip": (
        "WARNING: Retrying (Retry(total=4, connect=None))\nCollecting a\n"
        "ERROR: No matching distribution found for a\n",
        "ERROR: No matching distribution found for a\n",
    ),
    "other": ("Traceback:\nPermission denied\n", "Traceback:\nPermission denied\n"),
}


@pytest.mark.parametrize("kind", LOGS)
def test_the_reason_is_found_in_the_log(tmp_path, kind):
    log, reason = LOGS[kind]
    (tmp_path / "log").write_text(log, errors="surrogateescape")
    result = call(ROOT / "scripts/first_errors.sh", str(tmp_path / "log"))
    assert result.stdout == reason


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
