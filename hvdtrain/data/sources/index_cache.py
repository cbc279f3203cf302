"""Indexes of files: computed by one process of a node, and memory-mapped by all."""

import contextlib
import fcntl
import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdtrain.data.download import default_cache_dir
from hvdtrain.job.files import atomic_write


def digest(*values: Any) -> str:
    """Return the name of an index: a digest of values for JSON on which it depends."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def cached(name_digest: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the array that `compute` returns, memory-mapped from the cache.

    Of the processes that share a cache, one computes it while the others block. Where
    the cache cannot be written, each process keeps the array in memory.

    Args:
        name_digest: what `digest` returned for all that the array depends on.
    """
    path = default_cache_dir() / "index" / f"{name_digest}.npy"
    if (array := _load(path)) is not None:
        return array
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.with_suffix(".lock").open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return compute()
        # Another process may have written it while this one was blocked.
        if (array := _load(path)) is not None:
            return array
        array = compute()
        with contextlib.suppress(OSError), atomic_write(path) as temporary:
            np.save(temporary, array)
    loaded = _load(path)
    return array if loaded is None else loaded


def _load(path: pathlib.Path) -> np.ndarray | None:
    """Return the array in a file; None if there is none, or it is damaged."""
    # ValueError: a file that is truncated, or is none of NumPy's.
    with contextlib.suppress(OSError, ValueError, EOFError):
        return np.load(path, mmap_mode="r", allow_pickle=False)
    return None
