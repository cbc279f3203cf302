"""Data sets: read from files in every form, downloaded, refused when they are bad."""

import collections
import concurrent.futures
import contextlib
import gzip
import http.server
import os
import pathlib
import shutil
import socket
import struct
import tempfile
import threading
import time

import numpy as np
import pytest

from hvdtrain import data
from hvdtrain.data import formats, loading, node_memory
from hvdtrain.job import World

IDX = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


def small(*, shape=(5, 4), classes=3):
    """Return the four arrays of a small data set."""
    random = np.random.RandomState(0)
    return {
        "x_train": random.randint(0, 256, (30, *shape)).astype(np.uint8),
        "y_train": (np.arange(30) % classes).astype(np.uint8),
        "x_test": random.randint(0, 256, (7, *shape)).astype(np.uint8),
        "y_test": (np.arange(7) % classes).astype(np.uint8),
    }


def idx_bytes(array, *, kind=8):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return header + array.tobytes()


def write_idx(directory, arrays, *, packed=False, dot=False):
    for key, name in IDX.items():
        content = idx_bytes(arrays[key])
        name = name.replace("-idx", ".idx") if dot else name
        name = name.replace("idx3", f"idx{arrays[key].ndim}") + ".gz" * packed
        (directory / name).write_bytes(gzip.compress(content, 1) if packed else content)


