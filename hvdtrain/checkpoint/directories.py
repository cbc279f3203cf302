"""Where the files of checkpoints are: a directory on a disk, or below an address.

In both, a file is complete or absent, and reading a missing one is `FileNotFoundError`.
With `reads_late`, so may be reading a file that was just written.
"""

import errno
import functools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from hvdtrain.job.files import (
    atomic_write,
    is_address,
    path_or_address,
    remove_partial,
)
from hvdtrain.stores.object_store import ObjectStore


class DiskDirectory:
    """A directory of a file system."""

    reads_late = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)

    def __str__(self) -> str:
        return str(self._path)

    def path(self, name: str) -> pathlib.Path:
        """Return the path of a file, for messages."""
        return self._path / name

    def make(self) -> None:
        """Create the directory where it does not exist, in one that does."""
        if self._path.is_symlink() and not self._path.exists():
            # Of a disk that is not mounted, for example.
            target = f"it is a link to {self._path.readlink()}, which does not exist"
            raise FileNotFoundError(errno.ENOENT, target)
        # Without parents: a run directory that was removed is not made again.
        self._path.mkdir(exist_ok=True)

    def names(self) -> list[str]:
        return os.listdir(self._path)

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files by name."""
        sizes = {}
        with os.scandir(self._path) as entries:
            for entry in entries:
                # Another process may have renamed its temporary file.
                with suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def read(self, name: str) -> str:
        return self.path(name).read_text()

    @contextmanager
    def open(self, name: str) -> Iterator[pathlib.Path]:
        """Yield a path on this machine that has the content of a file."""
        yield self.path(name)

    def write(self, name: str) -> AbstractContextManager[pathlib.Path]:
        """Return a context with a path whose content becomes the file at its end."""
        return atomic_write(self.path(name))

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)

    def prepare(self) -> None:
        """Create the directory, delete what killed writers have left, and try a write.

        For the only writer. A job whose writes all fail would lose its work.
        """
        self.make()
        remove_partial(self._path)
        # safetensors writes under a temporary name of its own.
        for left in self._path.glob(f".tmp{'[A-Za-z0-9]' * 6}"):
            if left.is_file():
                left.unlink(missing_ok=True)
        # With the name of a partial file: the next start deletes it after a kill.
        probe = self.path(".partial-00000000-probe")
        with atomic_write(probe) as temporary:
            temporary.touch()
        probe.unlink()


class StoreDirectory:
    """The objects below an address, which are uploaded from temporary files.

    Args:
        check_writer: called before a JSON file is written, and before a file is
            deleted; raises an error if another job writes to the address by now.
    """

    reads_late = True

    def __init__(
        self, address: str, *, check_writer: Callable[[], object] | None = None
    ) -> None:
        self._address = address
        self._check_writer = check_writer or (lambda: None)

    @functools.cached_property
    def _store(self) -> ObjectStore:
        # Not on ranks that only name the directory: they may have no credentials.
        return ObjectStore(self._address)

    def __str__(self) -> str:
        return self._address

    def path(self, name: str) -> str:
        return f"{self._address}/{name}"

    def make(self) -> None:
        """Do nothing: a store has no directories."""

    def names(self) -> list[str]:
        return list(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the objects by name."""
        return self._store.sizes(depth=1)

    def read(self, name: str) -> str:
        return self._store.read(name).decode()

    @contextmanager
    def open(self, name: str) -> Iterator[pathlib.Path]:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-") as directory:
            path = pathlib.Path(directory, name)
            self._store.download(name, path)
            yield path

    @contextmanager
    def write(self, name: str) -> Iterator[pathlib.Path]:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-") as directory:
            path = pathlib.Path(directory, name)
            yield path
            if not name.endswith(".json"):
                self._store.upload(path, name)
                return
            self._check_writer()
            content = path.read_bytes()
            # Conditional: a job that loses its lease after the check replaces no
            # checkpoint of its successor, unless it does so after the second check.
            if not self._store.create(name, content):
                self._check_writer()
                self._store.write(name, content)

    def delete(self, name: str) -> None:
        # Another job may use an object that none of this job's uses.
        self._check_writer()
        self._store.delete([name])

    def prepare(self) -> None:
        """Do nothing: `Lease` writes, and aborts what the last writer has left."""


Directory = DiskDirectory | StoreDirectory


def directory_of(
    path: str | os.PathLike[str], *, check_writer: Callable[[], object] | None = None
) -> Directory:
    """Return the directory of a path or of an address; see `StoreDirectory`."""
    text = path_or_address(path)
    if is_address(text):
        return StoreDirectory(text, check_writer=check_writer)
    return DiskDirectory(text)
