"""Sources of files in a store: the samples of the same files on a disk, and errors."""

import datetime
import io
import os
import sys

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from remote_data import (
    FRAME,
    RECORD_BYTES,
    SAMPLES,
    WRITERS,
    assert_equal,
    read,
    write_records,
)

from hvdtrain import data
from hvdtrain.data.formats import DataError
from hvdtrain.data.sources import remote_files
from hvdtrain.stores import object_store


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def store(monkeypatch):
    """Fsspec's file system in memory, emptied; errors are repeated at once."""
    monkeypatch.setattr(object_store, "_RETRY_SECONDS", (0.0, 0.0))
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


class Requests:
    """What is asked of the file system in memory."""

    def __init__(self, monkeypatch):
        self.ranges = []
        self.failures = []
        cat_file = MemoryFileSystem.cat_file

        def read(filesystem, path, start=None, end=None, **options):
            if self.failures:
                raise self.failures.pop()
            content = cat_file(filesystem, path, start, end, **options)
            self.ranges.append((path, start, end))
            return content

        monkeypatch.setattr(MemoryFileSystem, "cat_file", read)

    @property
    def count(self):
        return sum(end - start for _, start, end in self.ranges)


@pytest.fixture
def requests(monkeypatch):
    return Requests(monkeypatch)


@pytest.fixture(params=WRITERS)
def both(request, tmp_path, store):
    """A function that returns a source, of files on a disk and in the store."""
    (tmp_path / "files").mkdir()
    pattern = WRITERS[request.param](tmp_path / "files")
    store.put(f"{tmp_path}/files/", "/bucket/files/", recursive=True)
    make = getattr(data, request.param)
    return [
        lambda root=root: make(f"{root}/{pattern}".rstrip("/"))
        for root in (tmp_path / "files", "memory://bucket/files")
    ]


@pytest.mark.long
def test_samples_and_their_order_are_those_of_local_files(both):
    local, remote = (make() for make in both)
    assert (remote.is_remote, local.is_remote) == (True, False)
    assert remote.fingerprint() == local.fingerprint()
    for rank in range(2):
        assert_equal(read(remote, rank, size=2), read(local, rank, size=2))
    passes = (
        data.one_pass(source, rank=0, size=1, local_batch_size=5)
        for source in (remote, local)
    )
    assert_equal(*(list(each.as_numpy_iterator()) for each in passes))


def test_a_rank_reads_its_own_records_only(tmp_path, store, requests):
    write_records(tmp_path)
    store.put(f"{tmp_path}/part-*", "/bucket/")
    source = data.TFRecord("memory://bucket/part-*")
    # The scan of files without an index.
    assert requests.count == SAMPLES * (RECORD_BYTES + FRAME)
    # The index is in the cache now.
    source = data.TFRecord("memory://bucket/part-*")
    requests.ranges.clear()
    for rank in range(2):
        numbers = sorted(
            {number for batch in ids(rank, size=2) for number in batch.tolist()}
        )
        read(source, rank, size=2, epochs=1)
        # The first sample is read once more, for its types.
        expected = (len(numbers) + 1) * (RECORD_BYTES + FRAME)
        assert requests.count == expected
        assert len(numbers) == SAMPLES // 2
        requests.ranges.clear()


def ids(rank, size):
    sampler = data.Sampler(
        num_samples=SAMPLES, global_batch_size=4, seed=1, rank=rank, size=size
    )
    return sampler.indices(0, sampler.steps(1))


def test_neighbours_are_one_request(tmp_path, store, requests):
    write_records(tmp_path, size=100)
    store.put(f"{tmp_path}/part-*", "/bucket/")
    source = data.TFRecord("memory://bucket/part-*")
    requests.ranges.clear()
    expected = data.TFRecord(tmp_path / "part-*").read(np.arange(SAMPLES))
    numbers = np.array([9, 8, 9, 0, 23])
    np.testing.assert_array_equal(source.read(numbers), expected[numbers])
    assert requests.ranges == [
        ("/bucket/part-0", 0, 116),
        # Records 1 and 2 of the second file.
        ("/bucket/part-1", 116, 348),
        ("/bucket/part-2", 4 * 116, 5 * 116),
    ]


