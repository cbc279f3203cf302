"""The index pages of a directory of wheels, and what pip finds through them."""

import functools
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import zipfile

import pytest

from hvdtrain.install import record, wheel_index, wheels
from hvdtrain.install.target import Target

# The real version: its plus sign is quoted in links.
VERSION = wheels.version(record.HOROVOD, Target("2.21.0", None, {}))
WHEEL = f"horovod-{VERSION}-py3-none-any.whl"


@pytest.mark.parametrize(
    ("name", "project"),
    [
        ("hvdtrain-0.1.0-py3-none-any.whl", "hvdtrain"),
        ("hvdtrain-0.1.0.tar.gz", "hvdtrain"),
        ("hvdtrain_native-0.1.0+tf221-py3-none-any.whl", "hvdtrain-native"),
        ("Some.Thing__b-1.tar.gz", "some-thing-b"),
    ],
)
def test_the_project_of_a_file(name, project):
    assert wheel_index.project(name) == project


@pytest.fixture
def directory(tmp_path):
    """A directory with one wheel that pip accepts, and its pages."""
    files = tmp_path / "release"
    files.mkdir()
    info = f"horovod-{VERSION}.dist-info"
    with zipfile.ZipFile(files / WHEEL, "w") as wheel:
        metadata = f"Metadata-Version: 2.1\nName: horovod\nVersion: {VERSION}\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{info}/RECORD", "")
    (files / "notes.txt").write_text("no package")
    wheel_index.write(files)
    return files


def test_the_files_of_an_index(directory):
    files = {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
    assert files == {
        *(WHEEL, "notes.txt", "SHA256SUMS", "index.html"),
        *("simple/index.html", "simple/horovod/index.html"),
    }
    digest = hashlib.sha256((directory / WHEEL).read_bytes()).hexdigest()
    assert (directory / "SHA256SUMS").read_text() == f"{digest}  {WHEEL}\n"
    link = f'href="../../{WHEEL.replace("+", "%2B")}#sha256={digest}"'
    assert link in (directory / "simple/horovod/index.html").read_text()
    assert 'href="horovod/"' in (directory / "simple/index.html").read_text()


@pytest.fixture
def server(directory):
    """The address of a web server for the directory."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    serve = functools.partial(Handler, directory=str(directory))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def download(destination, *options):
    """Calls pip, which decides what a valid index is; returns what it printed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--retries=0"),
            *("--disable-pip-version-check", "--dest", destination, *options),
            f"horovod=={VERSION}",
        ],
        env=environment | {"no_proxy": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def test_pip_reads_the_pages_over_http(directory, server, tmp_path):
    for name, options in {
        "links": ("--no-index", "--find-links", f"{server}/"),
        "index": ("--index-url", f"{server}/simple"),
    }.items():
        printed = download(tmp_path / name, *options)
        assert (tmp_path / name / WHEEL).exists(), printed
    # The digests of the pages are checked.
    with (directory / WHEEL).open("ab") as wheel:
        wheel.write(b"changed")
    printed = download(tmp_path / "changed", "--index-url", f"{server}/simple")
    assert "HASHES" in printed
    assert not (tmp_path / "changed" / WHEEL).exists()


def test_pip_reads_the_directory_and_its_pages_as_files(directory, tmp_path):
    for name, options in {
        "directory": ("--no-index", "--find-links", directory),
        "page": ("--no-index", "--find-links", directory / "index.html"),
        "index": ("--index-url", directory / "simple"),
    }.items():
        printed = download(tmp_path / name, *options)
        assert (tmp_path / name / WHEEL).exists(), printed


def test_a_new_wheel_is_added_to_the_pages(directory):
    (directory / "hvdtrain-0.1.0-py3-none-any.whl").write_bytes(b"")
    wheel_index.write(directory)
    page = (directory / "index.html").read_text()
    assert page.count("#sha256=") == 2
    assert (directory / "simple/hvdtrain/index.html").exists()
    assert len((directory / "SHA256SUMS").read_text().splitlines()) == 2
