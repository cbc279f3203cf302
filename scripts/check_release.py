"""Checks the files of a release; called by release.sh.

python scripts/check_release.py DIR TEXT...

The wheels of Horovod and of the native operations run on other machines: libraries
search only directories that are relative to them, contain no debugging symbols and none
of the texts (directories of the machine that built them), and use no symbols that are
newer than the C library 2.28, by the tag that auditwheel gave them. All packages have a
description and a license. The source archive has all files of the package.
"""

import io
import pathlib
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import BytesParser

from elftools.elf.elffile import ELFFile

_BINARY = ("horovod-", "hvdtrain_native-")
_C_LIBRARY = re.compile(r"manylinux_2_(\d+)_")
# As the wheel of Open MPI; docs/installing.md names the systems.
_NEWEST = 28


def main() -> None:
    """Exit with an error that names each file that fails a check."""
    directory = pathlib.Path(sys.argv[1])
    texts = [text.encode() for text in sys.argv[2:]]
    errors = []
    for wheel in sorted(directory.glob("*.whl")):
        with zipfile.ZipFile(wheel) as opened:
            found = [*_metadata_errors(opened)]
            if wheel.name.startswith(_BINARY):
                found += _binary_errors(wheel, opened, texts)
        errors += [f"{wheel.name}: {error}" for error in found]
    errors += _source_errors(directory)
    if errors:
        sys.exit("\n".join(errors))


def _metadata_errors(wheel: zipfile.ZipFile) -> Iterator[str]:
    names = [name for name in wheel.namelist() if ".dist-info/" in name]
    [metadata] = [name for name in names if name.endswith("/METADATA")]
    fields = BytesParser().parsebytes(wheel.read(metadata))
    for field in ("Summary", "License", "License-File"):
        # License-Expression is the newer name of License.
        if not fields[field] and not fields[f"{field}-Expression"]:
            yield f"no {field} in its metadata"
    for license_file in fields.get_all("License-File", []):
        if not any(name.endswith(f"/licenses/{license_file}") for name in names):
            yield f"no {license_file}"


def _binary_errors(
    path: pathlib.Path, wheel: zipfile.ZipFile, texts: list[bytes]
) -> Iterator[str]:
    versions = [int(minor) for minor in _C_LIBRARY.findall(path.name)]
    if not versions or min(versions) > _NEWEST:
        yield f"expected the tag manylinux_2_{_NEWEST} or that of an older C library"
    libraries = [name for name in wheel.namelist() if name.endswith(".so")]
    if not libraries:
        yield "no library"
    for name in wheel.namelist():
        content = wheel.read(name)
        for text in texts:
            if text in content:
                yield f"{name} contains {text.decode()}"
        if name in libraries:
            for error in _library_errors(content):
                yield f"{name} {error}"


def _library_errors(content: bytes) -> Iterator[str]:
    library = ELFFile(io.BytesIO(content))
    if any(s.name.startswith(".debug") for s in library.iter_sections()):
        yield "has debugging symbols"
    for tag in library.get_section_by_name(".dynamic").iter_tags():
        if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
            path = getattr(tag, "runpath", None) or tag.rpath
            for folder in path.split(":"):
                if not folder.startswith("$ORIGIN"):
                    yield f"searches {folder}"


def _source_errors(directory: pathlib.Path) -> Iterator[str]:
    [archive] = directory.glob("hvdtrain-*.tar.gz")
    [wheel] = directory.glob("hvdtrain-*.whl")
    with tarfile.open(archive) as sources, zipfile.ZipFile(wheel) as package:
        # Without the first directory, hvdtrain-VERSION/.
        inside = {name.partition("/")[2] for name in sources.getnames()}
        for name in package.namelist():
            if name.startswith("hvdtrain/") and name not in inside:
                yield f"{archive.name}: no {name}"


if __name__ == "__main__":
    main()
