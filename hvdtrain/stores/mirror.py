"""The files of a run that are not checkpoints, from a local directory to a store.

Logs are appended to, and exports are directories that are renamed: what a store does
not have. They are written to a directory of this machine, as in any run, and uploaded
when they have changed: every some seconds, and at the end of the run.
"""

import atexit
import contextlib
import os
import pathlib
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator

from hvdtrain.job import JobError
from hvdtrain.job.files import (
    is_address,
    local_path,
    make_directory,
    one_line_errors,
    path_or_address,
)
from hvdtrain.stores.object_store import (
    DeletionDeniedError,
    ObjectStore,
    StoreError,
)

_EVERY_SECONDS = 30.0
# Checkpoints are uploaded by themselves; `flight` is of the hosts that run now.
_NOT_MIRRORED = ("checkpoints", "flight")
# What a continued run appends to, or removes.
_RESUMED_FILES = ("log.jsonl", "summary.json")
_EXPORT = "export"
# As `training.exporting` names the files of an export; others are a user's.
_EXPORTED = re.compile(rf"{_EXPORT}/[^/]+/step-\d{{8,}}/.+")
# In a local_dir: has the address whose files are there.
_CLAIM = "model_dir"

_mirrors: dict[str, "Mirror"] = {}


def local_directory(
    model_dir: str | os.PathLike[str], local_dir: str | None = None
) -> pathlib.Path:
    """Return where this process writes the files of a run: `model_dir`, if it is local.

    For an address, it is `local_dir`, or a directory that ends with the process; later
    calls without `local_dir` return the same. For the chief.

    Raises:
        JobError: `local_dir` cannot be written, has the files of another run, or is
            another one than before.
        StoreError: the store cannot be read.
    """
    if not is_address(model_dir):
        return pathlib.Path(local_path(model_dir))
    return mirror_of(model_dir, local_dir).directory


def mirror_of(
    address: str | os.PathLike[str], local_dir: str | None = None
) -> "Mirror":
    """Return the mirror of this process with an address; see `local_directory`."""
    address = path_or_address(address).rstrip("/")
    if address not in _mirrors:
        store = ObjectStore(address)
        if local_dir:
            directory = pathlib.Path(local_dir)
            _claim(directory, address)
        else:
            directory = pathlib.Path(tempfile.mkdtemp(prefix="hvdtrain-run-"))
        mirror = Mirror(directory, store)
        if not local_dir:
            atexit.register(mirror.remove)
        mirror.fetch()
        _mirrors[address] = mirror
    directory = _mirrors[address].directory
    if local_dir and pathlib.Path(local_dir) != directory:
        raise JobError(
            f"Received local_dir={local_dir} for {address}, whose files this process "
            f"writes to {directory}; expected one local_dir: pass it to "
            "make_observers, too."
        )
    return _mirrors[address]


