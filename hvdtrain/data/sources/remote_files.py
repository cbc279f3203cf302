"""Files in object stores: found by patterns, read by ranges, checked for changes."""

import concurrent.futures
import dataclasses
import datetime
import glob
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from hvdtrain.data.formats import DataError, changed
from hvdtrain.job.files import path_or_address
from hvdtrain.stores import object_store

# Ranges so near to each other are one request: a request takes longer than to send it.
GAP_BYTES = 1 << 14
# A request for more is split into several at a time.
_PART_BYTES = 1 << 22
_THREADS = 16
# Also of a file whose records are still read: its time is a small share of them.
CHECK_SECONDS = 60.0
# Keys of fsspec's descriptions of a file whose values change when it is written again,
# the surest first: of Google's store, of S3, of others.
_TAGS = ("generation", "ETag", "etag", "mtime", "LastModified", "modified", "created")

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

    As on a disk, `*` does not match names that begin with a dot. Directories, which
    stores only list, do not match.
    """
    filesystem, key = open_store(address)
    # A name may contain the characters of a pattern.
    info = _call(filesystem, address, "info", key)
    found = {key: info} if info else {}
    if not found and glob.has_magic(key):
        found = _call(filesystem, address, "glob", key, detail=True) or {}
        if not key.rpartition("/")[2].startswith("."):
            found = {k: found[k] for k in found if "/." not in k[k.rfind("/") :]}
    found = {k: info for k, info in found.items() if info["type"] == "file"}
    if not found:
        raise DataError(
            f"Received {address}, which matches no file; expected the address of a "
            "file or a pattern such as gs://bucket/train-*: check the bucket and the "
            "name."
        )
    return [_describe(filesystem, found[name]) for name in sorted(found)]


def open_store(address: str) -> tuple[Any, str]:
    """Apply `object_store.open_filesystem`, and raise `DataError` for its errors."""
    try:
        return object_store.open_filesystem(path_or_address(address))
    except object_store.StoreError as error:
        raise DataError(str(error)) from None


def list_directory(filesystem: Any, key: str, kind: str) -> dict[str, int]:
    """Return the names of "file" or "directory" in a directory, and their sizes."""
    address = filesystem.unstrip_protocol(key)
    infos = _call(filesystem, address, "ls", key, detail=True)
    if infos is None:
        raise DataError(
            f"Received {address}, which does not exist; expected a directory: check "
            "the bucket and the name."
        )
    # Some stores list the marker of an empty directory in it.
    names = {info["name"].rstrip("/"): info for info in infos if info["type"] == kind}
    names.pop(key.rstrip("/"), None)
    return {n.rpartition("/")[2]: int(i["size"] or 0) for n, i in names.items()}


def read_ranges(ranges: Sequence[Range]) -> list[bytes]:
    """Return the bytes of ranges of any files, read by concurrent requests.

    Ranges of a file with up to `GAP_BYTES` between them are one request.
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
    found: list[Any] = [b""] * len(ranges)
    missing = [number for number, (_, start, end) in enumerate(ranges) if end > start]

    def read_missing() -> None:
        nonlocal missing
        # Files of one source may be in several stores.
        for _, numbers in itertools.groupby(
            missing, lambda number: id(ranges[number][0].filesystem)
        ):
            some = list(numbers)
            files, starts, ends = zip(*(ranges[number] for number in some), strict=True)
            keys = [file.key for file in files]
            results = files[0].filesystem.cat_ranges(
                keys, list(starts), list(ends), on_error="return"
            )
            for number, result in zip(some, results, strict=True):
                _, start, end = ranges[number]
                if isinstance(result, bytes) and len(result) != end - start:
                    # A connection may end early without an error.
                    expected = f"expected {end - start}"
                    result = OSError(f"received {len(result)} bytes, {expected}")
                found[number] = result
        missing = [number for number in missing if not isinstance(found[number], bytes)]
        if missing:
            raise found[missing[0]]

    try:
        object_store.retried(read_missing)
    except Exception as error:
        file = ranges[missing[0]][0]
        # The store's error for a file that is shorter now does not say so.
        file.check()
        raise _unreadable(file.path, error) from None
    return found


def check_again(
    files: Iterable[RemoteFile], checked: dict[RemoteFile, float], *, now: float
) -> None:
    """Check the files that were not checked for `CHECK_SECONDS`, by `checked`."""
    due = [f for f in files if now - checked.setdefault(f, now) > CHECK_SECONDS]
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
        return object_store.retried(call)
    except FileNotFoundError:
        return None
    except Exception as error:
        raise _unreadable(address, error) from None


def _unreadable(address: str, error: BaseException) -> DataError:
    reason = object_store.reason_of(error)
    return DataError(
        f"Cannot read {address}: {reason}; expected a store that responds, and "
        "credentials that may read it."
    )
