"""Indexes of files: computed by one process of a node, and memory-mapped by all."""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from hvdtrain.data.download import default_cache_dir
from hvdtrain.data.sources.mapped_file import map_file
from hvdtrain.job.files import atomic_write
from hvdtrain.open_directory import open_regular

_Item = TypeVar("_Item")


def digest(*values: Any) -> str:
    """Return the name of an index: a digest of values for JSON on which it depends."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(name: str) -> np.ndarray | None:
    """Return an index from the cache, memory-mapped, or None without one: int64."""
    try:
        content = map_file(_path(name)).view(np.int64)
    # ValueError: the number of bytes is no multiple of 8.
    except (OSError, ValueError):
        return None
    # The first number counts the others: a file system that is full, or a crash, may
    # have truncated the file.
    return content[1:] if content[0] == len(content) - 1 else None


def cached(
    name: str, compute: Callable[[], np.ndarray], *, blocking: bool = True
) -> np.ndarray:
    """Return an index from the cache, or compute and store it.

    Of the processes that share a cache, one computes it. Where the cache cannot be
    written, each process keeps the index in memory.

    Args:
        name: what `digest` returned for all that the index depends on.
        compute: returns the index, int64 of one dimension.
        blocking: whether to block while another process computes it.

    Raises:
        BlockingIOError: another process computes it, and `blocking` is False.
    """
    if (index := load(name)) is not None:
        return index
    computed = None
    try:
        with locked(_path(name), blocking=blocking):
            # Another process may have written it before the lock was acquired.
            if (index := load(name)) is None:
                computed = compute()
                with atomic_write(_path(name)) as path, open(path, "wb") as file:
                    np.array([len(computed)]).tofile(file)
                    computed.tofile(file)
                index = load(name)
    except BlockingIOError:
        raise
    except OSError:
        # The cache cannot be written.
        pass
    if index is not None:
        return index
    return compute() if computed is None else computed


def each_by_one_process(
    items: Sequence[_Item], prepare: Callable[[_Item, bool], object]
) -> None:
    """Call `prepare(item, blocking)` for each item, of which processes share the work.

    Each process starts at another item, and leaves those for the end for which
    `prepare` raises BlockingIOError: another process prepares them.
    """
    start = os.getpid() % max(1, len(items))
    busy = []
    for item in (*items[start:], *items[:start]):
        try:
            prepare(item, False)
        except BlockingIOError:
            busy.append(item)
    for item in busy:
        prepare(item, True)


def _path(name: str) -> pathlib.Path:
    # Directories of few files: `atomic_write` lists the directory.
    return default_cache_dir() / "index" / name[:2] / f"{name[2:]}.int64"


@contextlib.contextmanager
def locked(path: pathlib.Path, *, blocking: bool) -> Iterator[None]:
    """Hold the lock of a file of the cache; it ends with the process at the latest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock")
    with open(lock, "a", opener=open_regular) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            # A file system without locks: several processes may compute the index, and
            # the last rename counts.
            pass
        try:
            yield
        finally:
            # A process that still acquires the removed file finds the index.
            lock.unlink(missing_ok=True)