def test_columns_that_are_not_named_are_not_read(tmp_path, store, requests):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    # One column has 400 kB.
    random = np.random.RandomState(0)
    columns = {
        "label": np.arange(100),
        "large": [random.bytes(4_000) for _ in range(100)],
        "x": [[float(row)] * 3 for row in range(100)],
    }
    content = io.BytesIO()
    parquet.write_table(
        arrow.table(columns), content, row_group_size=50, write_statistics=False
    )
    store.pipe_file("/bucket/rows", content.getvalue())
    source = data.Parquet("memory://bucket/rows", ["label", "x"])
    assert requests.count < 5_000
    requests.ranges.clear()
    found = source.read(np.arange(100))
    np.testing.assert_array_equal(found["x"][:, 1], np.arange(100))
    assert requests.count < 10_000
    # The length of the footer, the footer, and for each row group two requests, since
    # the columns are no neighbours.
    assert len(requests.ranges) == 2 + 2 * 2


def test_a_large_file_is_scanned_in_windows(tmp_path, store, requests, monkeypatch):
    write_records(tmp_path)
    store.put(f"{tmp_path}/part-*", "/bucket/")
    # A window ends in a record, in a length, or is shorter than a record.
    monkeypatch.setattr(remote_files, "_PART_BYTES", 11_000)
    for window in (70_000, 2 * (RECORD_BYTES + FRAME) + 3, 12):
        monkeypatch.setattr(data.sources.record_index, "_WINDOW_BYTES", window)
        monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / f"cache{window}"))
        requests.ranges.clear()
        source = data.TFRecord("memory://bucket/part-*")
        assert len(source) == SAMPLES
        assert max(end - start for _, start, end in requests.ranges) <= 11_000
    # Records that are longer than a window are skipped.
    assert requests.count <= 12 * SAMPLES


def test_temporary_errors_are_repeated(tmp_path, store, requests):
    write_records(tmp_path)
    store.put(f"{tmp_path}/part-*", "/bucket/")
    source = data.TFRecord("memory://bucket/part-*")
    expected = data.TFRecord(tmp_path / "part-*").read(np.arange(SAMPLES))
    requests.ranges.clear()
    requests.failures = [OSError("SlowDown"), ConnectionError("reset")]
    numbers = np.array([20, 3, 11])
    np.testing.assert_array_equal(source.read(numbers), expected[numbers])
    # What had been read is not read again.
    assert len(requests.ranges) == 3
    requests.failures = [OSError("SlowDown")] * 9
    with pytest.raises(DataError) as caught:
        source.read(numbers)
    assert str(caught.value) == (
        "Cannot read memory:///bucket/part-0: OSError: SlowDown; expected a store that "
        "responds, and credentials that may read it."
    )
    requests.failures = [PermissionError("Forbidden")]
    with pytest.raises(DataError, match="PermissionError: Forbidden; expected a store"):
        source.read(numbers[:1])
    assert not requests.failures


@pytest.mark.parametrize("change", ["removed", "shorter", "other"])
def test_a_file_that_changes_is_an_error(both, store, change, monkeypatch):
    source = both[1]()
    if type(source).__name__ == "ImageFolder" and change == "other":
        pytest.skip("as on a disk, only names and sizes are known")
    monkeypatch.setattr(remote_files, "CHECK_SECONDS", -1.0)
    for path in store.find("/bucket"):
        content = store.cat_file(path)
        store.rm_file(path)
        if change != "removed":
            store.pipe_file(path, content[: -1 if change == "shorter" else None])
            # The clock of the store may be coarse.
            later = store.store[path].created + datetime.timedelta(seconds=1)
            store.store[path].created = later
    with pytest.raises(
        DataError, match=r"memory:///bucket/.*, which has changed since"
    ):
        source.read(np.arange(SAMPLES))


