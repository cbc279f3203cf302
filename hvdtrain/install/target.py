"""What a binary package must fit: Python, TensorFlow, MPI, settings of the build."""

import dataclasses
import functools
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata

from hvdtrain.install import mpi_library, record, supported
from hvdtrain.install.commands import InstallError
from hvdtrain.install.mpi_library import MpiLibrary

# Variables that Horovod's build reads. The other variables HOROVOD_* are read at run
# time.
_BUILD_VARIABLE = re.compile(
    r"HOROVOD_(ALLOW_MIXED_GPU_IMPL|BUILD_[A-Z_]+|CMAKE|CUDA_HOME|DEBUG|GPU|GPU_[A-Z]+"
    r"|NCCL_[A-Z]+|NVTX_INCLUDE|ROCM_HOME|WITH(OUT)?_[A-Z]+)"
)
# Modules of clusters set these on all nodes.
_GPU_VARIABLE = re.compile(r"HOROVOD_[A-Z_]*(CUDA|NCCL|NVTX)")
_GPU_OPERATIONS = "HOROVOD_GPU_OPERATIONS"
_IMPORT_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class CompileFlags:
    """Flags of the C++ compiler for a library that TensorFlow loads."""

    compile: tuple[str, ...]
    link: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The flags without directories."""
        return tuple(flag for flag in self.compile if not flag.startswith("-isystem"))


@dataclasses.dataclass(frozen=True)
class Target:
    """The environment that a package is for.

    Attributes:
        tensorflow: the installed version, such as "2.21.0".
        mpi: None for a Horovod without MPI, or where it is not installed yet.
        settings: the build's variables HOROVOD_*, as the user has set them.
    """

    tensorflow: str
    mpi: MpiLibrary | None
    settings: Mapping[str, str]

    @property
    def tensorflow_label(self) -> str:
        """The line of TensorFlow in versions: "tf221" for 2.21."""
        return "tf" + "".join(map(str, supported.minor(self.tensorflow)))

    @property
    def has_gpu(self) -> bool:
        """Whether Horovod's operations on GPUs are built."""
        return _GPU_OPERATIONS in self.settings

    @property
    def is_standard(self) -> bool:
        """Whether the version identifies the build: it names GPUs and MPI alone."""
        others = set(self.settings) - {_GPU_OPERATIONS, "HOROVOD_WITHOUT_MPI"}
        # Where the tools and libraries of a build are.
        return all(name.endswith(("_HOME", "_INCLUDE", "_CMAKE")) for name in others)

    @property
    def label(self) -> str:
        """What a Horovod is built for, as its version says: "tf221.openmpi4"."""
        names = [self.tensorflow_label]
        if not without_mpi(self.settings):
            names.append(self.mpi.flavour if self.mpi else _default_flavour())
        if self.has_gpu:
            names.append(self.settings[_GPU_OPERATIONS].lower())
        return ".".join(names)

    def compile_flags(self) -> CompileFlags:
        """Return TensorFlow's flags. Imports TensorFlow in a process of its own."""
        return _tensorflow_flags()


@functools.cache  # two builds and their records need the flags
def _tensorflow_flags() -> CompileFlags:
    printed = run_python(
        "import tensorflow.sysconfig as flags\n"
        "print(*flags.get_compile_flags())\nprint(*flags.get_link_flags())"
    )
    compiling, linking = printed.splitlines()[-2:]
    # -isystem: no warnings from TensorFlow's headers.
    compiling = compiling.replace("-I", "-isystem")
    return CompileFlags(tuple(compiling.split()), tuple(linking.split()))


def _default_flavour() -> str:
    name, _, version = mpi_library.PACKAGE.partition("==")
    return name + version.split(".")[0]


def without_mpi(settings: Mapping[str, str]) -> bool:
    """Return whether the settings leave MPI out."""
    return settings.get("HOROVOD_WITHOUT_MPI") == "1"


def find() -> Target:
    """Return the target of this process's environment.

    Raises:
        InstallError: there is no TensorFlow, or a version is not supported.
    """
    _check_python()
    settings = build_settings()
    mpi = None
    if not without_mpi(settings):
        mpi = mpi_library.find()
    return Target(tensorflow_version(), mpi, settings)


def _check_python() -> None:
    first, last = supported.PYTHON
    if not first <= sys.version_info[:2] <= last:
        raise InstallError(
            f"Received Python {platform.python_version()}; expected "
            f"{supported.text(first)} to {supported.text(last)}"
        )


def tensorflow_version() -> str:
    """Return the version of the installed TensorFlow, without importing it.

    Raises:
        InstallError: there is none, or its line is not supported.
    """
    package, version = _installed_tensorflow()
    if not version:
        raise InstallError(
            f"No TensorFlow in {sys.prefix}: pip install 'hvdtrain[cpu]', or the "
            "TensorFlow of your choice"
        )
    if supported.minor(version) not in supported.TENSORFLOW:
        lines = ", ".join(map(supported.text, supported.TENSORFLOW))
        raise InstallError(
            f"Received TensorFlow {version}; expected one of {lines}: pip install "
            f"'{package}~={supported.text(supported.TENSORFLOW[-1])}.0'"
        )
    return version


def _installed_tensorflow() -> tuple[str, str]:
    """Return the name of the package and its version, "" if there is none."""
    for name in supported.TENSORFLOW_PACKAGES:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    if record.find_package("tensorflow") is None:
        return "", ""
    # A distribution of another name, such as a vendor's.
    code = "import tensorflow; print(tensorflow.__version__)"
    return "tensorflow", run_python(code).splitlines()[-1]


def run_python(code: str) -> str:
    """Return what Python code prints that imports TensorFlow.

    Raises:
        InstallError: it fails; with the last line of its error.
    """
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_IMPORT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise InstallError(f"TensorFlow in {sys.prefix} cannot be imported: {last}")
    return done.stdout


def build_settings() -> dict[str, str]:
    """Return the variables of Horovod's build.

    Those of the installed Horovod are kept, unless the environment sets them, even to
    an empty text.

    Raises:
        InstallError: the settings for GPUs contradict each other.
    """
    chosen = {k: v for k, v in os.environ.items() if is_build_variable(k)}
    settings = {**kept_settings(), **chosen}
    settings = {name: value for name, value in settings.items() if value}
    operations = settings.get(_GPU_OPERATIONS)
    if operations not in (None, "NCCL", "MPI"):
        raise InstallError(
            f"{_GPU_OPERATIONS}={operations}: expected NCCL or MPI, or none for CPUs"
        )
    for name in sorted(settings):
        if operations is None and name.startswith("HOROVOD_GPU"):
            raise InstallError(
                f"{name}={settings[name]} needs {_GPU_OPERATIONS}=NCCL beside it"
            )
    if operations is None:
        settings = {k: v for k, v in settings.items() if not _GPU_VARIABLE.match(k)}
    return dict(sorted(settings.items()))


def is_build_variable(name: str) -> bool:
    """Return whether Horovod's build reads the variable."""
    return _BUILD_VARIABLE.fullmatch(name) is not None


def kept_settings() -> Mapping[str, str]:
    """Return the settings that the installed Horovod was built with."""
    installed = record.read_installed(record.HOROVOD)
    return installed.settings if installed else {}
