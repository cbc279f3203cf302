"""What a build needs and this machine lacks, all in one message."""

import os
import pathlib
import shutil
import subprocess
import sys

from hvdtrain.install import horovod_wheel
from hvdtrain.install.commands import InstallError
from hvdtrain.install.target import Target

# The packages of Debian and of Red Hat, by tool.
_PACKAGES = {"a C++ compiler": ("g++", "gcc-c++"), "patch": ("patch", "patch")}


def check(target: Target, *, builds_horovod: bool) -> None:
    """Check the tools of a build before it starts.

    Raises:
        InstallError: with all that is missing, and the command that installs it.
    """
    missing = []
    if not _compiles():
        missing.append("a C++ compiler")
    if builds_horovod and not shutil.which("patch"):
        missing.append("patch")
    if missing:
        chosen = os.environ.get("CXX")
        note = f" (CXX={chosen} does not compile)" if chosen else ""
        raise InstallError(
            f"No wheel fits, and a build needs {' and '.join(missing)}{note}: "
            f"{_how_to_install(missing)}, load the modules of your cluster, or set "
            "HVDTRAIN_WHEELS to a directory of wheels"
        )
    if builds_horovod and target.has_gpu:
        _check_nvcc(target)
    is_packaged = target.mpi is not None and target.mpi.is_packaged
    if builds_horovod and is_packaged and len(sys.prefix.split()) > 1:
        raise InstallError(
            f"Horovod cannot be built in '{sys.prefix}': Open MPI's compiler fails in "
            "a path with spaces. Move the environment, or put the MPI of your system "
            "on the PATH"
        )


def _compiles() -> bool:
    command = [*horovod_wheel.compiler(), "-x", "c++", "-fsyntax-only", "-"]
    try:
        done = subprocess.run(
            command, input=b"#include <vector>\n", capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0


def _how_to_install(tools: list[str]) -> str:
    debian, redhat = zip(*(_PACKAGES[tool] for tool in tools), strict=True)
    sudo = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("apt-get"):
        return f"{sudo}apt-get install {' '.join(debian)}"
    if shutil.which("dnf"):
        return f"{sudo}dnf install {' '.join(redhat)}"
    return f"install {' '.join(debian)} with the package manager of your system"


def _check_nvcc(target: Target) -> None:
    operations = target.settings["HOROVOD_GPU_OPERATIONS"]
    home = target.settings.get("HOROVOD_CUDA_HOME")
    nvcc = pathlib.Path(home or "/usr/local/cuda", "bin", "nvcc")
    if not os.access(nvcc, os.X_OK) and (home or not shutil.which("nvcc")):
        raise InstallError(
            f"HOROVOD_GPU_OPERATIONS={operations} needs CUDA's compiler, and "
            f"{nvcc if home else 'nvcc'} is missing: load the module of CUDA or "
            "correct HOROVOD_CUDA_HOME; for CPUs: HOROVOD_GPU_OPERATIONS= python -m "
            "hvdtrain.install"
        )