def error_of(name, **arguments):
    """Return the message with which `load` refuses; it must be one line."""
    with pytest.raises(data.DataError) as caught:
        data.load(name, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert "expected" in message
    return message


def same(dataset, arrays):
    return all(
        np.array_equal(getattr(dataset, key).reshape(arrays[key].shape), arrays[key])
        for key in IDX
    )


@pytest.fixture(scope="module")
def mnist_arrays(real_mnist):
    with np.load(real_mnist / "mnist.npz") as archive:
        return {key: archive[key] for key in IDX}


@pytest.fixture
def user():
    """Take away root's right to read everything, and give a directory to test in."""
    directory = pathlib.Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield directory
    if root:
        os.seteuid(0)
    shutil.rmtree(directory)


@contextlib.contextmanager
def server(handle):
    """Serve GET requests by `handle(request)` on a free port; give the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(ConnectionError):
                handle(self)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        httpd.daemon_threads = True
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}/"
        finally:
            httpd.shutdown()
            thread.join()


def answer(content, *, status=200):
    """Return a handler that serves `content`, the same for every path."""

    def handle(request):
        request.send_response(status)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    return handle


# The embedded and the generated data.


def test_digits_are_those_of_uci():
    dataset = data.load("digits")
    assert dataset.name == "digits"
    assert dataset.num_classes == 10
    assert dataset.image_shape == (28, 28, 1)
    assert dataset.x_train.dtype == dataset.x_test.dtype == np.uint8
    assert (len(dataset.x_train), len(dataset.x_test)) == (1497, 300)
    # The numbers of images per class that UCI's page gives for the test part.
    counts = np.array([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    test_counts = np.bincount(dataset.y_test)
    assert np.array_equal(np.bincount(dataset.y_train) + test_counts, counts)
    assert np.allclose(test_counts / counts, 1 / 6, atol=0.01)
    # Of all pixels, as made from the copy in scikit-learn 1.9.
    total = dataset.x_train.sum(dtype=int) + dataset.x_test.sum(dtype=int)
    assert total == pytest.approx(121_005_364, rel=1e-5)
    # The first image is for testing. Its first row is 0 0 5 13 9 1 0 0; nine pixels of
    # 28 are 7/3 of these: 5 + 8/3 and 9 - 16/3, of 16.
    first_row = dataset.x_test[0, 0, :, 0]
    assert first_row[::9].tolist() == [0, round(23 / 48 * 255), round(11 / 48 * 255), 0]


def test_digits_do_not_share_images_between_training_and_test():
    dataset = data.load("digits")
    train = {image.tobytes() for image in dataset.x_train}
    assert not any(image.tobytes() in train for image in dataset.x_test)


def test_synthetic_is_the_same_each_time_and_learnable():
    first, second = data.load("synthetic"), data.load("synthetic")
    assert all(np.array_equal(getattr(first, k), getattr(second, k)) for k in IDX)
    assert first.image_shape == (28, 28, 1)
    centres = np.stack(
        [first.x_train[first.y_train == k].mean(0).ravel() for k in range(10)]
    )
    flat = first.x_test.reshape(len(first.x_test), -1).astype(float)
    nearest = ((flat[:, None] - centres) ** 2).sum(-1).argmin(1)
    assert (nearest == first.y_test).mean() > 0.99


# Files.


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 1), (3, 6, 3)])
def test_custom_from_idx(tmp_path, packed, dot, shape):
    arrays = small(shape=shape)
    write_idx(tmp_path, arrays, packed=packed, dot=dot)
    dataset = data.load("custom", data_dir=tmp_path)
    assert same(dataset, arrays)
    assert dataset.image_shape == (*shape, 1)[:3]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("shape", [(5, 4), (3, 6, 3)])
@pytest.mark.parametrize("classes", [2, 7])
def test_custom_from_npz(tmp_path, save, shape, classes):
    arrays = small(shape=shape, classes=classes)
    save(tmp_path / "any_name.npz", **arrays)
    dataset = data.load("custom", data_dir=tmp_path)
    assert same(dataset, arrays)
    assert dataset.name == "custom"
    assert dataset.num_classes == classes
    assert dataset.y_train.dtype == np.int32


def test_labels_of_any_integer_type_and_images_in_any_order(tmp_path):
    arrays = small()
    arrays["y_train"] = arrays["y_train"].astype(">i8")
    arrays["x_train"] = np.asfortranarray(arrays["x_train"])
    np.savez(tmp_path / "a.npz", **arrays)
    assert same(data.load("custom", data_dir=tmp_path), arrays)


def test_mnist_from_npz(real_mnist, mnist_arrays):
    dataset = data.load("mnist", data_dir=real_mnist)
    assert same(dataset, mnist_arrays)
    assert dataset.num_classes == 10
    assert dataset.image_shape == (28, 28, 1)
    assert data.prepare("auto", data_dir=real_mnist) == data.Choice("mnist")


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_from_idx(tmp_path, mnist_arrays, packed):
    arrays = {key: mnist_arrays[key] for key in IDX}
    write_idx(tmp_path, arrays, packed=packed)
    assert same(data.load("mnist", data_dir=tmp_path), arrays)


def test_mnist_with_one_pixel_changed_is_refused(tmp_path, mnist_arrays):
    changed = mnist_arrays["x_test"].copy()
    changed[5000, 14, 14] ^= 1
    np.savez(tmp_path / "mnist.npz", **{**mnist_arrays, "x_test": changed})
    assert "2646ac647ad5339dbf082846283269ea" in error_of("mnist", data_dir=tmp_path)
    assert data.load("custom", data_dir=tmp_path).num_classes == 10


def test_other_data_under_the_name_of_mnist_are_refused(tmp_path):
    np.savez(tmp_path / "mnist.npz", **small())
    assert "MD5" in error_of("mnist", data_dir=tmp_path)
    (tmp_path / "mnist.npz").unlink()
    write_idx(tmp_path, small())
    assert "MD5" in error_of("mnist", data_dir=tmp_path)


def test_directory_that_cannot_be_used(tmp_path):
    assert "No such file" in error_of("custom", data_dir=tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "Not a directory" in error_of("custom", data_dir=tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "neither *.npz nor train-images-idx3-ubyte" in error_of(
        "custom", data_dir=tmp_path / "empty"
    )
    assert "neither mnist.npz" in error_of("mnist", data_dir=tmp_path / "empty")


def test_files_that_are_missing_or_too_many(tmp_path):
    write_idx(tmp_path, small())
    (tmp_path / IDX["y_test"]).unlink()
    assert IDX["y_test"] in error_of("custom", data_dir=tmp_path)
    np.savez(tmp_path / "a.npz", **small())
    np.savez(tmp_path / "b.npz", **small())
    assert "2 npz files" in error_of("custom", data_dir=tmp_path)


def test_npz_without_an_array(tmp_path):
    arrays = small()
    del arrays["y_test"]
    np.savez(tmp_path / "a.npz", **arrays)
    assert "without y_test" in error_of("custom", data_dir=tmp_path)


def test_pickles_are_never_opened(tmp_path):
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    arrays = {**small(), "y_test": np.array([Bomb()] * 7, dtype=object)}
    np.savez(tmp_path / "a.npz", **arrays)
    assert "a.npz" in error_of("custom", data_dir=tmp_path)
    np.array([Bomb()], dtype=object).dump(tmp_path / "a.npz")
    assert "not an npz file" in error_of("custom", data_dir=tmp_path)
    assert not marker.exists()


def test_arrays_of_objects_get_their_own_advice(tmp_path):
    labels = np.array([0, 1, 2, 0, 1, 2, None], dtype=object)
    np.savez(tmp_path / "a.npz", **{**small(), "y_test": labels})
    message = error_of("custom", data_dir=tmp_path)
    assert f"y_test in {tmp_path / 'a.npz'} as an array of Python objects" in message
    assert "integer labels" in message
    assert "permissions" not in message


@pytest.mark.parametrize("name", ["mnist.npz", IDX["x_train"], IDX["y_test"]])
def test_a_directory_in_the_place_of_a_file(tmp_path, name):
    if name in IDX.values():
        write_idx(tmp_path, small())
        (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    for dataset in ("custom", "mnist"):
        message = error_of(dataset, data_dir=tmp_path)
        assert f"the directory {tmp_path / name}; expected a file" in message
        assert "permissions" not in message


def test_a_directory_in_the_place_of_the_cached_file(tmp_path, refused):
    (tmp_path / "mnist.npz").mkdir()
    with pytest.raises(data.DataError, match="expected a file of this name"):
        data.prepare("mnist", cache_dir=tmp_path, urls=[refused])


@pytest.mark.parametrize("form", ["npz", "idx", "idx.gz"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_truncated_files(tmp_path, form, part):
    if form == "npz":
        np.savez(tmp_path / "a.npz", **small())
        victim = tmp_path / "a.npz"
    else:
        write_idx(tmp_path, small(), packed=form.endswith("gz"))
        victim = next(tmp_path.glob("train-images*"))
    content = victim.read_bytes()
    victim.write_bytes(content[: int(part * len(content))])
    assert victim.name in error_of("custom", data_dir=tmp_path)


@pytest.mark.parametrize("form", ["npz", "idx.gz"])
def test_flipped_bits_are_noticed(tmp_path, form):
    if form == "npz":
        np.savez(tmp_path / "a.npz", **small())
        victim = tmp_path / "a.npz"
    else:
        write_idx(tmp_path, small(), packed=True)
        victim = next(tmp_path.glob("train-images*"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes(content)
    assert victim.name in error_of("custom", data_dir=tmp_path)


def test_idx_of_the_wrong_kind(tmp_path):
    write_idx(tmp_path, small())
    name = tmp_path / IDX["x_train"]
    name.write_bytes(idx_bytes(small()["x_train"].astype(">f4"), kind=13))
    assert "type 13" in error_of("custom", data_dir=tmp_path)
    name.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    assert "not an IDX file" in error_of("custom", data_dir=tmp_path)


def test_files_without_permission(user):
    np.savez(user / "a.npz", **small())
    (user / "a.npz").chmod(0)
    assert "Permission denied" in error_of("custom", data_dir=user)
    (user / "closed").mkdir(mode=0)
    assert "Permission denied" in error_of("custom", data_dir=user / "closed")


BAD_ARRAYS = {
    "float images": ("x_train", lambda a: a / 255, "float64; expected uint8"),
    "wide images": ("x_test", lambda a: a.astype(np.int64), "int64; expected uint8"),
    "flat images": ("x_train", lambda a: a.reshape(30, -1), r"(30, 20)"),
    "deep images": ("x_train", lambda a: a[..., None, None], "(30, 5, 4, 1, 1)"),
    "other size": ("x_test", lambda a: a[:, :3], "(5, 4, 1) to train and (3, 4, 1)"),
    "no images": ("x_train", lambda a: a[:0], "some images"),
    "no pixels": ("x_test", lambda a: a[:, :0], "some images"),
    "few labels": ("y_train", lambda a: a[:-1], "29 labels but 30 images"),
    "many labels": ("y_test", lambda a: np.tile(a, 2), "14 labels but 7 images"),
    "one-hot labels": ("y_train", lambda a: np.eye(3, dtype=int)[a], "(30, 3)"),
    "float labels": ("y_train", lambda a: a.astype(float), "float64; expected int"),
    "text labels": ("y_test", lambda a: a.astype(str), "expected integers"),
    "labels below 0": ("y_train", lambda a: a.astype(int) - 1, "-1 to 1"),
    "test label below 0": ("y_test", lambda a: a.astype(int) - 1, "-1 to 1"),
    "labels from 1": ("y_train", lambda a: a + 1, "from 1 to 3"),
    "a label far out": ("y_train", lambda a: np.where(a == 2, 200, a), "0 to 200"),
    "unknown test label": ("y_test", lambda a: a + 1, "1 to 3"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays(tmp_path, case):
    key, change, reason = BAD_ARRAYS[case]
    arrays = small()
    np.savez(tmp_path / "a.npz", **{**arrays, key: change(arrays[key])})
    assert reason in error_of("custom", data_dir=tmp_path)


def test_names_and_directories_that_contradict_each_other(tmp_path):
    for prepare_or_load in (data.prepare, data.load):
        with pytest.raises(data.DataError, match=r"mnits; expected auto, mnist"):
            prepare_or_load("mnits")
        with pytest.raises(data.DataError, match="needs"):
            prepare_or_load("custom")
        for name in ("digits", "synthetic"):
            with pytest.raises(data.DataError, match="one of them"):
                prepare_or_load(name, data_dir=tmp_path)
    with pytest.raises(data.DataError, match="prepare"):
        data.load("auto")


# Preparing and downloading.


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """Reach the servers of these tests directly on sites behind a proxy."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def refused():
    """Return an address that refuses connections."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mnist.npz"


@pytest.fixture
def silent():
    """Return an address that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mnist.npz"


def test_a_given_directory_is_never_replaced_by_other_data(tmp_path, refused):
    choice = data.prepare("auto", data_dir=tmp_path / "none", urls=[refused])
    assert choice == data.Choice("mnist")
    assert "No such file" in error_of(choice.name, data_dir=tmp_path / "none")


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_what_needs_no_files_needs_no_network(tmp_path, name, refused):
    choice = data.prepare(name, cache_dir=tmp_path / "cache", urls=[refused])
    assert choice == data.Choice(name)
    assert not (tmp_path / "cache").exists()


def test_auto_falls_back_to_digits_with_a_warning(tmp_path, refused):
    choice = data.prepare("auto", cache_dir=tmp_path, urls=[refused])
    assert choice.name == "digits"
    assert "NOT on MNIST" in choice.warning
    assert "Connection refused" in choice.warning
    assert "\n" not in choice.warning


def test_mnist_does_not_fall_back(tmp_path, refused, silent):
    with pytest.raises(data.DataError, match="--data_dir") as caught:
        data.prepare(
            "mnist", cache_dir=tmp_path, urls=[refused, silent], timeout_seconds=0.5
        )
    message = str(caught.value)
    assert refused in message
    assert f"{silent}: given up after 0 bytes" in message
    assert not list(tmp_path.iterdir())


def test_a_trickling_server_is_given_up(tmp_path):
    done = threading.Event()

    def trickle(request):
        request.send_response(200)
        request.end_headers()
        for _ in range(400):  # 20 s without a timeout
            if done.wait(0.05):
                return
            request.wfile.write(b"x")

    with server(trickle) as url:
        with pytest.raises(data.DataError, match="without progress"):
            data.cached_mnist(tmp_path, urls=[url + "m.npz"], timeout_seconds=0.5)
        done.set()


def test_a_server_that_stops_is_given_up(tmp_path):
    done = threading.Event()

    def stop(request):
        request.send_response(200)
        request.end_headers()
        request.wfile.write(bytes(300_000))
        done.wait(20)

    with server(stop) as url:
        with pytest.raises(data.DataError, match="given up after 300000 bytes"):
            data.cached_mnist(tmp_path, urls=[url + "m.npz"], timeout_seconds=1)
        done.set()


def test_a_name_look_up_that_hangs_is_given_up(tmp_path, monkeypatch):
    done = threading.Event()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: done.wait(20))
    start = time.monotonic()
    with pytest.raises(data.DataError, match="given up after 0 bytes"):
        data.cached_mnist(
            tmp_path, urls=["http://mnist.invalid/m.npz"], timeout_seconds=0.5
        )
    assert time.monotonic() - start < 10
    done.set()


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        (b"", 404, "Not Found"),
        (b"", 200, "not an npz file"),
        (b"<html>Please log in</html>", 200, "not an npz file"),
        (b"x" * (65 << 20), 200, "this is not MNIST"),
    ],
)
@pytest.mark.parametrize("path", ["mnist.npz", ""])
def test_what_is_not_mnist_never_enters_the_cache(
    tmp_path, content, status, reason, path
):
    with (
        server(answer(content, status=status)) as url,
        pytest.raises(data.DataError) as caught,
    ):
        data.cached_mnist(tmp_path, urls=[url + path])
    assert url in str(caught.value)
    assert path == "" or reason in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["mnist.npz", ""])
