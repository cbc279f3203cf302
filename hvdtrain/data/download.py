"""MNIST from a mirror, kept in a cache."""

import http.client
import io
import os
import pathlib
import threading
import urllib.request
from collections.abc import Sequence

import numpy as np

from hvdtrain.data import formats
from hvdtrain.data.formats import DataError
from hvdtrain.job.files import atomic_write, one_line_errors

# Mirrors of MNIST: an npz file, or (with a slash at the end) a directory of the four
# gzipped IDX files.
MIRRORS = (
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
_CHUNK_BYTES = 1 << 16
_MAX_BYTES = 64 << 20
# A mirror that sends less than this in its share of the timeout counts as silent.
_MIN_PROGRESS_BYTES = 1 << 18


def default_cache_dir() -> pathlib.Path:
    """Return `$HVDTRAIN_CACHE_DIR`, or else `$XDG_CACHE_HOME/hvdtrain`.

    XDG_CACHE_HOME is `~/.cache` if not set.
    """
    if cache := os.environ.get("HVDTRAIN_CACHE_DIR"):
        return pathlib.Path(cache)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "hvdtrain"


def cached_mnist(
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    urls: Sequence[str] | None = None,
    timeout_seconds: float = 12.0,
) -> dict[str, np.ndarray]:
    """Return the four arrays of MNIST from the cache; download them if needed.

    Args:
        cache_dir: directory of `mnist.npz`; `default_cache_dir()` if None.
        urls: mirrors, tried in this order: npz files, or directories (a slash at the
            end) of the four gzipped IDX files. If None, the mirrors in the environment
            variable HVDTRAIN_MNIST_URLS (separated by spaces), else `MIRRORS`.
        timeout_seconds: limit for all mirrors together, if they refuse connections or
            send next to nothing. A slow mirror with progress may take longer.

    Raises:
        DataError: no mirror served MNIST, or the cache cannot be written.
    """
    path = pathlib.Path(cache_dir or default_cache_dir()) / "mnist.npz"
    try:
        return formats.read_mnist(path)
    except DataError:
        # A download could not replace a directory.
        if path.is_dir():
            raise
    urls = urls or os.environ.get("HVDTRAIN_MNIST_URLS", "").split() or MIRRORS
    failures = []
    for url in urls:
        try:
            content, arrays = _fetch_mnist(
                url, patience_seconds=timeout_seconds / len(urls)
            )
        except DataError as error:
            failures.append(str(error))
        else:
            _write(path, content)
            return arrays
    raise DataError(
        f"Cannot download MNIST ({'; '.join(failures)}). Give its files with "
        "--data_dir, a mirror with HVDTRAIN_MNIST_URLS, or take --dataset=digits."
    )


def _fetch_mnist(
    url: str, *, patience_seconds: float
) -> tuple[bytes, dict[str, np.ndarray]]:
    """Return an npz file that holds MNIST, as bytes, and its arrays."""
    if not url.endswith("/"):
        content = _fetch(url, patience_seconds=patience_seconds)
        arrays = formats.read_npz(io.BytesIO(content), label=url)
        formats.check_mnist(arrays, label=url)
        return content, arrays
    arrays = {}
    for key, name in formats.IDX_NAMES.items():
        packed = _fetch(f"{url}{name}.gz", patience_seconds=patience_seconds)
        arrays[key] = formats.read_idx(io.BytesIO(packed), label=f"{url}{name}.gz")
    formats.check_mnist(arrays, label=url)
    archive = io.BytesIO()
    # mypy takes the arrays for `allow_pickle`.
    np.savez_compressed(archive, **arrays)  # type: ignore[arg-type]
    return archive.getvalue(), arrays


def _fetch(url: str, *, patience_seconds: float) -> bytes:
    """Return the content at `url`; abandon a server without progress."""
    # A thread, because no timeout of a socket covers a name look-up that hangs, nor a
    # server that sends a byte now and then.
    content = bytearray()
    errors: list[Exception] = []
    reader = threading.Thread(
        target=_read_into, args=(content, errors, url, patience_seconds), daemon=True
    )
    reader.start()
    reader.join(patience_seconds)
    before = 0
    while reader.is_alive():
        if len(content) - before < _MIN_PROGRESS_BYTES:
            raise DataError(
                f"{url}: given up after {len(content)} bytes and "
                f"{patience_seconds:.1f} s without progress"
            )
        before = len(content)
        reader.join(patience_seconds)
    for error in errors:
        if not isinstance(error, OSError | ValueError | http.client.HTTPException):
            raise error
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DataError(f"{url}: {reason}")
    return bytes(content)


def _read_into(
    content: bytearray, errors: list[Exception], url: str, patience_seconds: float
) -> None:
    try:
        # Longer than `_fetch` waits after the last byte, which is up to two periods: it
        # ends this thread after `_fetch` has returned.
        timeout_seconds = 3 * patience_seconds
        with urllib.request.urlopen(url, timeout=timeout_seconds) as response:
            while chunk := response.read1(_CHUNK_BYTES):
                content += chunk
                if len(content) > _MAX_BYTES:
                    raise ValueError(f"more than {_MAX_BYTES} bytes, this is not MNIST")
    except Exception as error:  # raised again by `_fetch`, in the main thread
        errors.append(error)


def _write(path: pathlib.Path, content: bytes) -> None:
    with one_line_errors(
        f"write {path}",
        remedy="free some space, or set HVDTRAIN_CACHE_DIR to a directory that can be "
        "written",
        raises=DataError,
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_bytes(content)
