"""Builds a wheel of Horovod with TensorFlow, MPI and Gloo from its source archive.

The changes to Horovod's sources are in patches/, each with its reason. A build takes
some two minutes on two cores.
"""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

from hvdtrain.install import record, wheels
from hvdtrain.install.commands import InstallError, Steps
from hvdtrain.install.packages import Packages
from hvdtrain.install.record import BuildRecord
from hvdtrain.install.target import Target, without_mpi

_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_ARCHIVE = f"horovod-{wheels.HOROVOD_VERSION}"
# Its CUDA kernels need 3.18, the rest 3.13.
_CMAKE = (3, 18)
# What a build installs for itself where the machine has none.
_CMAKE_PACKAGE = "cmake==3.31.10"
_NINJA_PACKAGE = "ninja==1.13.2"
# A relative rpath to <prefix>/lib, where an MPI of the environment is: the library is
# <prefix>/lib/pythonX.Y/site-packages/horovod/tensorflow/mpi_lib.so. The backslash is
# for Ninja, which links through a shell; it does not disturb make.
_RPATH = r"\$ORIGIN/../../../.."
_NCCL_RPATH = r"\$ORIGIN/../../nvidia/nccl/lib"
# Variables of Horovod's runtime that its build would compile in as defaults.
_RUNTIME_VARIABLES = ("HOROVOD_CPU_OPERATIONS", "HOROVOD_LOCAL_VERSION", "CCL_ROOT")


def build(
    target: Target,
    steps: Steps,
    packages: Packages,
    work: pathlib.Path,
    *,
    source: pathlib.Path | None,
) -> pathlib.Path:
    """Return the path of a new wheel in `work`.

    Args:
        work: an empty directory.
        source: Horovod's source archive; without it, pip downloads one.

    Raises:
        InstallError: a tool is missing, or the build fails.
    """
    # CMake fails where the path of Python has spaces.
    (work / "python").symlink_to(sys.prefix)
    _install_tools(packages)
    archive = source or _download(steps, packages, work)
    _check_archive(archive)
    # Its digest is known: no filter, which Python has from 3.11.4 on.
    shutil.unpack_archive(archive, work)
    sources = work / _ARCHIVE
    for patch in wheels.patches():
        _apply(patch, sources)
    record.write(sources / "horovod", _record(target))
    python = work / "python/bin" / pathlib.Path(sys.executable).name
    command = [
        *(str(python), "-m", "pip", "wheel", "--no-deps"),
        *("--no-build-isolation", "--wheel-dir", str(work / "wheels"), str(sources)),
    ]
    environment = _environment(target, packages, work)
    steps.run("building Horovod, some minutes", command, environment=environment)
    [wheel] = (work / "wheels").glob("horovod-*.whl")
    return wheel


def _install_tools(packages: Packages) -> None:
    packages.install_setuptools()
    tools = []
    if _cmake_version() < _CMAKE:
        tools.append(_CMAKE_PACKAGE)
    if not shutil.which("make"):
        tools.append(_NINJA_PACKAGE)
    if tools:
        packages.install_tools(tools)


