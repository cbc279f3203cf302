"""The wheels that this user has built, and locks between processes that install."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator

from hvdtrain.install import programs, record, wheels
from hvdtrain.install.commands import InstallError, Steps
from hvdtrain.install.target import Target
from hvdtrain.open_directory import OpenDirectory, open_regular

# Variables that compilers and CMake read.
_COMPILER_VARIABLES = """AR CC CXX CUDACXX CPATH CPLUS_INCLUDE_PATH LIBRARY_PATH
    CFLAGS CPPFLAGS CUDAFLAGS CXXFLAGS LDFLAGS NVCC_APPEND_FLAGS NVCC_PREPEND_FLAGS
    """.split()  # noqa: SIM905


def directory() -> pathlib.Path:
    """Return the cache's directory, which may not exist.

    HVDTRAIN_CACHE_DIR, or `hvdtrain` in XDG_CACHE_HOME, or ~/.cache/hvdtrain.
    """
    if chosen := os.environ.get("HVDTRAIN_CACHE_DIR"):
        return pathlib.Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return pathlib.Path(base, "hvdtrain").expanduser()
    except RuntimeError:  # a user without a home
        return temporary("cache")


def temporary(name: str) -> pathlib.Path:
    """Return a path in a private directory, in the one for temporary files.

    Raises:
        InstallError: another user has made that directory.
    """
    path = pathlib.Path(tempfile.gettempdir(), f"hvdtrain-{os.getuid()}-install")
    try:
        with OpenDirectory(path, make=True):
            return path / name
    except OSError as error:
        raise InstallError(
            f"Received {path}, which cannot be used ({error.strerror}); expected a "
            "directory of this user, or none: remove it, or set TMPDIR to another "
            "directory."
        ) from None


def digest(*texts: object) -> str:
    """Return a short digest of the texts."""
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:12]


def folder(name: str, target: Target, builder: pathlib.Path) -> pathlib.Path:
    """Return where the wheel of a package is kept.

    Its name is a digest of all that the build depends on, except for the compiler's
    version: a newer compiler is no reason to build again.

    Args:
        name: of the package.
        builder: the module that builds it.
    """
    depends_on = [
        wheels.version(name, target),
        wheels.sources(name),
        wheels.settings(name, target),
        wheels.digests([builder]),
        target.tensorflow,
        sysconfig.get_config_var("SOABI") if name == record.HOROVOD else "",
        platform.libc_ver(),
        {name: os.environ.get(name) for name in _COMPILER_VARIABLES},
    ]
    if name == record.HOROVOD and target.mpi:
        depends_on.append(target.mpi.identity())
    kept = f"{name}-{wheels.version(name, target)}-{digest(*depends_on)}"
    return directory() / "wheels" / kept


def make_directory() -> bool:
    """Make the cache's directory; return whether this user can write it."""
    try:
        directory().mkdir(parents=True, exist_ok=True)
        _lock_file().touch()
    except OSError:
        return False
    return os.access(directory(), os.W_OK)


def state(name: str) -> pathlib.Path:
    """Return the path of a file of this user, in the cache if it can be written."""
    if not make_directory():
        return temporary(name)
    return directory() / f"{os.getuid()}-{name}"


def _lock_file() -> pathlib.Path:
    return directory() / "lock"


@contextlib.contextmanager
def lock(
    path: pathlib.Path, report: Callable[[str], None], purpose: str
) -> Iterator[None]:
    """Let one process at a time run the block.

    Args:
        path: of the lock's file.
        report: prints a line if another process has the lock.
        purpose: what that process does, such as "installs here".
    """
    with open(path, "a", opener=open_regular) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"another process {purpose}, waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environment_lock() -> pathlib.Path:
    """Return the lock's file of this Python environment.

    In the environment, if this user can write it: other nodes of a cluster have other
    directories for temporary files.
    """
    if programs.is_own_prefix() and os.access(sys.prefix, os.W_OK):
        return pathlib.Path(sys.prefix, ".hvdtrain-install.lock")
    return temporary(f"{digest(sys.prefix)}.lock")


def find_or_build(
    kept: pathlib.Path,
    steps: Steps,
    build: Callable[[], pathlib.Path],
) -> pathlib.Path:
    """Return a wheel of the cache; if there is none, build it and keep it.

    Args:
        kept: the wheel's folder in the cache.
        build: returns the path of a new wheel, which is used as it is if the cache
            cannot be written.
    """
    for wheel in kept.glob("*.whl"):
        return wheel
    if not make_directory():
        return build()
    kept.parent.mkdir(exist_ok=True)
    with lock(_lock_file(), steps.report, f"builds into {directory()}"):
        for wheel in kept.glob("*.whl"):
            return wheel
        wheel = build()
        # Renamed when it is complete: another process may look without the lock.
        new = pathlib.Path(tempfile.mkdtemp(prefix="new.", dir=kept.parent))
        shutil.copy(wheel, new)
        # Other users may share the cache; temporary directories are private.
        new.chmod(directory().stat().st_mode & 0o777)
        new.rename(kept)
    return kept / wheel.name
