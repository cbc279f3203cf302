"""Index pages and checksums of a directory of wheels, as pip reads them.

`index.html` links all packages, for `pip --find-links` and HVDTRAIN_WHEELS over http.
`simple/` has the layout of PEP 503, for `pip --index-url`. `SHA256SUMS` is for
`sha256sum --check`. All links are relative, so that the directory can be moved and
served as it is.
"""

import hashlib
import html
import os
import pathlib
import re
import urllib.parse
from collections.abc import Iterable

_SUFFIXES = (".whl", ".tar.gz")
_PAGE = """\
<!DOCTYPE html>
<html>
<head>
<meta charset="utf-8">
<meta name="pypi:repository-version" content="1.0">
<title>{title}</title>
</head>
<body>
{links}
</body>
</html>
"""


def write(directory: pathlib.Path) -> None:
    """Write the pages and checksums of the packages in a directory."""
    files = [f for f in sorted(directory.iterdir()) if f.name.endswith(_SUFFIXES)]
    digests = {file.name: _sha256(file) for file in files}
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    _replace(directory / "SHA256SUMS", sums)
    _replace(directory / "index.html", _page("hvdtrain", _links("", digests)))
    by_project: dict[str, dict[str, str]] = {}
    for name, digest in digests.items():
        by_project.setdefault(project(name), {})[name] = digest
    simple = directory / "simple"
    projects = [(f"{name}/", name) for name in sorted(by_project)]
    _replace(simple / "index.html", _page("Simple index", projects))
    for name, its_digests in by_project.items():
        page = _page(f"Links for {name}", _links("../../", its_digests))
        _replace(simple / name / "index.html", page)


def project(file_name: str) -> str:
    """Return the normalized name of a package's project.

    Args:
        file_name: of a wheel or of a source archive, such as
            "hvdtrain_native-0.1.0+tf221-py3-none-linux_x86_64.whl".
    """
    if file_name.endswith(".whl"):
        name = file_name.partition("-")[0]
    else:
        name = file_name.rpartition("-")[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def _links(prefix: str, digests: dict[str, str]) -> list[tuple[str, str]]:
    return [
        (f"{prefix}{urllib.parse.quote(name)}#sha256={digest}", name)
        for name, digest in digests.items()
    ]


def _page(title: str, links: Iterable[tuple[str, str]]) -> str:
    anchors = [
        f'<a href="{html.escape(address)}">{html.escape(text)}</a><br>'
        for address, text in links
    ]
    return _PAGE.format(title=html.escape(title), links="\n".join(anchors))


def _sha256(file: pathlib.Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _replace(file: pathlib.Path, text: str) -> None:
    """Replace a file at once: others may read the directory meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(file)