def test_other_data_from_a_mirror_are_refused(tmp_path, path):
    np.savez(tmp_path / "mnist.npz", **small())
    write_idx(tmp_path, small(), packed=True)

    def handle(request):
        answer((tmp_path / request.path[1:]).read_bytes())(request)

    with server(handle) as url, pytest.raises(data.DataError, match="MD5"):
        data.cached_mnist(tmp_path / "cache", urls=[url + path])
    assert not (tmp_path / "cache").exists()


@pytest.mark.release
def test_download_of_the_npz_file_happens_once(tmp_path, real_mnist, refused):
    content = (real_mnist / "mnist.npz").read_bytes()
    with server(answer(content)) as url:
        urls = [refused, url + "mnist.npz"]
        choice = data.prepare("auto", cache_dir=tmp_path / "a" / "b", urls=urls)
    assert choice == data.Choice("mnist")
    assert os.listdir(tmp_path / "a" / "b") == ["mnist.npz"]
    # Without the server, from the cache.
    again = data.prepare("mnist", cache_dir=tmp_path / "a" / "b", urls=[refused])
    assert again == choice
    dataset = data.load(choice.name, cache_dir=tmp_path / "a" / "b")
    assert dataset.x_train.shape == (60000, 28, 28, 1)


@pytest.mark.long
def test_download_of_idx_files_replaces_a_broken_cache(
    tmp_path, mnist_arrays, monkeypatch
):
    packed = {
        f"/{name}.gz": gzip.compress(idx_bytes(mnist_arrays[key]), 1)
        for key, name in IDX.items()
    }
    cache = tmp_path / "hvdtrain"
    cache.mkdir()
    (cache / "mnist.npz").write_bytes(b"PK half a file")
    # A rename, not a change of the file, which another process may have open.
    os.link(cache / "mnist.npz", tmp_path / "old")
    with server(lambda request: answer(packed[request.path])(request)) as url:
        monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "hvdtrain"))
        monkeypatch.setenv("HVDTRAIN_MNIST_URLS", f"{url}none.npz {url}")
        data.cached_mnist()
    assert os.listdir(cache) == ["mnist.npz"]
    assert (tmp_path / "old").read_bytes() == b"PK half a file"
    assert same(data.load("mnist"), mnist_arrays)


