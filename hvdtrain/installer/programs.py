"""Programs of the Python environment, wherever its packages were installed."""

import os
import pathlib
import site
import sysconfig
from importlib import metadata


def find(name: str, *, package: str) -> pathlib.Path | None:
    """Return the path of a program that a package installed.

    A package may be in the environment, in the user's own directory, or under another
    prefix that PYTHONPATH names.

    Args:
        name: of the program.
        package: the distribution.
    """
    folders = [sysconfig.get_path("scripts"), os.path.join(site.getuserbase(), "bin")]
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pass
    else:
        # <prefix>/lib/pythonX.Y/site-packages
        packages = pathlib.Path(str(distribution.locate_file("")))
        folders.insert(0, str(packages.resolve().parents[2] / "bin"))
    for folder in folders:
        path = pathlib.Path(folder, name)
        if os.access(path, os.X_OK):
            return path
    return None
