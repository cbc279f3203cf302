"""Download MNIST into a cache, so that nobody ever sees half a file."""

import contextlib
import http.client
import io
import os
import pathlib
import queue
import tempfile
import threading
import time
import urllib.request

import numpy as np

from hvdtrain.data import files
from hvdtrain.data.files import DataError

# Where MNIST is served: an npz file, or (with a slash at the end) a directory of the
# four gzipped IDX files.
MIRRORS = (
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
_CHUNK_BYTES = 1 << 16
_MAX_BYTES = 64 << 20
# A mirror that sends less than this in its share of the timeout counts as silent.
_MIN_PROGRESS_BYTES = 1 << 18


def default_cache_dir():
    """Return `$XDG_CACHE_HOME/hvdtrain`; XDG_CACHE_HOME is `~/.cache` if not set."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return pathlib.Path(base) / "hvdtrain"


def download_mnist(cache_dir=None, *, urls=None, timeout_seconds=12.0):
    """Return the path of a checked `mnist.npz` in `cache_dir`; download it if needed.

    The file appears in one piece: written under another name, then renamed.

    Args:
        cache_dir: where the file is or goes; `default_cache_dir()` if None.
        urls: mirrors, tried in this order: npz files, or directories (a slash at the
            end) of the four gzipped IDX files. If None, those in the environment
            variable HVDTRAIN_MNIST_URLS (separated by spaces), else `MIRRORS`.
        timeout_seconds: silence, refusal or trickling of all mirrors together is
            noticed within this time. A slow mirror that gets on may take longer.

    Raises:
        DataError: no mirror served MNIST, or the cache cannot be written.
    """
    path = pathlib.Path(cache_dir or default_cache_dir()) / "mnist.npz"
    with contextlib.suppress(DataError, OSError), open(path, "rb") as file:
        files.check_mnist(files.read_npz(file, label=path), label=path)
        return path
    urls = urls or os.environ.get("HVDTRAIN_MNIST_URLS", "").split() or MIRRORS
    failures = []
    for url in urls:
        try:
            content = _fetch_mnist(url, patience_seconds=timeout_seconds / len(urls))
        except DataError as error:
            failures.append(str(error))
        else:
            _write_atomically(path, content)
            return path
    raise DataError(
        f"Cannot download MNIST ({'; '.join(failures)}). Give its files with "
        "--data_dir, a mirror with HVDTRAIN_MNIST_URLS, or take --dataset=digits."
    )


def _fetch_mnist(url, *, patience_seconds):
    """Return the bytes of an npz file that holds MNIST."""
    if not url.endswith("/"):
        content = _fetch(url, patience_seconds=patience_seconds)
        files.check_mnist(files.read_npz(io.BytesIO(content), label=url), label=url)
        return content
    arrays = {}
    for key, name in files.IDX_NAMES.items():
        packed = _fetch(f"{url}{name}.gz", patience_seconds=patience_seconds)
        arrays[key] = files.read_idx(io.BytesIO(packed), label=f"{url}{name}.gz")
    files.check_mnist(arrays, label=url)
    archive = io.BytesIO()
    np.savez_compressed(archive, **arrays)
    return archive.getvalue()


def _fetch(url, *, patience_seconds):
    """Return what `url` serves; give it up when it is silent or nearly so."""
    # A thread, because no timeout of a socket covers the look-up of a name, nor a
    # server that sends a byte now and then. The socket's own ends a thread given up.
    chunks, given_up = queue.Queue(), threading.Event()
    threading.Thread(
        target=_pump, args=(url, chunks, given_up, 2 * patience_seconds), daemon=True
    ).start()
    try:
        return _collect(chunks, patience_seconds=patience_seconds)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DataError(f"{url}: {reason}") from None
    finally:
        given_up.set()


def _pump(url, chunks, given_up, timeout_seconds):
    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds) as response:
            while not given_up.is_set():
                chunks.put(chunk := response.read1(_CHUNK_BYTES))
                if not chunk:
                    return
    except Exception as error:  # raised again by the thread that collects
        chunks.put(error)


def _collect(chunks, *, patience_seconds):
    content, goal = bytearray(), _MIN_PROGRESS_BYTES
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            chunk = chunks.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(
                f"given up after {len(content)} bytes and {patience_seconds:.1f} s "
                "without progress"
            ) from None
        if isinstance(chunk, Exception):
            raise chunk
        content += chunk
        if len(content) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES} bytes, this is not MNIST")
        if not chunk:
            return bytes(content)
        if len(content) >= goal:
            goal = len(content) + _MIN_PROGRESS_BYTES
            deadline = time.monotonic() + patience_seconds


def _write_atomically(path, content):
    # Two jobs may share the cache: each writes a file of its own, the rename decides,
    # and both contents are the same.
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".mnist-")
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            pathlib.Path(temporary).unlink(missing_ok=True)
        raise DataError(
            f"Cannot write {path}: {error.strerror}; free some space, or set "
            "XDG_CACHE_HOME to a directory that can be written."
        ) from None
