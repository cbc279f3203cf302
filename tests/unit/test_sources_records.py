"""TFRecord and ArrayRecord files: which records are read, and the errors."""

import ctypes
import errno
import functools
import gc
import gzip
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import zlib

import dealing
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import data
from hvdtrain.data.formats import DataError
from hvdtrain.data.sources import data_files, index_cache, record_index, tfrecord

COUNTS = (17, 5, 21)
SAMPLES = sum(COUNTS)
BATCH = 8
NATIVE = pathlib.Path(tfrecord.__file__).parents[2] / "native"
# Bytes of a record's length and of the two checksums.
FRAME = 16
FORMATS = ["TFRecord", "ArrayRecord"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "index"


def record(number):
    """A record of its own size, with zeros at the end."""
    return b"%d " % number + bytes(number % 7)


def number_of(text):
    return int(text.split(b" ")[0])


def write(directory, file_format, counts=COUNTS):
    numbers = iter(range(sum(counts)))
    for index, count in enumerate(counts):
        path = str(directory / f"part-{index}")
        if file_format == "TFRecord":
            writer = tf.io.TFRecordWriter(path)
        else:
            module = pytest.importorskip("array_record.python.array_record_module")
            writer = module.ArrayRecordWriter(path, "group_size:1")
        for _ in range(count):
            writer.write(record(next(numbers)))
        writer.close()
    return directory / "part-*"


@pytest.fixture(params=FORMATS)
def source(request, tmp_path):
    return getattr(data, request.param)(write(tmp_path, request.param))


@pytest.fixture
def file(tmp_path):
    """A TFRecord file of 5 records."""
    write(tmp_path, "TFRecord", counts=[5])
    return tmp_path / "part-0"


def damage(file, position, content):
    """Overwrite a part of a file as a bad disk does, without a new time."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    with open(file, "r+b") as opened:
        opened.seek(position)
        opened.write(content)
    os.utime(file, ns=times)


def steps(source, first, last, size):
    """Return the sorted numbers of the samples of each step, over all ranks."""
    sampler = functools.partial(
        data.Sampler,
        num_samples=SAMPLES,
        global_batch_size=BATCH,
        seed=3,
    )
    return dealing.by_step(
        source,
        sampler,
        range(first, last),
        size=size,
        ids_of=lambda texts: [number_of(text) for text in texts],
    )


def test_steps_are_the_same_on_any_number_of_ranks(source):
    uninterrupted = steps(source, 0, 12, size=1)
    assert len({tuple(step) for step in uninterrupted}) == 12
    resumed = steps(source, 0, 3, 4) + steps(source, 3, 7, 3) + steps(source, 7, 12, 1)
    assert resumed == uninterrupted
    read = list(itertools.chain(*uninterrupted))
    # The first epoch ends within the sixth step.
    counts = np.bincount(read, minlength=SAMPLES)
    assert (counts.min(), counts.max()) == (2, 3)


def test_one_pass_reads_each_record_once(source):
    read = [
        text
        for rank in range(3)
        for batch in data.one_pass(source, rank=rank, size=3, local_batch_size=4)
        for text in batch.numpy()
    ]
    assert sorted(read, key=number_of) == [record(n) for n in range(SAMPLES)]


def test_records_are_read_in_the_order_of_the_indices(source):
    indices = np.array([42, 0, 17, 16, 21, 22, 0])
    assert list(source.read(indices)) == [record(n) for n in indices]
    assert list(source.read(indices[:0])) == []


def test_a_bounded_number_of_files_is_open(tmp_path, monkeypatch):
    monkeypatch.setattr(data.TFRecord, "max_open_files", 2)
    source = data.TFRecord(write(tmp_path, "TFRecord", counts=[2] * 6))
    assert list(source.read(np.arange(12))) == [record(n) for n in range(12)]
    assert source._get_open.cache_info().currsize == 2


def test_parse_receives_all_records_of_a_block(tmp_path):
    features = {"number": tf.io.FixedLenFeature([2], tf.int64)}
    with tf.io.TFRecordWriter(str(tmp_path / "examples")) as writer:
        for number in range(10):
            values = tf.train.Int64List(value=[number, -number])
            feature = {"number": tf.train.Feature(int64_list=values)}
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())
    source = data.TFRecord(
        tmp_path / "examples",
        parse=lambda records: tf.io.parse_example(records, features),
    )
    sampler = data.Sampler(num_samples=10, global_batch_size=5, seed=0)
    batches = data.batches(source, sampler, 0, 2)
    assert batches.element_spec["number"].shape[1:] == (2,)
    numbers = np.concatenate([batch["number"] for batch in batches])
    assert sorted(numbers[:, 0]) == list(range(10))
    assert (numbers[:, 0] == -numbers[:, 1]).all()


@pytest.mark.parametrize("file_format", FORMATS)
def test_fingerprint_is_of_names_sizes_and_counts(tmp_path, file_format):
    prints = []
    for name, counts in {"a": COUNTS, "b": COUNTS, "c": COUNTS[::-1]}.items():
        (tmp_path / name).mkdir()
        files = write(tmp_path / name, file_format, counts)
        prints.append(getattr(data, file_format)(files).fingerprint())
    assert prints[0] == prints[1] != prints[2]
    assert (prints[0]["samples"], prints[0]["files"]) == (SAMPLES, 3)


# TFRecord: the index


@pytest.fixture
def scans(monkeypatch):
    """The names of the files that are scanned."""
    names = []

    def scan(file):
        names.append(file.name)
        return original(file)

    original = record_index.scan
    monkeypatch.setattr(record_index, "scan", scan)
    return names


def test_a_file_is_scanned_once_until_it_changes(tmp_path, scans, cache):
    files = write(tmp_path, "TFRecord")
    assert len(data.TFRecord(files)) == len(data.TFRecord(files)) == SAMPLES
    assert sorted(scans) == ["part-0", "part-1", "part-2"]
    assert {path.suffix for path in cache.rglob("*.*")} == {".int64"}
    with tf.io.TFRecordWriter(str(tmp_path / "part-1")) as writer:
        writer.write(b"other")
    scans.clear()
    source = data.TFRecord(files)
    assert (len(source), scans) == (17 + 1 + 21, ["part-1"])
    assert source.read(np.array([17]))[0] == b"other"
    size = (tmp_path / "part-0").stat().st_size
    with tf.io.TFRecordWriter(str(tmp_path / "part-0")) as writer:
        writer.write(bytes(size - FRAME))
    scans.clear()
    assert (len(data.TFRecord(files)), scans) == (1 + 1 + 21, ["part-0"])


def test_the_index_is_memory_mapped(file, cache):
    index = data.TFRecord(file)._index
    version = data_files.FileVersion.of(file)
    offsets = index.offsets(version)
    [path] = cache.rglob("*.int64")
    assert str(path) in pathlib.Path("/proc/self/maps").read_text()
    # Freed with the last array.
    del offsets
    gc.collect()
    assert str(path) not in pathlib.Path("/proc/self/maps").read_text()


def test_without_a_cache_the_index_is_in_memory(file, monkeypatch, scans):
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", "/dev/null/cache")
    source = data.TFRecord(file)
    assert list(source.read(np.arange(5))) == [record(n) for n in range(5)]
    assert scans == ["part-0"]


@pytest.mark.parametrize("damage", ["removed", "truncated", "other"])
def test_a_damaged_index_is_made_again(file, cache, scans, damage):
    data.TFRecord(file)
    [index] = cache.rglob("*.int64")
    if damage == "removed":
        index.unlink()
    elif damage == "truncated":
        index.write_bytes(index.read_bytes()[:-8])
    else:
        np.array([2, 0, 3]).tofile(index)
    assert len(data.TFRecord(file)) == 5
    assert scans == ["part-0"] * 2


def test_an_index_that_is_removed_during_a_job_is_made_again(file, cache):
    source = data.TFRecord(file)
    shutil.rmtree(cache)
    assert source.read(np.array([3]))[0] == record(3)


def test_processes_share_the_scans(tmp_path, scans):
    files = write(tmp_path, "TFRecord")
    busy = data_files.FileVersion.of(tmp_path / "part-1")
    path = index_cache._path(record_index._name(busy))
    created = []
    thread = threading.Thread(target=lambda: created.append(data.TFRecord(files)))
    # As another process: the lock belongs to the open file.
    with index_cache.locked(path, blocking=False):
        thread.start()
        thread.join(0.5)
        # The others are scanned meanwhile.
        assert sorted(scans) == ["part-0", "part-2"]
        assert thread.is_alive()
        offsets = record_index.scan(busy)
        np.array([len(offsets), *offsets]).tofile(path)
        scans.clear()
    thread.join(20)
    assert len(created[0]) == SAMPLES
    assert scans == []


def test_a_cache_without_locks_keeps_the_index(file, monkeypatch, scans):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(index_cache.fcntl, "flock", flock)
    assert len(data.TFRecord(file)) == len(data.TFRecord(file)) == 5
    assert scans == ["part-0"]


def test_ranks_of_a_node_scan_at_the_same_time(tmp_path):
    files = write(tmp_path, "TFRecord", counts=[50] * 8)
    code = (
        "import sys; from hvdtrain.data.sources import record_index as r;"
        "from hvdtrain.data.sources.data_files import find_files;"
        "v = find_files(sys.argv[1]);"
        "print(sum(r.RecordIndex(v).counts))"
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(files)], stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    assert [job.communicate(timeout=30)[0] for job in jobs] == [b"400\n"] * 3


# TFRecord: errors


def damaged(file, position, content=b"\xff"):
    whole = bytearray(file.read_bytes())
    whole[position : position + len(content)] = content
    return bytes(whole)


def test_files_that_are_no_tfrecord_file(file):
    whole = file.read_bytes()
    second = len(record(0)) + FRAME
    last = len(whole) - len(record(4)) - FRAME
    cases = {
        b"": "with 0 bytes; expected records",
        whole[:-1]: f"ends at byte {len(whole) - 1} within the record at byte {last};",
        whole[: second + 5]: f"at byte {second + 5} within the record at byte {second}",
        whole[: second + 14]: f"within the record at byte {second};",
        damaged(file, second): f"no valid record at byte {second}; expected a TFRecord",
        damaged(file, second + 9): f"no valid record at byte {second};",
        b"text\n" * 9: "no valid record at byte 0; expected a TFRecord file",
        b"short": "no valid record at byte 0; expected a TFRecord file",
        gzip.compress(whole): "compressed with gzip; expected a plain TFRecord file",
        zlib.compress(whole * 9): "compressed with zlib; expected a plain TFRecord",
    }
    for content, text in cases.items():
        file.write_bytes(content)
        with pytest.raises(DataError) as caught:
            data.TFRecord(file)
        assert str(caught.value).startswith(f"Received {file}")
        assert text in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_length_that_looks_compressed_is_no_error(tmp_path):
    # 0x9c78: the first bytes of zlib's format.
    with tf.io.TFRecordWriter(str(tmp_path / "large")) as writer:
        writer.write(bytes(0x9C78))
    assert len(data.TFRecord(tmp_path / "large")) == 1


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [30, None])
def test_a_file_that_changes_during_a_job(tmp_path, is_open, kind, size):
    write(tmp_path, kind, counts=[5])
    [file] = tmp_path.glob("part-*")
    source = getattr(data, kind)(file)
    if is_open:
        source.read(np.array([0]))
    # Truncated, or as it was: records of equal lengths have other contents in general.
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DataError, match="has changed since the job has started; exp"):
        source.read(np.array([0]))


def test_lengths_that_differ_from_the_index(file, monkeypatch):
    monkeypatch.setattr(tfrecord, "_native_check", lambda: None)
    source = data.TFRecord(file)
    source.read(np.array([1]))
    damage(file, 0, b"\x01")
    assert source.read(np.array([1]))[0] == record(1)
    with pytest.raises(DataError, match="part-0, which has changed since"):
        source.read(np.array([1, 0]))


@pytest.fixture(params=["instruction", "table"])
def native_check(request, tmp_path, monkeypatch):
    """The C++ function, compiled with and without code for this processor."""
    if not shutil.which("g++"):
        pytest.skip("no g++")
    (tmp_path / "export.cc").write_text(
        '#include "records.h"\n'
        'extern "C" int64_t hvdtrain_check_records(const uint8_t* base,'
        " const int64_t* offsets, const int64_t* lengths, int64_t count) {"
        " return hvdtrain::FirstBadRecord(base, offsets, lengths, count); }"
    )
    library = tmp_path / "records.so"
    text = (NATIVE / "records.cc").read_text()
    if request.param == "table":
        text = text.replace("__x86_64__", "OTHER_PROCESSOR")
    (tmp_path / "records.cc").write_text(text)
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    sources = [tmp_path / "export.cc", tmp_path / "records.cc"]
    command = ["g++", *options, f"-I{NATIVE}", *sources, "-o", library]
    subprocess.run(command, check=True, timeout=60)
    check = tfrecord.bind_check(ctypes.CDLL(str(library)))
    monkeypatch.setattr(tfrecord, "_native_check", lambda: check)


def test_the_checksums_of_the_data(file, native_check):
    start = 2 * FRAME + len(record(0)) + len(record(1))
    source = data.TFRecord(file)
    assert list(source.read(np.arange(5))) == [record(n) for n in range(5)]
    # The first and last byte of the data, and of its checksum.
    first, last = start + 12, start + 12 + len(record(2))
    for position in (first, last - 1, last, last + 3, start + 8):
        whole = file.read_bytes()
        damage(file, position, bytes([whole[position] ^ 1]))
        text = f"part-0 with a record at byte {start} that does not have its checksum"
        with pytest.raises(DataError, match=text):
            source.read(np.array([3, 2, 1]))
        assert source.read(np.array([1]))[0] == record(1)
        damage(file, 0, whole)
    damage(file, 0, b"\x01")
    with pytest.raises(DataError, match="which has changed since"):
        source.read(np.array([0]))


# ArrayRecord: errors


def test_files_that_are_no_arrayrecord_file(tmp_path):
    write(tmp_path, "ArrayRecord", counts=[5])
    file = tmp_path / "part-0"
    whole = file.read_bytes()
    for content in (b"", whole[:-1], whole[:40], b"text\n" * 9, b"text\n" * 30000):
        file.write_bytes(content)
        with pytest.raises(DataError) as caught:
            data.ArrayRecord(file)
        text = str(caught.value)
        assert text.startswith(f"Cannot read {file} ({len(content)} bytes): ")
        assert text.endswith(
            "; expected a complete ArrayRecord file: fetch or write it again."
        )
        assert "\n" not in text
    write(tmp_path, "ArrayRecord", counts=[0])
    with pytest.raises(DataError, match="part-0 without records; expected some"):
        data.ArrayRecord(file)


def test_damaged_arrayrecord_data(tmp_path):
    write(tmp_path, "ArrayRecord", counts=[5])
    source = data.ArrayRecord(tmp_path / "part-0")
    content = bytearray((tmp_path / "part-0").read_bytes())
    place = content.index(record(3))
    content[place] ^= 1
    with open(tmp_path / "part-0", "r+b") as opened:
        opened.write(content)
    source._get_open.cache_clear()
    with pytest.raises(DataError, match=r"part-0.*(Cannot|Corrupted|changed)"):
        source.read(np.array([3]))


def test_threads_share_a_reader(tmp_path):
    source = data.ArrayRecord(write(tmp_path, "ArrayRecord", counts=[400]))
    failures = []

    def read(seed):
        for _ in range(20):
            seed += 1
            numbers = np.random.RandomState(seed).permutation(400)[:100]
            if list(source.read(numbers)) != [record(n) for n in numbers]:
                failures.append(seed)

    threads = [threading.Thread(target=read, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_missing_library_is_one_line(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(DataError, match=r"pip install 'hvdtrain\[arrayrecord\]'\.$"):
        data.ArrayRecord(file)