def test_cache_that_cannot_be_written(tmp_path, real_mnist):
    (tmp_path / "file").write_text("x")
    content = (real_mnist / "mnist.npz").read_bytes()
    with server(answer(content)) as url:
        urls = [url + "mnist.npz"]
        with pytest.raises(data.DataError, match="Cannot write"):
            data.prepare("mnist", cache_dir=tmp_path / "file", urls=urls)
        assert data.prepare("auto", cache_dir=tmp_path / "file", urls=urls).warning


def test_full_disk_leaves_nothing_behind(tmp_path, real_mnist):
    import resource

    content = (real_mnist / "mnist.npz").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with server(answer(content)) as url:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(data.DataError, match="Cannot write"):
                data.cached_mnist(tmp_path, urls=[url + "mnist.npz"])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def counts(monkeypatch):
    """Count how often an npz file is decompressed and MNIST's digests computed."""
    counts = collections.Counter()
    # Ranks are threads here. In two threads at once, Python 3.11 may fail to parse the
    # headers of NumPy's arrays: "AST constructor recursion depth mismatch".
    lock = threading.Lock()

    def counted(name):
        function = getattr(formats, name)

        def wrapper(*arguments, **options):
            with lock:
                counts[name] += 1
                return function(*arguments, **options)

        monkeypatch.setattr(formats, name, wrapper)

    counted("read_npz")
    counted("check_mnist")
    return counts


