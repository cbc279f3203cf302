"""Builds a wheel of hvdtrain's native operations, for one line of TensorFlow.

It does not use Python's C API, so that one wheel serves all versions of Python. A build
takes half a minute on one core.
"""

import os
import pathlib
import sys
from importlib import metadata

from hvdtrain.install import horovod_wheel, record, wheels
from hvdtrain.install.commands import Steps
from hvdtrain.install.packages import Packages
from hvdtrain.install.record import BuildRecord
from hvdtrain.install.target import CompileFlags, Target

_OPTIONS = "-Wall -Wextra -O3 -fPIC -fvisibility=hidden -shared".split()  # noqa: SIM905
_SETUP = """\
from setuptools import setup

setup(
    name="hvdtrain-native",
    version="{version}",
    description="Native operations of hvdtrain, for TensorFlow {tensorflow}",
    long_description=(
        "The library that hvdtrain.native loads: it reduces gradients in memory that "
        "the ranks of a host share, and shuffles the numbers of samples. It has no "
        "Python code, and fits all releases of the TensorFlow line that it was "
        "compiled for."
    ),
    license="Apache-2.0",
    packages=["{package}"],
    package_data={{"{package}": ["*.so", "*.json"]}},
)
"""


def build(
    target: Target, steps: Steps, packages: Packages, work: pathlib.Path
) -> pathlib.Path:
    """Return the path of a new wheel in `work`.

    Args:
        work: an empty directory.

    Raises:
        InstallError: there is no compiler, or the build fails.
    """
    packages.install_setuptools()
    package = work / record.NATIVE
    package.mkdir()
    (package / "__init__.py").write_text('"""The library of hvdtrain.native."""\n')
    flags = target.compile_flags()
    command = [
        *(*horovod_wheel.compiler(), *flags.compile, *_OPTIONS),
        *_without_directories(flags),
        *(str(file) for file in wheels.native_sources() if file.suffix == ".cc"),
        *("-o", str(package / record.NATIVE_LIBRARY), *flags.link),
        *os.environ.get("LDFLAGS", "").split(),
    ]
    environment = packages.environment()
    steps.run("building the native operations", command, environment=environment)
    record.write(package, _record(target))
    _write_license(work)
    setup = work / "setup.py"
    setup.write_text(
        _SETUP.format(
            version=wheels.version(record.NATIVE, target),
            tensorflow=target.tensorflow,
            package=record.NATIVE,
        )
    )
    machine = os.uname().machine
    command = [
        *(sys.executable, str(setup), "--quiet", "bdist_wheel", "--python-tag", "py3"),
        *("--plat-name", f"linux_{machine}", "--dist-dir", str(work / "wheels")),
    ]
    steps.run(
        "packing the native operations",
        command,
        environment=environment,
        directory=work,
    )
    [wheel] = (work / "wheels").glob("*.whl")
    return wheel


def _without_directories(flags: CompileFlags) -> list[str]:
    """Return options that shorten the names of files in messages of assertions."""
    headers = [flag for flag in flags.compile if flag not in flags.names]
    folders = {pathlib.Path(flag.removeprefix("-isystem")) for flag in headers}
    packages = {wheels.PACKAGE.parent, *(folder.parents[1] for folder in folders)}
    return [f"-ffile-prefix-map={folder}/=" for folder in sorted(packages)]


def _write_license(folder: pathlib.Path) -> None:
    """Write hvdtrain's license where setuptools finds it, if hvdtrain has metadata."""
    try:
        files = metadata.files("hvdtrain") or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == "LICENSE":
            (folder / "LICENSE").write_text(file.read_text())


def _record(target: Target) -> BuildRecord:
    return BuildRecord(
        version=wheels.version(record.NATIVE, target),
        tensorflow=target.tensorflow,
        flags=target.compile_flags().names,
        compiler=horovod_wheel.compiler_version(),
        sources=wheels.sources(record.NATIVE),
    )
