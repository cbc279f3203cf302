"""What a binary package was built for: a record inside of it, `build.json`.

Horovod's own packages have none.
"""

import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Mapping

HOROVOD = "horovod"
NATIVE = "hvdtrain_native"
# In the package of the native operations.
NATIVE_LIBRARY = "libhvdtrain.so"
_FILE = "build.json"


@dataclasses.dataclass(frozen=True)
class BuildRecord:
    """What a package was built for and with.

    Attributes:
        version: of the package, such as "0.28.1+hvdtrain.1.tf221.openmpi4".
        tensorflow: the version of TensorFlow that it was compiled against.
        flags: TensorFlow's compile flags, without directories.
        compiler: the first line that the compiler prints of its version.
        mpi: the library's name and version, or "" for a package without MPI.
        settings: the variables HOROVOD_* of the build.
        sources: digests by file, of the patches or of the sources.
    """

    version: str
    tensorflow: str
    flags: tuple[str, ...] = ()
    compiler: str = ""
    mpi: str = ""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)


def find_package(name: str) -> pathlib.Path | None:
    """Return the directory of an installed package, without importing it."""
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(name)
    return pathlib.Path(spec.origin).parent if spec and spec.origin else None


def read(package: pathlib.Path) -> BuildRecord | None:
    """Return the record in the directory of a package; None if it has none."""
    file = package / _FILE
    if not file.exists():
        return None
    values = json.loads(file.read_text())
    return BuildRecord(**{**values, "flags": tuple(values["flags"])})


def read_installed(name: str) -> BuildRecord | None:
    """Return the record of an installed package; None without a package or a record."""
    package = find_package(name)
    return read(package) if package else None


def write(package: pathlib.Path, record: BuildRecord) -> None:
    """Write the record into the directory of a package."""
    text = json.dumps(dataclasses.asdict(record), indent=2)
    (package / _FILE).write_text(text + "\n")