class Job:
    """Ranks that are threads of this process, for `loading`."""

    def __init__(self, monkeypatch, *, size, local_size):
        self._worlds = [
            World(
                rank=rank,
                size=size,
                local_rank=rank % local_size,
                local_size=local_size,
            )
            for rank in range(size)
        ]
        self._barrier = threading.Barrier(size, timeout=60)
        self._values = [None] * size
        monkeypatch.setattr(loading, "gather", self._gather)
        monkeypatch.setattr(loading, "fail_together", self._fail_together)

    def run(self, function):
        """Return the results of `function(world)` on all ranks."""

        def call(world):
            try:
                return function(world)
            except Exception:
                # The others do not wait for this rank.
                self._barrier.abort()
                raise

        with concurrent.futures.ThreadPoolExecutor(len(self._worlds)) as threads:
            calls = [threads.submit(call, world) for world in self._worlds]
        errors = [call.exception() for call in calls]
        for error in errors:
            if error and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [call.result() for call in calls]

    def _gather(self, world, value):
        self._values[world.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    @contextlib.contextmanager
    def _fail_together(self, world):
        yield
        self._barrier.wait()


@pytest.mark.parametrize(
    ("own", "base", "expected"),
    [
        ("/own", "/base", "/own"),
        ("", "/base", "/base/hvdtrain"),
        ("", "", "/home/me/.cache/hvdtrain"),
    ],
)
def test_the_cache_is_that_of_the_setup(monkeypatch, own, base, expected):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", own)
    assert data.default_cache_dir() == pathlib.Path(expected)


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize(("local_size", "reads"), [(1, 2), (2, 1)])
def test_every_node_reads_mnist_once(
    tmp_path, real_mnist, mnist_arrays, monkeypatch, counts, local_size, reads, is_given
):
    (tmp_path / "hvdtrain").symlink_to(real_mnist)
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "hvdtrain"))
    job = Job(monkeypatch, size=2, local_size=local_size)
    results = job.run(
        lambda world: loading.load_everywhere(
            world, "auto", data_dir=real_mnist if is_given else None
        )
    )
    for dataset, warning in results:
        assert (dataset.name, warning) == ("mnist", "")
        assert same(dataset, mnist_arrays)
    assert counts == {"read_npz": reads, "check_mnist": reads}


