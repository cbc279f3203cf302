"""Programs of the Python environment, wherever its packages were installed."""

import os
import pathlib
import site
import sys
import sysconfig
from importlib import metadata


def is_own_prefix() -> bool:
    """Return whether the environment has a prefix of its own: a venv's or conda's.

    The prefix of a system's Python has libraries and programs of others as well.
    """
    is_conda = pathlib.Path(sys.prefix, "conda-meta").is_dir()
    return is_conda or sys.prefix != sys.base_prefix


def find(name: str, *, package: str) -> pathlib.Path | None:
    """Return the path of a program that a package installed.

    A package may be in the environment, in the user's own directory, or under another
    prefix that PYTHONPATH names.

    Args:
        name: of the program.
        package: the distribution.

    Returns:
        None if the package is not installed, or does not have the program.
    """
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    # <prefix>/lib/pythonX.Y/site-packages
    packages = pathlib.Path(str(distribution.locate_file("")))
    folders: list[str | pathlib.Path] = [
        packages.absolute().parents[2] / "bin",
        sysconfig.get_path("scripts"),
        os.path.join(site.getuserbase(), "bin"),
    ]
    for folder in folders:
        path = pathlib.Path(folder, name)
        if os.access(path, os.X_OK):
            return path
    return None
