"""Files in object stores: found by patterns, read by ranges, checked for changes."""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import glob
import importlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from hvdtrain.data.formats import DataError, changed
from hvdtrain.stores.object_store import (
    StoreError,
    open_filesystem,
    reason_of,
    retried,
)

# Ranges so near to each other are one request: about what a store sends in the time
# of a request of its own.
GAP_BYTES = 1 << 14
# A request for more is split into several at a time.
_PART_BYTES = 1 << 22
_THREADS = 16
# Also of a file whose records are still read: its time is a small share of them.
CHECK_SECONDS = 60.0
# Keys of fsspec's descriptions of a file whose values change when it is written again,
# the surest first: of Google's store, of S3, of others.
_TAGS = (
    *("generation", "ETag", "etag", "mtime", "last_modified", "LastModified"),
    *("updated", "modified", "created"),
)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file of an fsspec file system, with what changes when it is written again.

    Attributes:
        path: the address of the file.
        key: the path in the file system.
        tag: the generation, the ETag or the time of the last write; "" if not known.
    """

    filesystem: Any = dataclasses.field(compare=False, repr=False)
    path: str
    key: str
    size: int
    tag: str

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.key.rpartition("/")[2]

    def identity(self) -> tuple[str, int, str]:
        """Return what names the content in the store, as values for JSON."""
        return self.path, self.size, self.tag

    def check(self) -> None:
        """Raise `DataError` if the file has changed."""
        info = _call(self.filesystem, self.path, "info", self.key)
        found = info and _describe(self.filesystem, info)
        if not found or self != dataclasses.replace(found, tag=self.tag and found.tag):
            raise changed(self.path)

    def read(self, start: int = 0, end: int | None = None) -> bytes:
        """Return a range of the file, by concurrent requests where it is large."""
        end = self.size if end is None else end
        bounds = [*range(start, end, _PART_BYTES), end]
        return b"".join(_fetch([(self, *part) for part in itertools.pairwise(bounds)]))


Range = tuple[RemoteFile, int, int]


def find_remote_files(address: str) -> list[RemoteFile]:
    """Return the files that an address or a pattern of addresses names, sorted.

    As on a disk, `*` does not match names that begin with a dot.

    Raises:
        DataError: nothing matches, a directory matches, or the store does not respond.
    """
    filesystem, key = open_store(address)
    infos = []
    # A name may contain the characters of a pattern.
    if info := _call(filesystem, address, "info", key):
        infos = [info]
    elif glob.has_magic(key):
        found = _call(filesystem, address, "glob", key, detail=True) or {}
        is_hidden = key.rpartition("/")[2].startswith(".")
        infos = [
            found[name]
            for name in sorted(found)
            if is_hidden or not name.rpartition("/")[2].startswith(".")
        ]
    for info in infos:
        if info["type"] == "directory":
            directory = filesystem.unstrip_protocol(info["name"].rstrip("/"))
            raise DataError(
                f"Received the directory {directory}; expected files: name them by a "
                f"pattern such as {directory}/*."
            )
    if not infos:
        raise DataError(
            f"Received {address}, which matches no file; expected the address of a "
            "file or a pattern such as gs://bucket/train-*: check the bucket and the "
            "name."
        )
    return [_describe(filesystem, info) for info in infos]


def open_store(address: str) -> tuple[Any, str]:
    """Apply `open_filesystem`, with `DataError` in place of `StoreError`."""
    if "://" not in address:
        # pathlib has removed the other slash.
        address = address.replace(":/", "://", 1)
    try:
        return open_filesystem(address)
    except StoreError as error:
        raise DataError(str(error)) from None


def list_directory(filesystem: Any, key: str) -> list[dict[str, Any]]:
    """Return what a directory of a store contains, as fsspec describes it.

    Raises:
        DataError: there is no such directory, or the store does not respond.
    """
    address = filesystem.unstrip_protocol(key)
    infos = _call(filesystem, address, "ls", key, detail=True)
    if infos is None:
        raise DataError(
            f"Received {address}, which does not exist; expected a directory: check "
            "the bucket and the name."
        )
    # Some stores list the marker of an empty directory in it.
    return [info for info in infos if info["name"].rstrip("/") != key.rstrip("/")]


def read_ranges(ranges: Sequence[Range]) -> list[bytes]:
    """Return the bytes of ranges of any files, read by concurrent requests.

    Ranges of a file with up to `GAP_BYTES` between them are one request.

    Raises:
        DataError: a file has changed, cannot be read, or the store does not respond.
    """
    merge = importlib.import_module("fsspec.utils").merge_offset_ranges
    files = {file.path: file for file, _, _ in ranges}
    paths, starts, ends = merge(
        [file.path for file, _, _ in ranges],
        [start for _, start, _ in ranges],
        [end for _, _, end in ranges],
        max_gap=GAP_BYTES,
    )
    blocks = [(files[p], s, e) for p, s, e in zip(paths, starts, ends, strict=True)]
    contents = _fetch(blocks)
    found = [b""] * len(ranges)
    block = 0
    # Blocks are sorted by path and start.
    order = sorted(range(len(ranges)), key=lambda i: (ranges[i][0].path, ranges[i][1]))
    for number in order:
        file, start, end = ranges[number]
        while file.path != paths[block] or end > ends[block]:
            block += 1
        first = starts[block]
        found[number] = contents[block][start - first : end - first]
    return found


def _fetch(ranges: Sequence[Range]) -> list[bytes]:
    """Return the bytes of ranges, each by a request of its own, all at a time."""
    found: list[Any] = [None if end > start else b"" for _, start, end in ranges]
    filesystems = {id(file.filesystem): file.filesystem for file, _, _ in ranges}
    for filesystem in filesystems.values():

        def read_missing(filesystem: Any = filesystem) -> None:
            missing = [
                number
                for number, (file, _, _) in enumerate(ranges)
                if file.filesystem is filesystem
                and not isinstance(found[number], bytes)
            ]
            some = [ranges[number] for number in missing]
            results = filesystem.cat_ranges(
                [file.key for file, _, _ in some],
                [start for _, start, _ in some],
                [end for _, _, end in some],
                on_error="return",
            )
            for number, result in zip(missing, results, strict=True):
                found[number] = result
            for result in results:
                if isinstance(result, BaseException):
                    raise result

        # An error is in the results, with its file.
        with contextlib.suppress(Exception):
            retried(read_missing)
    for (file, start, end), result in zip(ranges, found, strict=True):
        if isinstance(result, FileNotFoundError):
            raise changed(file.path)
        if not isinstance(result, bytes):
            # A shorter file answers with an error of the provider's library.
            file.check()
            raise _unreadable(file.path, result)
        if len(result) != end - start:
            raise changed(file.path)
    return found


def check_again(
    files: Iterable[RemoteFile],
    checked: dict[RemoteFile, float],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Check the files whose version was not compared for `CHECK_SECONDS`.

    Args:
        checked: by file, the time of its last check, or of the first call with it;
            changed in place.

    Raises:
        DataError: a file has changed.
    """
    now = clock()
    ages = {file: now - checked.setdefault(file, now) for file in files}
    due = [file for file, seconds in ages.items() if seconds > CHECK_SECONDS]
    # First, so that other threads do not check them as well.
    checked.update(dict.fromkeys(due, now))
    for _ in map_concurrently(RemoteFile.check, due):
        pass


def map_concurrently(
    function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[_Result]:
    """Apply a function that waits for a store to items, several at a time, in order."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(function, items)


def _describe(filesystem: Any, info: dict[str, Any]) -> RemoteFile:
    key = info["name"]
    tag = next((info[tag] for tag in _TAGS if info.get(tag)), "")
    # A listing may have a number of seconds where a description has a date.
    tag = tag.timestamp() if isinstance(tag, datetime.datetime) else tag
    path = filesystem.unstrip_protocol(key)
    return RemoteFile(filesystem, path, key, int(info["size"]), str(tag))


def _call(filesystem: Any, address: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method that lists files, retried; None if there is no such file."""

    def call() -> Any:
        # Listings would take more memory than the names, and hide changes.
        filesystem.invalidate_cache()
        try:
            return getattr(filesystem, method)(*args, **kwargs)
        finally:
            filesystem.invalidate_cache()

    try:
        return retried(call)
    except FileNotFoundError:
        return None
    except Exception as error:
        raise _unreadable(address, error) from None


def _unreadable(address: str, error: BaseException) -> DataError:
    return DataError(
        f"Cannot read {address}: {reason_of(error)}; expected a store that responds, "
        "and credentials that may read it."
    )
