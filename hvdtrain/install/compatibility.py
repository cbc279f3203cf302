"""What does not fit among Python, TensorFlow, Keras and Horovod, read from their files.

Nothing is imported: loading a Horovod of another TensorFlow may end the process.
`hvdtrain.libraries` raises a mismatch as an error, and the doctor prints it.
"""

import dataclasses
import importlib.machinery
import json
import os
import pathlib
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from hvdtrain.install import record, supported

INSTALL = "python -m hvdtrain.install"
# Without the flag, a Horovod that two ranks can use is kept.
REPLACE = f"{INSTALL} --replace"
_KERAS = ("keras", "keras-nightly")
# The values of TF_USE_LEGACY_KERAS that TensorFlow takes for true.
_TRUE = ("1", "true", "True")
_STALLED_RANKS = "05-gloo-stalled-ranks.patch"
_MISSING_LIBRARY = re.compile(r"(\S+\.so[.\d]*): cannot open shared object file")
_SYMBOL = re.compile(r"undefined symbol: \w+")


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """What does not fit.

    Attributes:
        topic: the library, or Python.
        detail: what was found and what was expected.
        remedy: what the user can do.
    """

    topic: str
    detail: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.detail}: {self.remedy}."


class MismatchError(ImportError):
    """A library is missing or does not fit. The message is one line with a remedy."""


@dataclasses.dataclass(frozen=True)
class Installed:
    """The installed libraries, as files and metadata describe them.

    Attributes:
        python: the first two numbers of the running Python's version.
        tensorflow: whether there is a module `tensorflow`.
        tensorflow_packages: versions of the packages that install it, by name.
        keras: the version of Keras, "" if it is unknown.
        horovods: directories of Horovod in the order of `sys.path`. Python loads the
            first.
    """

    python: tuple[int, int]
    tensorflow: bool
    tensorflow_packages: Mapping[str, str]
    keras: str
    horovods: tuple[pathlib.Path, ...]

    @property
    def horovod(self) -> str:
        """The Horovod that Python loads, in words, and another one beside it."""
        used, *others = self.horovods
        other = f" (another one is in {others[0]})" if others else ""
        return f"Horovod in {used}{other}"

    @property
    def build(self) -> record.BuildRecord | None:
        """The record of Horovod's build; None if it is not hvdtrain's build."""
        return record.read(self.horovods[0]) if self.horovods else None

    @property
    def patches(self) -> set[str]:
        """The names of hvdtrain's patches that Horovod was built with."""
        sources = self.build.sources if self.build else ()
        return {pathlib.PurePath(name).name for name in sources}


def read_installed(path: Sequence[str] | None = None) -> Installed:
    """Read what is installed in the directories of `path`, by default `sys.path`."""
    path = sys.path if path is None else path
    tensorflows = {name: _version(name, path) for name in supported.TENSORFLOW_PACKAGES}
    return Installed(
        python=sys.version_info[:2],
        tensorflow=any(_directories("tensorflow", path)),
        tensorflow_packages={name: v for name, v in tensorflows.items() if v},
        keras=next(filter(None, (_version(name, path) for name in _KERAS)), ""),
        horovods=tuple(_directories(record.HOROVOD, path)),
    )


def _version(package: str, path: Sequence[str]) -> str:
    found = metadata.distributions(name=package, path=list(path))
    return next((distribution.version for distribution in found), "")


def _directories(package: str, path: Sequence[str]) -> Iterator[pathlib.Path]:
    seen = set()
    for entry in path:
        spec = importlib.machinery.PathFinder.find_spec(package, [entry])
        # A directory without __init__.py, such as a clone, has no origin.
        if spec and spec.origin:
            directory = pathlib.Path(spec.origin).parent
            if directory.resolve() not in seen:
                seen.add(directory.resolve())
                yield directory


def before_loading(installed: Installed, environ: Mapping[str, str]) -> Mismatch | None:
    """Return the first mismatch that is known before TensorFlow is loaded."""
    checks = (
        _check_python(installed),
        check_keras_settings(environ),
        check_tensorflow_installed(installed),
        check_horovod_installed(installed),
        check_keras(installed.keras),
    )
    return next(filter(None, checks), None)


