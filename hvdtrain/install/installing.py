"""Installs Horovod and the native operations into the environment of this process."""

import dataclasses
import os
import pathlib
import shutil
import sys
import sysconfig
import tempfile

from hvdtrain.install import (
    cache,
    commands,
    compatibility,
    horovod_wheel,
    missing_tools,
    mpi_library,
    native_wheel,
    portability,
    programs,
    record,
    target,
    wheels,
)
from hvdtrain.install.commands import InstallError, Steps
from hvdtrain.install.packages import Packages
from hvdtrain.install.record import HOROVOD, NATIVE
from hvdtrain.install.target import Target

_PROOF_SECONDS = 300
# Of the installation that runs.
_folders: list[str] = []
_BUILDERS = {HOROVOD: horovod_wheel, NATIVE: native_wheel}


@dataclasses.dataclass(frozen=True)
class InstallOptions:
    """Options of an installation.

    Attributes:
        wheels: a directory where portable wheels are looked for, and written if they
            were built.
        wheels_to_read: a directory or the address of a page with links.
        source: Horovod's source archive, for machines that are offline.
        replace: install also if another Horovod works.
        quiet: print nothing if nothing is to be done.
    """

    wheels: pathlib.Path | None = None
    wheels_to_read: str | None = None
    source: pathlib.Path | None = None
    replace: bool = False
    quiet: bool = False


def install(options: InstallOptions) -> None:
    """Install what is missing, and prove it with two ranks.

    Raises:
        InstallError: what a user can correct.
    """
    found = target.find()
    if not options.replace and _is_complete(found) and not options.wheels:
        if not options.quiet:
            print(f"{_describe()} is installed, nothing to do")
        return
    if options.wheels:
        _make_directory(options.wheels)
        if not found.is_standard:
            raise InstallError(
                f"--wheels with {', '.join(found.settings)}: the name of a wheel does "
                "not tell these settings; expected none of them"
            )
    _check_writable()
    with (
        cache.lock(cache.environment_lock(), print, "installs here"),
        tempfile.TemporaryDirectory(prefix="hvdtrain-install.") as folder,
    ):
        _folders.append(folder)
        log = cache.state(f"install-{cache.digest(sys.prefix)}.log")
        _Installation(options, Steps(log), pathlib.Path(folder)).run()


def abort() -> None:
    """Kill the commands that run, and remove their files. For a handler of signals."""
    commands.abort()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)


def _is_complete(found: Target) -> bool:
    if found.mpi is None and not target.without_mpi(found.settings):
        return False
    has_horovod = wheels.is_installed(HOROVOD, found) or _is_foreign(found)
    return has_horovod and wheels.is_installed(NATIVE, found) and is_proved()


def _is_foreign(found: Target) -> bool:
    """Return whether there is a Horovod of somebody else, and no wish for another."""
    package = record.find_package(HOROVOD)
    return package is not None and record.read(package) is None and not found.settings