def test_versions_are_compared_once_a_minute(store):
    store.pipe_file("/bucket/a", b"1")
    [file] = remote_files.find_remote_files("memory://bucket/a")
    now, checked = [0.0], {}

    def check():
        remote_files.check_again([file], checked, now=now[0])

    check()
    store.pipe_file("/bucket/a", b"12")
    now[0] = 60.0
    check()
    now[0] = 61.0
    with pytest.raises(DataError, match="has changed since the job"):
        check()


def test_names_are_found_as_on_a_disk(store):
    for name in ("b-1", "b-0", "a-0", "odd[1]", "odd1", ".b-3", "deep/b-2"):
        store.pipe_file(f"/bucket/{name}", b"1")

    def found(pattern):
        return [file.name for file in remote_files.find_remote_files(pattern)]

    assert found("memory://bucket/b-*") == ["b-0", "b-1"]
    assert found("memory://bucket/.b-*") == [".b-3"]
    assert found("memory://bucket/odd[1]") == ["odd[1]"]
    assert found("memory://bucket/**/b-2") == ["b-2"]
    # As pathlib writes it.
    assert found("memory:/bucket/a-0") == ["a-0"]


def test_errors_name_the_address_and_the_remedy(store):
    store.pipe_file("/bucket/deep/a", b"")
    cases = {
        "memory://bucket/none-*": "none-*, which matches no file; expected the address",
        "memory://none/a": "memory://none/a, which matches no file; expected the addr",
        "memory://bucket/deep": "memory://bucket/deep, which matches no file; expecte",
        "memory://bucket/deep/a": "memory:///bucket/deep/a with 0 bytes; expected rec",
    }
    for address, text in cases.items():
        with pytest.raises(DataError) as caught:
            data.TFRecord(address)
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="memory:///none, which does not exist"):
        data.ImageFolder("memory://none")
    with pytest.raises(DataError, match="deep without directories; expected one direc"):
        data.ImageFolder("memory://bucket/deep")
    with pytest.raises(DataError, match="class memory:///bucket/deep without images"):
        data.ImageFolder("memory://bucket")


def test_a_missing_package_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError) as caught:
        data.TFRecord("s3://bucket/part-*")
    assert str(caught.value).startswith("Cannot open s3://bucket/part-*: ")
    assert str(caught.value).endswith("; pip install 'hvdtrain[s3]'.")


def test_a_truncated_file_is_an_error(tmp_path, store):
    write_records(tmp_path)
    content = (tmp_path / "part-0").read_bytes()
    store.pipe_file("/bucket/cut", content[:-5])
    with pytest.raises(DataError, match=r"/bucket/cut, which ends at byte \d+ within"):
        data.TFRecord("memory://bucket/cut")
    with pytest.raises(DataError, match=r"Cannot read memory:///bucket/cut: .*Parquet"):
        data.Parquet("memory://bucket/cut")
    damaged = content[:RECORD_BYTES] + b"\xff" + content[RECORD_BYTES + 1 :]
    store.pipe_file("/bucket/damaged", damaged)
    source = data.TFRecord("memory://bucket/damaged")
    with pytest.raises(DataError, match="record at byte 0 that does not have its ch"):
        source.read(np.array([0]))


# ArrayRecord: copies


@pytest.fixture
def array_records(tmp_path, store):
    """The address of ArrayRecord files, of which the largest are `LARGE` bytes."""
    module = pytest.importorskip("array_record.python.array_record_module")
    random = np.random.RandomState(0)
    for number in range(3):
        path = tmp_path / f"part-{number}"
        writer = module.ArrayRecordWriter(str(path), "group_size:1")
        writer.write(random.bytes(100_000 * (number + 1)))
        writer.close()
        store.put(str(path), f"/bucket/part-{number}")
    return "memory://bucket/part-"


