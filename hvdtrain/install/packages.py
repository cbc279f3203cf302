"""Packages of this Python environment: pip, with or without pip in the environment."""

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata, util

from hvdtrain.install.commands import InstallError, Steps

_SETUPTOOLS = "setuptools==84.2.1"
# The first version that makes wheels by itself.
_SETUPTOOLS_FIRST = 71


class Packages:
    """Installs packages into the environment of this process.

    Environments of uv have no pip: Python's own copy of pip's wheel is used, or uv
    installs pip into a directory of this installation.
    """

    def __init__(self, steps: Steps, tools: pathlib.Path) -> None:
        """Find a pip.

        Args:
            tools: an empty directory for packages that only the installation needs.

        Raises:
            InstallError: there is none.
        """
        self._steps = steps
        self.tools = tools
        self._path = [str(tools)]
        if util.find_spec("pip") is None:
            self._find_pip()

    def _find_pip(self) -> None:
        ensurepip = util.find_spec("ensurepip")
        if ensurepip is not None:
            folder = pathlib.Path(str(ensurepip.origin)).parent / "_bundled"
            for wheel in folder.glob("pip-*.whl"):
                # A wheel is a zip file, which Python imports from.
                self._path.append(str(wheel))
                return
        uv = shutil.which("uv")
        if not uv:
            raise InstallError(
                f"There is no pip in {sys.prefix}: {sys.executable} -m ensurepip, or "
                "put uv on the PATH"
            )
        command = [uv, "pip", "install", "--quiet", "--target", str(self.tools), "pip"]
        self._steps.run("installing pip for this installation", command)

    def environment(self) -> dict[str, str]:
        """Return this process's environment, with the tools before other packages."""
        path = [*self._path, *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "PATH": os.pathsep.join([os.environ.get("PATH", ""), f"{self.tools}/bin"]),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_INPUT": "1",
            # Messages in English: `first_errors` searches them.
            "LC_ALL": "C",
        }

    def install(
        self,
        text: str,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Call `pip install --no-deps` as a step named `text`."""
        command = [sys.executable, "-m", "pip", "install", "--no-deps", *arguments]
        self._steps.run(text, command, environment=environment or self.environment())

    def install_tools(self, requirements: Sequence[str]) -> None:
        """Install packages into the tools, not into the environment."""
        text = f"installing {', '.join(requirements)} for the build"
        target = ["--upgrade", "--target", str(self.tools), *requirements]
        environment = self.environment()
        # Where the user has packages installed; pip accepts one place.
        for name in ("PIP_PREFIX", "PIP_USER", "PIP_TARGET", "PIP_ROOT"):
            environment.pop(name, None)
        self.install(text, target, environment=environment)

    def install_setuptools(self) -> None:
        """Install setuptools into the tools, unless the environment's is new enough."""
        if int((version("setuptools") or "0").split(".")[0]) < _SETUPTOOLS_FIRST:
            self.install_tools([_SETUPTOOLS])

    def pip(
        self, *arguments: str | os.PathLike[str]
    ) -> subprocess.CompletedProcess[str]:
        """Call pip, and return its output: the caller looks at the exit code."""
        return subprocess.run(
            [sys.executable, "-m", "pip", *arguments],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )


def version(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
