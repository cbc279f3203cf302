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

from hvdtrain.installer import record, wheels
from hvdtrain.installer.steps import Steps
from hvdtrain.installer.target import Target

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
    return pathlib.Path(base, "hvdtrain").expanduser()


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
        sysconfig.get_config_var("SOABI"),
        platform.libc_ver(),
        {name: os.environ.get(name) for name in _COMPILER_VARIABLES},
    ]
    if name == record.HOROVOD and target.mpi:
        depends_on.append(target.mpi.identity())
    kept = f"{name}-{wheels.version(name, target)}-{digest(*depends_on)}"
    return directory() / "wheels" / kept


def is_writable() -> bool:
    """Return whether the cache can be written; its directory is made."""
    try:
        directory().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory(), os.W_OK)


@contextlib.contextmanager
def lock(path: pathlib.Path, steps: Steps, purpose: str) -> Iterator[None]:
    """Let one process at a time run the block.

    Args:
        path: of the lock's file.
        purpose: what another process does that has the lock.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            steps.say(f"another process {purpose}, waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environment_lock() -> pathlib.Path:
    """Return the lock's file of this Python environment."""
    name = f"hvdtrain-install-{os.getuid()}-{digest(sys.prefix)}.lock"
    return pathlib.Path(tempfile.gettempdir(), name)


def built(
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
    if not is_writable():
        return build()
    kept.parent.mkdir(exist_ok=True)
    with lock(directory() / "lock", steps, f"builds into {directory()}"):
        for wheel in kept.glob("*.whl"):
            return wheel
        wheel = build()
        # Renamed when it is complete: another process may look without the lock.
        new = pathlib.Path(tempfile.mkdtemp(prefix="new.", dir=kept.parent))
        copied = shutil.copy(wheel, new)
        new.rename(kept)
    return kept / pathlib.Path(copied).name