@contextlib.contextmanager
def downloaded(model_dir: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yield a directory with the log of a run, downloaded where that is an address."""
    if not is_address(model_dir):
        yield pathlib.Path(local_path(model_dir))
        return
    store = ObjectStore(path_or_address(model_dir))
    with tempfile.TemporaryDirectory(prefix="hvdtrain-") as directory:
        for name in _RESUMED_FILES:
            with contextlib.suppress(FileNotFoundError):
                store.download(name, pathlib.Path(directory, name))
        yield pathlib.Path(directory)


def _claim(directory: pathlib.Path, address: str) -> None:
    """Note in a local directory the address whose files it has."""
    path = directory / _CLAIM
    with one_line_errors(
        f"write {path}", remedy="expected a local_dir that this user can write"
    ):
        make_directory(directory)
        if path.exists() and (other := path.read_text().strip()) != address:
            raise JobError(
                f"Received local_dir={directory}, which has files of {other}; expected "
                f"a directory of {address} alone: choose another one."
            )
        path.write_text(f"{address}\n")


class Mirror:
    """Uploads the changed files of `directory`.

    An export is complete or absent: its `saved_model.pb`, without which it cannot be
    loaded, is uploaded last and deleted first. So is summary.json of a run.
    """

    def __init__(self, directory: pathlib.Path, store: ObjectStore) -> None:
        self.directory = directory
        self.store = store
        self._uploaded: dict[str, tuple[int, int]] = {}
        # Objects that are deleted once their file, or their export, is removed.
        self._remote: set[str] = set()
        self._lock = threading.Lock()
        self._is_ended = threading.Event()
        self._is_kept = False

    def remove(self) -> None:
        """Remove the directory, unless it has files that could not be uploaded."""
        if not self._is_kept:
            shutil.rmtree(self.directory, ignore_errors=True)

    def fetch(self) -> None:
        """Download the log; make empty directories in place of complete exports.

        To be called again when the lease was taken: another job has written until then.
        """
        sizes = self.store.sizes()
        for name in _RESUMED_FILES:
            path = self.directory / name
            # A killed run may have appended lines that it did not upload.
            if name in sizes and not (path.exists() and _stamp(path)[0] >= sizes[name]):
                self.store.download(name, path)
                self._uploaded[name] = _stamp(path)
        exported = {name: _export_of(name) for name in sizes if _EXPORTED.match(name)}
        complete = {
            export
            for export in exported.values()
            if f"{export}/saved_model.pb" in sizes
        }
        for export in complete:
            (self.directory / export).mkdir(parents=True, exist_ok=True)
        self._remote.update(sizes.keys() & _RESUMED_FILES)
        # An incomplete export is a killed upload or a copy in progress: a complete one
        # of a later step supersedes it.
        self._remote.update(
            name
            for name, export in exported.items()
            if export in complete or any(_is_later(one, export) for one in complete)
        )

    def sync(self, check_writer: Callable[[], object] = lambda: None) -> None:
        """Upload and delete what has changed since the last call.

        Args:
            check_writer: called before; raises an error if another job writes by now.

        Raises:
            JobError: the store does not respond, or refuses it. The files are kept.
        """
        self._is_kept = True
        try:
            check_writer()
            with self._lock:
                self._upload_changed()
                self._delete_removed()
        except JobError as error:
            text = f"{error} The files are kept in {self.directory}."
            raise type(error)(text) from None
        self._is_kept = False

    def _upload_changed(self) -> None:
        names = {name: path for path, name in self._files()}
        for name in sorted(names, key=_complete_last):
            path = names[name]
            # A file may be removed meanwhile.
            with contextlib.suppress(FileNotFoundError):
                stamp = _stamp(path)
                if self._uploaded.get(name) != stamp:
                    try:
                        self.store.upload(path, name)
                    except StoreError:
                        path.stat()
                        raise
                    self._uploaded[name] = stamp
                    self._remote.add(name)

    def _delete_removed(self) -> None:
        for name in sorted(self._remote, key=_complete_last, reverse=True):
            if not (self.directory / _export_of(name)).exists():
                try:
                    self.store.delete([name])
                except DeletionDeniedError as error:
                    # What this run writes under the name replaces it.
                    warnings.warn(str(error), stacklevel=2)
                self._remote.remove(name)
                self._uploaded.pop(name, None)

    @contextlib.contextmanager
    def uploading(self, check_writer: Callable[[], object]) -> Iterator[None]:
        """Call `sync` every some seconds within the block, and at its end.

        Args:
            check_writer: see `sync`.

        Raises:
            JobError: what has changed last could not be uploaded.
        """
        self._is_ended.clear()
        thread = threading.Thread(target=self._run, args=(check_writer,), daemon=True)
        thread.start()
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            self._is_ended.set()
            thread.join()
            try:
                self.sync(check_writer)
            except JobError as error:
                if not has_failed:
                    raise
                warnings.warn(str(error), stacklevel=2)

    def _run(self, check_writer: Callable[[], object]) -> None:
        has_warned = False
        while not self._is_ended.wait(_EVERY_SECONDS):
            try:
                self.sync(check_writer)
            except JobError as error:
                if not has_warned:
                    has_warned = True
                    warnings.warn(f"{error} Training continues.", stacklevel=2)

    def _files(self) -> Iterator[tuple[pathlib.Path, str]]:
        for parent, directories, names in os.walk(self.directory):
            relative = pathlib.Path(parent).relative_to(self.directory)
            # Hidden ones are locks, and files that are not complete.
            directories[:] = [
                name
                for name in directories
                if not name.startswith(".")
                and (relative / name).as_posix() not in _NOT_MIRRORED
            ]
            for name in names:
                path = relative / name
                if not name.startswith(".") and path.as_posix() != _CLAIM:
                    yield self.directory / path, path.as_posix()


def _stamp(path: pathlib.Path) -> tuple[int, int]:
    """Return the size of a file, and what changes when it is written again."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _export_of(name: str) -> str:
    """Return the export that a file belongs to, or the name of another file."""
    parts = name.split("/")
    return "/".join(parts[:3]) if parts[0] == _EXPORT else name


def _is_later(export: str, other: str) -> bool:
    """Return whether an export is one of the same exporter, after a later step."""
    (exporter, step), (of_other, other_step) = map(os.path.split, (export, other))
    return exporter == of_other and (len(step), step) > (len(other_step), other_step)


def _complete_last(name: str) -> tuple[bool, str]:
    """Return a key that sorts a file without which others cannot be used to the end."""
    return name.endswith((".json", "/saved_model.pb")), name