def _check_python(installed: Installed) -> Mismatch | None:
    if installed.python >= supported.PYTHON[0]:
        return None
    detail = f"Received Python {supported.text(installed.python)}"
    return Mismatch("Python", f"{detail}; expected {_PYTHON_RANGE}", "use one of these")


def check_keras_settings(environ: Mapping[str, str]) -> Mismatch | None:
    """Return the mismatch of a setting that loads Keras 2, or another backend."""
    name = "TF_USE_LEGACY_KERAS"
    value = environ.get(name, "")
    if value in _TRUE:
        found = f"{name}={value}, by which tf.keras is Keras 2"
        return Mismatch(name, f"Received {found}; expected Keras 3", f"unset {name}")
    name = "KERAS_BACKEND"
    value, remedy = environ.get(name, ""), f"unset {name}"
    if not value:
        name, value = _read_backend(environ)
        remedy = "correct it there, or set KERAS_BACKEND=tensorflow"
    if value in ("", "tensorflow"):
        return None
    return Mismatch(name, f"Received {name}={value}; expected tensorflow", remedy)


def _read_backend(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return where Keras reads its backend without a variable, and the backend."""
    # As Keras: `Path.home` raises an error for a user without an entry and HOME.
    home = os.path.expanduser("~")
    base = home if os.access(home, os.W_OK) else "/tmp"
    folder = environ.get("KERAS_HOME") or os.path.join(base, ".keras")
    path = pathlib.Path(os.path.expanduser(folder)) / "keras.json"
    try:
        value = str(json.loads(path.read_text()).get("backend", ""))
    except (OSError, ValueError, AttributeError):
        value = ""
    return f"backend in {path}", value


def check_tensorflow_installed(installed: Installed) -> Mismatch | None:
    """Return the mismatch of a missing TensorFlow."""
    if installed.tensorflow:
        return None
    remedy = "run pip install 'hvdtrain[cpu]'"
    return Mismatch("TensorFlow", "TensorFlow is not installed", remedy)


def check_horovod_installed(installed: Installed) -> Mismatch | None:
    """Return the mismatch of a missing Horovod."""
    if installed.horovods:
        return None
    return Mismatch("Horovod", "Horovod is not installed", f"run {INSTALL}")


def check_keras(version: str) -> Mismatch | None:
    """Return the mismatch of a Keras that is too old; "" is an unknown version."""
    if not version or supported.minor(version) >= supported.KERAS[0]:
        return None
    major, last = supported.KERAS[1]
    wanted = f"'keras>={supported.text(supported.KERAS[0])},<{major}.{last + 1}'"
    detail = f"Received Keras {version}; expected {_KERAS_RANGE}"
    return Mismatch("Keras", detail, f"run pip install {wanted}")


def check_tensorflow(version: str, installed: Installed) -> Mismatch | None:
    """Return the mismatch of a TensorFlow that is too old."""
    first, (major, last) = supported.TENSORFLOW[0], supported.TENSORFLOW[-1]
    if supported.minor(version) >= first:
        return None
    # Not another package with TensorFlow: it would overwrite the files of this one.
    package = next(iter(installed.tensorflow_packages), "tensorflow")
    wanted = f"'{package}>={supported.text(first)},<{major}.{last + 1}'"
    detail = f"Received TensorFlow {version}; expected {_TENSORFLOW_RANGE}"
    remedy = f"run pip install {wanted}, then {INSTALL}"
    return Mismatch("TensorFlow", detail, remedy)


def check_horovod(installed: Installed, tensorflow: str) -> Mismatch | None:
    """Return the mismatch of Horovod with TensorFlow's version, such as "2.21.0".

    Patch releases of TensorFlow share an ABI: the first two numbers are compared.
    """
    package = installed.horovods[0]
    built = tensorflow_of(package)
    if built and supported.minor(built) != supported.minor(tensorflow):
        return _mismatch_of_horovod(
            f"{installed.horovod} was built for TensorFlow {built}, and {tensorflow} "
            "is installed"
        )
    extensions = {file.name for file in (package / "tensorflow").glob("mpi_lib*.so")}
    if not extensions:
        return _mismatch_of_horovod(f"{installed.horovod} was built without TensorFlow")
    expected = f"mpi_lib{sysconfig.get_config_var('EXT_SUFFIX')}"
    if expected not in extensions:
        return _mismatch_of_horovod(
            f"{installed.horovod} was built for another Python: it has "
            f"{', '.join(sorted(extensions))} and no {expected}"
        )
    return None


def tensorflow_of(horovod: pathlib.Path) -> str:
    """Return the version of TensorFlow that Horovod was built for, "" if unknown."""
    build = record.read(horovod)
    version = build.tensorflow if build else _metadata(horovod).get("tensorflow", "")
    return version if re.match(r"\d+\.\d", version) else ""


def _metadata(horovod: pathlib.Path) -> dict[str, Any]:
    file = horovod / "metadata.json"
    return json.loads(file.read_text()) if file.exists() else {}


def explain(error: BaseException, installed: Installed) -> Mismatch | None:
    """Return the mismatch that an error of Horovod's import shows, None for others."""
    text = "\n".join(map(str, _with_causes(error)))
    if library := _MISSING_LIBRARY.search(text):
        name = pathlib.PurePath(library[1]).name
        return _mismatch_of_missing_library(installed, name)
    if symbol := _SYMBOL.search(text):
        detail = f"{installed.horovod} does not fit this TensorFlow ({symbol[0]})"
        return _mismatch_of_horovod(detail)
    return None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__


def _mismatch_of_missing_library(installed: Installed, name: str) -> Mismatch:
    detail = f"{installed.horovod} needs {name}, which is not found"
    if "mpi" not in name:
        return _mismatch_of_horovod(detail)
    mpi = f" ({installed.build.mpi})" if installed.build and installed.build.mpi else ""
    remedy = f"load the MPI module of your cluster{mpi}, or run {REPLACE}"
    return Mismatch("Horovod", detail, remedy)


def _mismatch_of_horovod(detail: str) -> Mismatch:
    return Mismatch("Horovod", detail, f"run {REPLACE}")


def doubts(installed: Installed, *, tensorflow: str, keras: str) -> list[Mismatch]:
    """Return what may work and was not tested, for versions that were loaded."""
    newer = (
        (
            supported.minor(tensorflow) in supported.TENSORFLOW,
            *("TensorFlow", tensorflow, _TENSORFLOW_RANGE),
        ),
        (supported.minor(keras) <= supported.KERAS[1], "Keras", keras, _KERAS_RANGE),
        (
            installed.python <= supported.PYTHON[1],
            *("Python", supported.text(installed.python), _PYTHON_RANGE),
        ),
    )
    remedy = "hvdtrain was not tested with it"
    return [
        *(
            Mismatch(topic, f"Received {topic} {version}; expected {expected}", remedy)
            for is_tested, topic, version, expected in newer
            if not is_tested
        ),
        *_check_two_horovods(installed),
    ]


def _check_two_horovods(installed: Installed) -> list[Mismatch]:
    if len(installed.horovods) < 2:
        return []
    used, other, *_ = installed.horovods
    detail = f"Horovod is in {used}, which is used, and in {other}"
    remedy = "uninstall one of them, or correct PYTHONPATH"
    return [Mismatch("two Horovods", detail, remedy)]


def check_stall_limits(installed: Installed) -> Mismatch | None:
    """Return the mismatch of a Horovod that never ends a stalled job under Gloo."""
    if _STALLED_RANKS in installed.patches:
        return None
    detail = (
        f"{installed.horovod} lacks hvdtrain's patches: under Gloo a collective that "
        "one rank does not call blocks the others for ever"
    )
    return Mismatch("Horovod", detail, f"run {REPLACE}, or use horovodrun --mpi")


_PYTHON_RANGE = " to ".join(map(supported.text, supported.PYTHON))
_KERAS_RANGE = " to ".join(map(supported.text, supported.KERAS))
_TENSORFLOW_RANGE = ", ".join(map(supported.text, supported.TENSORFLOW))