def _make_directory(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InstallError(f"--wheels={folder}: {error.strerror}") from None


def _check_writable() -> None:
    """Raise an error where pip would refuse, before anything is built."""
    if any(os.environ.get(f"PIP_{name}") for name in ("PREFIX", "TARGET", "USER")):
        return
    packages = pathlib.Path(sysconfig.get_path("purelib"))
    if programs.is_own_prefix():
        if not os.access(packages, os.W_OK):
            raise InstallError(
                f"{packages} cannot be written: call this as its owner, or set "
                "PIP_PREFIX to a directory that is in PYTHONPATH"
            )
        return
    marker = pathlib.Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    if marker.exists() and not os.environ.get("PIP_BREAK_SYSTEM_PACKAGES"):
        raise InstallError(
            f"{sys.executable} is managed by the system, and pip installs nothing into "
            "it: make an environment by python3 -m venv, and install hvdtrain there"
        )


class _Installation:
    """One call of `install`, with the lock of the environment."""

    def __init__(
        self, options: InstallOptions, runner: Steps, work: pathlib.Path
    ) -> None:
        self._options = options
        self._steps = runner
        self._work = work
        (work / "tools").mkdir()
        self._packages = Packages(runner, work / "tools")
        self._target = target.find()

    def run(self) -> None:
        self._steps.report(
            f"installing into {sys.prefix}, for TensorFlow {self._target.tensorflow}"
        )
        self._install_mpi()
        keeps = not self._options.replace and self._try_foreign_horovod()
        for name in [NATIVE] if keeps else [HOROVOD, NATIVE]:
            self._install(name)
        package = record.find_package(HOROVOD)
        if package and self._target.mpi:
            mpi_library.link_for_mpi4py(package)
        if self._options.replace or not is_proved():
            self._prove(native_library())
            _note_proof()
        self._steps.report(f"{_describe()} is installed")

    def _install_mpi(self) -> None:
        if self._target.mpi is None and not target.without_mpi(self._target.settings):
            arguments = [*self._links(), mpi_library.PACKAGE]
            text = f"installing {mpi_library.PACKAGE}"
            self._packages.install(text, arguments)
            self._target = target.find()
        if self._target.mpi:
            mpi_library.configure(self._target.mpi)

    def _links(self) -> list[str]:
        location = self._options.wheels or self._options.wheels_to_read
        return ["--find-links", str(location)] if location else []

    def _try_foreign_horovod(self) -> bool:
        """Return whether two ranks run with a Horovod that was there before."""
        if not _is_foreign(self._target):
            return False
        package = record.find_package(HOROVOD)
        self._steps.report(f"found Horovod in {package}, without hvdtrain's patches")
        installed = compatibility.read_installed()
        mismatch = compatibility.check_horovod(installed, self._target.tensorflow)
        try:
            if mismatch:
                raise InstallError(mismatch.detail)
            # Without native operations: they may be older than this TensorFlow.
            self._prove(library=None)
        except InstallError as error:
            self._steps.report(f"it does not work here, and is replaced: {error}")
            return False
        self._steps.report(
            "it works and is used; python -m hvdtrain.doctor names what it lacks. To "
            "replace it: python -m hvdtrain.install --replace"
        )
        return True

    def _install(self, name: str) -> None:
        is_installed = wheels.is_installed(name, self._target)
        is_needed = self._options.replace or not is_installed
        if not is_needed and not self._options.wheels:
            return
        wheel = self._find(name) or self._build(name)
        if is_needed:
            command = ["--force-reinstall", "--no-index", str(wheel)]
            self._packages.install(f"installing {wheel.name}", command)
            if not wheels.is_installed(name, self._target):
                raise InstallError(
                    f"{wheel.name} is installed, and Python finds "
                    f"{record.find_package(name) or 'nothing'}: correct PYTHONPATH"
                )

    def _find(self, name: str) -> pathlib.Path | None:
        for location in (self._options.wheels, self._options.wheels_to_read):
            folder = pathlib.Path(tempfile.mkdtemp(dir=self._work))
            if location is None:
                continue
            wheel = wheels.find(
                name, self._target, str(location), folder, self._packages
            )
            if wheel:
                return wheel
            wanted = wheels.version(name, self._target)
            self._steps.report(f"{location} has no {name} {wanted} for this machine")
        return None

    def _build(self, name: str) -> pathlib.Path:
        builder = pathlib.Path(str(_BUILDERS[name].__file__))
        kept = cache.folder(name, self._target, builder)
        work = pathlib.Path(tempfile.mkdtemp(prefix="build-horovod.", dir=self._work))
        wheel = cache.find_or_build(
            kept, self._steps, lambda: self._compile(name, work)
        )
        if not self._options.wheels:
            return wheel
        return portability.repair(
            wheel,
            self._options.wheels,
            self._steps,
            self._packages,
            mpi=self._target.mpi,
        )

    def _compile(self, name: str, work: pathlib.Path) -> pathlib.Path:
        missing_tools.check(self._target, builds_horovod=name == HOROVOD)
        if name == NATIVE:
            return native_wheel.build(self._target, self._steps, self._packages, work)
        return horovod_wheel.build(
            self._target,
            self._steps,
            self._packages,
            work,
            source=self._options.source,
        )

    def _prove(self, library: pathlib.Path | None) -> None:
        horovodrun = programs.find("horovodrun", package="horovod")
        if horovodrun is None:
            raise InstallError(
                f"Horovod in {record.find_package(HOROVOD)} has no program horovodrun: "
                "python -m hvdtrain.install --replace"
            )
        proof = pathlib.Path(__file__).with_name("proof.py")
        command = [
            *(str(horovodrun), "-np", "2", sys.executable, "-P", str(proof)),
            *([str(library)] if library else []),
        ]
        self._steps.run(
            "checking an allreduce over two ranks",
            command,
            environment=_environment_of_ranks(self._target, horovodrun),
            directory=self._work,
            timeout_seconds=_PROOF_SECONDS,
        )


def _environment_of_ranks(found: Target, horovodrun: pathlib.Path) -> dict[str, str]:
    folders = [str(horovodrun.parent)]
    if found.mpi:
        folders.insert(0, str(found.mpi.compiler.parent))
    path = [*folders, os.environ.get("PATH", "")]
    return os.environ | {
        "PATH": os.pathsep.join(path),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # More ranks than cores, and root, as in an image: this is no training.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


def native_library() -> pathlib.Path | None:
    """Return the path of the installed native operations; None if there are none."""
    package = record.find_package(NATIVE)
    return package / record.NATIVE_LIBRARY if package else None


def is_proved() -> bool:
    """Return whether two ranks have run with what is installed now."""
    return _proof_note().exists()


def _note_proof() -> None:
    _proof_note().touch()


def _proof_note() -> pathlib.Path:
    """Return a file whose name depends on all that a proof depends on."""
    depends_on = [sys.prefix, target.tensorflow_version()]
    for name in (HOROVOD, NATIVE):
        package = record.find_package(name)
        if package:
            depends_on += [str(package), str(record.read(package))]
            depends_on += [str(file.stat()[6:9]) for file in package.glob("**/*.so")]
    return cache.state(f"proved-{cache.digest(*depends_on)}")


def _describe() -> str:
    installed = record.read_installed(HOROVOD)
    place = record.find_package(HOROVOD)
    return f"Horovod {installed.version}" if installed else f"Horovod in {place}"