def copies(tmp_path):
    return sorted(
        path.stat().st_size for path in (tmp_path / "cache" / "files").glob("*")
    )


def test_copies_are_kept_and_removed_by_their_last_use(
    array_records, tmp_path, requests, monkeypatch
):
    sizes = [(tmp_path / f"part-{number}").stat().st_size for number in range(3)]
    for number in (0, 1, 0):
        data.ArrayRecord(f"{array_records}{number}")
    # Each file once.
    assert requests.count == sizes[0] + sizes[1]
    assert copies(tmp_path) == sizes[:2]
    limit = sizes[0] + sizes[2] + 1
    monkeypatch.setenv("HVDTRAIN_FILE_CACHE_GB", str(limit / 1e9))
    data.ArrayRecord(f"{array_records}2")
    assert copies(tmp_path) == [sizes[0], sizes[2]]
    with pytest.raises(DataError) as caught:
        data.ArrayRecord(f"{array_records}*")
    assert "Received 3 files of 0.000" in str(caught.value)
    assert "set HVDTRAIN_FILE_CACHE_GB to more" in str(caught.value)
    monkeypatch.setenv("HVDTRAIN_FILE_CACHE_GB", "much")
    with pytest.raises(ValueError, match="HVDTRAIN_FILE_CACHE_GB=much; expected GB, 0"):
        data.ArrayRecord(f"{array_records}2")


def test_a_copy_that_is_removed_during_a_job_is_made_again(
    array_records, tmp_path, monkeypatch
):
    monkeypatch.setattr(data.ArrayRecord, "max_open_files", 1)
    source = data.ArrayRecord(f"{array_records}*")
    expected = data.ArrayRecord(tmp_path / "part-*").read(np.arange(3))
    for path in (tmp_path / "cache" / "files").glob("*"):
        path.unlink()
    np.testing.assert_array_equal(source.read(np.arange(3)), expected)


@pytest.mark.parametrize("bytes_left", [0, 1_000])
def test_a_truncated_copy_is_made_again(array_records, tmp_path, bytes_left):
    expected = data.ArrayRecord(tmp_path / "part-0").read(np.arange(1))
    data.ArrayRecord(f"{array_records}0")
    (copy,) = (tmp_path / "cache" / "files").glob("*")
    os.truncate(copy, bytes_left)
    source = data.ArrayRecord(f"{array_records}0")
    np.testing.assert_array_equal(source.read(np.arange(1)), expected)


def test_a_damaged_copy_is_named_and_the_next_job_makes_it_again(
    array_records, tmp_path
):
    source = data.ArrayRecord(f"{array_records}0")
    (copy,) = (tmp_path / "cache" / "files").glob("*")
    content = bytearray(copy.read_bytes())
    content[50_000] ^= 1
    copy.write_bytes(content)
    for damaged in (source, data.ArrayRecord(f"{array_records}0")):
        with pytest.raises(DataError) as caught:
            damaged.read(np.arange(1))
        assert str(caught.value).startswith("Cannot read memory:///bucket/part-0 (")
        assert f" from its copy {copy}: " in str(caught.value)
        assert str(caught.value).endswith("fails, too, write the file again.")
        assert not copy.exists()
        copy.write_bytes(content)
    copy.unlink()
    data.ArrayRecord(f"{array_records}0").read(np.arange(1))


def test_a_copy_that_is_truncated_while_it_is_read_is_an_error(array_records, tmp_path):
    source = data.ArrayRecord(f"{array_records}0")
    source.read(np.arange(1))
    (copy,) = (tmp_path / "cache" / "files").glob("*")
    os.truncate(copy, 0)
    with pytest.raises(DataError, match=rf"from its copy {copy}: the copy has 0 bytes"):
        source.read(np.arange(1))


def test_copies_need_a_directory(array_records, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", "/dev/null/cache")
    with pytest.raises(
        DataError, match="Cannot copy memory:///bucket/part-0 to /dev/n"
    ):
        data.ArrayRecord(f"{array_records}0")