def test_a_node_with_mnist_loads_what_the_nodes_agreed_on(
    tmp_path, real_mnist, monkeypatch
):
    sent = []
    other = data.Choice("digits", "no network")

    def gather(world, value):
        # A node with one rank shares nothing.
        sent.append(value)
        return [value, value and other]

    (tmp_path / "hvdtrain").symlink_to(real_mnist)
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "hvdtrain"))
    monkeypatch.setattr(loading, "gather", gather)
    monkeypatch.setattr(loading, "fail_together", contextlib.nullcontext)
    dataset, warning = loading.load_everywhere(World(size=2), "auto")
    assert (dataset.name, warning) == ("digits", "no network")
    # The arrays stay on the node.
    assert sent == [data.Choice("mnist"), None]
    assert sent[0].dataset is None


def test_a_rank_maps_the_arrays_of_its_own_node():
    dataset = data.load("digits")
    arrays = {
        key: getattr(dataset, key) for key in ("x_train", "y_train", "x_test", "y_test")
    }
    with contextlib.ExitStack() as files:
        handles = node_memory.share(arrays, files)
        other_node = {
            key: handle._replace(identity=handle.identity._replace(boot_id="other"))
            for key, handle in handles.items()
        }
        own, other = (
            loading._Shared("digits", 10, each) for each in (handles, other_node)
        )
        assert same(loading._map_first([None, other, own]), arrays)
        assert loading._map_first([None, other]) is None


def test_nodes_agree_on_what_all_of_them_have():
    mnist, digits = data.Choice("mnist"), data.Choice("digits", "no network")
    assert data.agree([mnist, mnist]) == mnist
    assert data.agree([mnist, digits, mnist]) == digits
    assert data.agree([data.Choice("synthetic")]) == data.Choice("synthetic")
