"""The names of binary wheels, where they are, and whether installed ones fit."""

import hashlib
import pathlib
import re
from collections.abc import Iterable, Mapping

from hvdtrain import __version__
from hvdtrain.install import record
from hvdtrain.install.commands import InstallError
from hvdtrain.install.packages import Packages
from hvdtrain.install.target import Target

HOROVOD_VERSION = "0.28.1"
# Number of the set of patches in versions; a released set is never changed.
PATCH_SET = 1
PACKAGE = pathlib.Path(__file__).parents[1]
_FAILURE = re.compile(r"Could not fetch URL .*|The repository located at .* host\b")


def patches() -> list[pathlib.Path]:
    """Return the patches of Horovod, in their order."""
    return sorted(pathlib.Path(__file__).parent.joinpath("patches").glob("*.patch"))


def native_sources() -> list[pathlib.Path]:
    """Return the sources of the native operations."""
    folder = PACKAGE / "native"
    return sorted([*folder.glob("*.cc"), *folder.glob("*.h")])


def digests(files: Iterable[pathlib.Path]) -> dict[str, str]:
    """Return a digest of each file, by its name."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files
    }


def version(name: str, target: Target) -> str:
    """Return the version of a package for the target.

    Args:
        name: `record.HOROVOD` or `record.NATIVE`.
    """
    if name == record.NATIVE:
        return f"{__version__}+{target.tensorflow_label}"
    return f"{HOROVOD_VERSION}+hvdtrain.{PATCH_SET}.{target.label}"


def sources(name: str) -> dict[str, str]:
    """Return the digests of what a package is built from, beside Horovod's archive."""
    return digests(patches() if name == record.HOROVOD else native_sources())


def settings(name: str, target: Target) -> Mapping[str, str]:
    """Return the settings that a package depends on."""
    return target.settings if name == record.HOROVOD else {}


def is_installed(name: str, target: Target) -> bool:
    """Return whether the installed package is the one for the target."""
    installed = record.read_installed(name)
    return (
        installed is not None
        and installed.version == version(name, target)
        and installed.sources == sources(name)
        and installed.settings == settings(name, target)
    )


def find(
    name: str,
    target: Target,
    location: str,
    directory: pathlib.Path,
    packages: Packages,
) -> pathlib.Path | None:
    """Return the wheel for the target from a directory or an index page.

    Args:
        location: a directory, or the address of a page with links.
        directory: where the wheel is copied to.

    Returns:
        None if there is no such wheel, or none for this Python or C library.

    Raises:
        InstallError: the location cannot be read.
    """
    if name == record.HOROVOD and not target.is_standard:
        return None
    is_page = "://" in location
    if not is_page and not pathlib.Path(location).is_dir():
        raise InstallError(
            f"Received {location} for wheels; expected a directory or the address of a "
            "page with links"
        )
    wanted = f"{name}=={version(name, target)}"
    done = packages.pip(
        # -vv: pip reports a page that it cannot fetch in its debugging output alone.
        *("download", "-vv", "--no-deps", "--only-binary=:all:", "--no-index"),
        *("--find-links", location, "--dest", directory, wanted),
    )
    if done.returncode == 0:
        [wheel] = directory.glob(f"{name}-*.whl")
        return wheel
    failure = _FAILURE.search(done.stdout)
    if "No matching distribution" in done.stdout and not (is_page and failure):
        return None
    reason = failure[0] if failure else done.stdout.strip().splitlines()[-1]
    raise InstallError(f"The wheels in {location} cannot be read: {reason.strip()}")