def _cmake_version() -> tuple[int, ...]:
    try:
        printed = subprocess.run(
            ["cmake", "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0,)
    match = re.search(r"(\d+)\.(\d+)", printed)
    return (int(match[1]), int(match[2])) if match else (0,)


def _download(steps: Steps, packages: Packages, work: pathlib.Path) -> pathlib.Path:
    requirements = work / "requirements.txt"
    name = f"horovod=={wheels.HOROVOD_VERSION}"
    requirements.write_text(f"{name} --hash=sha256:{_SHA256}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"),
        *("--no-binary=:all:", "--no-build-isolation", "--dest", str(work)),
        *("-r", str(requirements)),
    ]
    text = f"downloading the sources of Horovod {wheels.HOROVOD_VERSION}"
    steps.run(text, command, environment=packages.environment())
    return work / f"{_ARCHIVE}.tar.gz"


def _check_archive(archive: pathlib.Path) -> None:
    try:
        received = hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise InstallError(f"--source={archive}: {error.strerror}") from None
    if received != _SHA256:
        raise InstallError(
            f"{archive} has the SHA-256 {received}; expected {_SHA256}, of "
            f"{_ARCHIVE}.tar.gz on the package index"
        )


def _apply(patch: pathlib.Path, sources: pathlib.Path) -> None:
    # --fuzz=0: every line of context must match.
    command = ["patch", "-p1", "--fuzz=0", "--batch", "--forward", "--silent"]
    with patch.open() as changes:
        done = subprocess.run(command, stdin=changes, cwd=sources, check=False)
    # patch accepts a file without changes.
    if done.returncode != 0 or "\n@@ " not in patch.read_text():
        raise InstallError(
            f"{patch} does not apply to Horovod {wheels.HOROVOD_VERSION}: install "
            "hvdtrain again"
        )


def _record(target: Target) -> BuildRecord:
    return BuildRecord(
        version=wheels.version(record.HOROVOD, target),
        tensorflow=target.tensorflow,
        flags=target.compile_flags().names,
        compiler=compiler_version(),
        mpi=target.mpi.description if target.mpi else "",
        settings=target.settings,
        sources=wheels.sources(record.HOROVOD),
    )


def compiler_version() -> str:
    """Return the first line that the C++ compiler prints of its version."""
    command = [*compiler(), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def compiler() -> list[str]:
    """Return the command of the C++ compiler. CXX may contain options."""
    return os.environ.get("CXX", "").split() or ["c++"]


def _environment(
    target: Target, packages: Packages, work: pathlib.Path
) -> dict[str, str]:
    jobs = str(len(os.sched_getaffinity(0)))
    environment = packages.environment()
    for name in _RUNTIME_VARIABLES:
        environment.pop(name, None)
    local = wheels.version(record.HOROVOD, target).partition("+")[2]
    environment |= {
        "PATH": os.pathsep.join([environment["PATH"], str(work / "python/bin")]),
        "HOROVOD_LOCAL_VERSION": local,
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        # The bundled gloo and flatbuffers require CMake 2.8, which CMake 4 refuses.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # Horovod starts eight compilers on any machine unless MAKEFLAGS is set.
        "CMAKE_BUILD_PARALLEL_LEVEL": jobs,
        "MAKEFLAGS": os.environ.get("MAKEFLAGS", f"-j{jobs}"),
    }
    if not shutil.which("make"):
        environment["CMAKE_GENERATOR"] = "Ninja"
    environment |= target.settings
    rpaths = [_RPATH]
    if target.mpi and target.mpi.is_packaged:
        _use_packaged_mpi(target, environment)
    if without_mpi(target.settings):
        del environment["HOROVOD_WITH_MPI"]
    if target.settings.get("HOROVOD_WITHOUT_GLOO") == "1":
        del environment["HOROVOD_WITH_GLOO"]
    if target.has_gpu:
        rpaths += _use_cuda(environment)
    rpath = f"-Wl,-rpath,{os.pathsep.join(rpaths)}"
    environment["LDFLAGS"] = f"{os.environ.get('LDFLAGS', '')} {rpath}"
    # Messages of assertions contain names of source files.
    names = f"-ffile-prefix-map={work}/="
    environment["CXXFLAGS"] = f"{os.environ.get('CXXFLAGS', '')} {names}"
    return environment


def _use_packaged_mpi(target: Target, environment: dict[str, str]) -> None:
    """Put the environment's own mpicxx on the PATH.

    Without the rpath that it adds, which is the path of this environment: the wheel may
    be installed in another one.
    """
    assert target.mpi
    folder = target.mpi.compiler.parent
    environment["PATH"] = os.pathsep.join([environment["PATH"], str(folder)])
    environment["OMPI_LDFLAGS"] = f"-L{folder.parent / 'lib'}"


def _use_cuda(environment: dict[str, str]) -> list[str]:
    """Set CUDA and NCCL in the build's environment; return the rpaths that they need.

    Compiled, not yet run on a GPU.
    """
    # Horovod reads the list of architectures from the nvcc on the PATH, but compiles
    # with the one of HOROVOD_CUDA_HOME: make them the same.
    path = [environment["PATH"], "/usr/local/cuda/bin"]
    if home := environment.get("HOROVOD_CUDA_HOME"):
        path.insert(0, f"{home}/bin")
    environment["PATH"] = os.pathsep.join(path)
    is_nccl = environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    if not is_nccl or "HOROVOD_NCCL_HOME" in environment:
        return []
    # TensorFlow's NCCL: a second copy would allocate its own buffers on the GPU. The
    # wheel lacks libnccl.so, the name that -lnccl resolves to.
    package = record.find_package("nvidia.nccl")
    if package is None or not (package / "lib" / "libnccl.so.2").exists():
        raise InstallError(
            f"No NCCL in {sys.prefix}: pip install 'hvdtrain[gpu]', or set "
            "HOROVOD_NCCL_HOME"
        )
    link = package / "lib" / "libnccl.so"
    if not link.exists():
        link.symlink_to("libnccl.so.2")
    environment["HOROVOD_NCCL_HOME"] = str(package)
    environment["HOROVOD_NCCL_LINK"] = "SHARED"
    return [_NCCL_RPATH]
