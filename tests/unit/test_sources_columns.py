"""Parquet files: their order, which row groups are read, and their errors."""

import collections
import functools
import gzip
import os
import sys
import threading

import dealing
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import data
from hvdtrain.data.sources.parquet import GroupCache, WindowedOrder

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

# Rows by file and row group: unequal, and with a group without rows.
SIZES = [[7, 1, 12], [5, 5], [0, 9, 3, 8]]
ROWS = sum(map(sum, SIZES))
BATCH = 12


def write(path, groups, **options):
    """Write tables as the row groups of a file."""
    with pq.ParquetWriter(path, groups[0].schema, **options) as writer:
        for group in groups:
            writer.write_table(group, row_group_size=max(1, len(group)))


def table(ids):
    ids = np.asarray(ids, np.int64)
    return pa.table(
        {
            "id": pa.array(ids),
            "half": pa.array(ids / 2, pa.float32()),
            "is_odd": pa.array(ids % 2 == 1),
            "text": pa.array([f"é{i}" for i in ids], pa.string()),
            "raw": pa.array([b"\0%d\0" % i for i in ids], pa.binary()),
            "kind": pa.array(["ab"[i % 2] for i in ids], pa.string()).cast(
                pa.dictionary(pa.int32(), pa.string())
            ),
            "fixed": pa.array([[i, -i] for i in ids], pa.list_(pa.int16(), 2)),
            "list": pa.array(
                [[[i, 1, 2]] * 2 for i in ids], pa.list_(pa.list_(pa.int32()))
            ),
        }
    )


@pytest.fixture
def files(tmp_path):
    """Return a pattern of files with rows 0 to ROWS - 1."""
    first = 0
    for number, sizes in enumerate(SIZES):
        groups = []
        for size in sizes:
            groups.append(table(range(first, first + size)))
            first += size
        write(tmp_path / f"{number}.parquet", groups)
    return tmp_path / "*.parquet"


@pytest.fixture
def reads(monkeypatch):
    """Return the row groups that are decoded, in order."""
    found = []
    read_row_group = pq.ParquetFile.read_row_group

    def record(self, group, **options):
        found.append((group, tuple(options["columns"])))
        return read_row_group(self, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", record)
    return found


def sampler(source, rank=0, size=1, batch=BATCH, seed=3):
    return data.Sampler(
        num_samples=len(source),
        global_batch_size=batch,
        seed=seed,
        rank=rank,
        size=size,
    )


def ids_by_step(source, size, steps, *, batch=BATCH):
    """Return the sorted ids of all ranks by step."""
    return dealing.by_step(
        source,
        functools.partial(sampler, source, batch=batch),
        steps,
        size=size,
        ids_of=lambda values: values["id"].tolist(),
    )


def test_values(files):
    source = data.Parquet(files)
    assert len(source) == ROWS
    # Across files and row groups, and not in order.
    indices = np.array([49, 0, 30, 7, 8, 7])
    values = source.read(indices)
    assert values["id"].tolist() == indices.tolist()
    assert values["half"].dtype == np.float32
    assert values["half"].tolist() == (indices / 2).tolist()
    assert values["is_odd"].tolist() == (indices % 2 == 1).tolist()
    assert values["text"].tolist() == [f"é{i}".encode() for i in indices]
    assert values["raw"].tolist() == [b"\0%d\0" % i for i in indices]
    assert values["kind"].tolist() == [b"b", b"a", b"a", b"b", b"a", b"b"]
    assert values["fixed"].dtype == np.int16
    assert values["fixed"].tolist() == [[i, -i] for i in indices]
    assert values["list"].tolist() == [[[i, 1, 2]] * 2 for i in indices]


def test_batches_have_the_shapes_that_keras_needs(files):
    source = data.Parquet(
        files,
        ["fixed", "text", "id"],
        parse=lambda rows: ({"x": rows["fixed"], "text": rows["text"]}, rows["id"]),
    )
    batches = data.batches(source, sampler(source), 0, 2)
    features, label = batches.element_spec
    assert features["x"].shape[1:] == (2,)
    assert (features["text"].dtype, label.dtype) == (tf.string, tf.int64)
    for features, label in batches:
        assert features["text"].numpy().tolist() == [f"é{i}".encode() for i in label]


def test_a_job_continues_on_other_numbers_of_ranks(files):
    source = data.Parquet(files, ["id"], window=2)
    alone = ids_by_step(source, 1, range(13))
    found = [
        *ids_by_step(source, 4, range(5)),
        *ids_by_step(source, 3, range(5, 9)),
        *ids_by_step(source, 1, range(9, 13)),
    ]
    assert found == alone
    # Epochs of 50 samples: each is complete.
    sequence = source.shuffle(sampler(source), np.arange(3 * ROWS)).reshape(3, ROWS)
    assert np.array_equal(np.sort(sequence), [np.arange(ROWS)] * 3)
    assert len({tuple(epoch) for epoch in sequence}) == 3


def test_a_pass_of_three_ranks_has_each_row_once(files):
    source = data.Parquet(files, ["id"])
    found = [
        value
        for rank in range(3)
        for values in data.one_pass(source, rank=rank, size=3, local_batch_size=4)
        for value in values["id"].numpy()
    ]
    assert sorted(found) == list(range(ROWS))


def test_windows_by_hand():
    sizes = np.array([3, 1, 4, 2, 5])
    order = WindowedOrder(sizes, 2)
    job = data.Sampler(num_samples=15, global_batch_size=1, seed=5)
    found = order.shuffle(job, np.arange(30)).reshape(2, 15)
    group_of = np.repeat(np.arange(5), sizes)
    for epoch in found:
        assert sorted(epoch) == list(range(15))
        left = epoch.tolist()
        windows = []
        while left:
            # The two groups of a window come before all others.
            window = list(dict.fromkeys(group_of[left]))[:2]
            count = sizes[window].sum()
            assert {*group_of[left[:count]]} == {*window}
            windows.append(window)
            left = left[count:]
        assert [len(window) for window in windows] == [2, 2, 1]
    # A part is that part of the whole.
    assert order.shuffle(job, np.array([[20], [3]])).tolist() == [
        [found[1, 5]],
        [found[0, 3]],
    ]
    # A job that continues under a later version reads the same rows.
    assert found[0].tolist() == [6, 9, 7, 4, 5, 8, 11, 1, 0, 10, 13, 14, 2, 12, 3]


def test_windows_of_one_size_have_different_orders():
    order = WindowedOrder(np.full(6, 10), 2)
    job = data.Sampler(num_samples=60, global_batch_size=1, seed=5)
    rows = order.shuffle(job, np.arange(60)).reshape(3, 20)
    firsts = np.sort(rows // 10 * 10, axis=1)[:, [0, -1]]
    # Row numbers by place in the window.
    places = {
        tuple(np.searchsorted(f, r, "right") * 10 + r % 10)
        for f, r in zip(firsts, rows, strict=True)
    }
    assert len(places) == 3


def test_each_row_group_is_decoded_once_per_window(files, reads):
    source = data.Parquet(files, ["id"], window=2)
    job = sampler(source)
    for position in range(0, 2 * ROWS, 5):
        source.read(source.shuffle(job, np.arange(position, position + 5)))
    assert {columns for _, columns in reads} == {("id",)}
    # Of 8 row groups, up to four are still in memory after the first epoch.
    assert 12 <= len(reads) <= 16


def test_a_rank_reads_a_part_of_the_row_groups(tmp_path, reads):
    rows, groups = 200, 32
    path = tmp_path / "x.parquet"
    write(path, [pa.table({"id": np.arange(rows)}) for _ in range(groups)])
    for rank in range(4):
        source = data.Parquet(path, window=16)
        job = sampler(source, rank, 4, batch=128)
        for _ in data.batches(source, job, 0, rows * groups // 128):
            pass
    # A quarter for each rank, and parts of the neighbours; all would be 4 * groups.
    assert groups <= len(reads) <= 2 * groups, len(reads)


def test_several_threads_decode_a_row_group_once():
    loaded, start = [], threading.Barrier(4)

    def load(number):
        loaded.append(number)
        return number * 10

    cache = GroupCache(load, capacity=2)

    def work():
        start.wait()
        assert [cache.get(number) for number in (1, 2, 1)] == [10, 20, 10]

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert collections.Counter(loaded) == {1: 1, 2: 1}
    # 2 was used before 1, and makes room for 3.
    assert [cache.get(number) for number in (3, 1, 2)] == [30, 10, 20]
    assert loaded[-2:] == [3, 2]


def test_a_failed_load_is_tried_again():
    errors = [OSError("away")]

    def load(number):
        if errors:
            raise errors.pop()
        return number

    cache = GroupCache(load, capacity=1)
    with pytest.raises(OSError, match="away"):
        cache.get(1)
    assert cache.get(1) == 1


def test_the_fingerprint_is_that_of_the_contents(files, tmp_path):
    first = data.Parquet(files).fingerprint()
    other = tmp_path / "moved"
    other.mkdir()
    for path in tmp_path.glob("*.parquet"):
        os.rename(path, other / path.name)
    assert data.Parquet(other / "*").fingerprint() == first
    assert data.Parquet(other / "*", window=5).fingerprint() != first
    assert data.Parquet(other / "*", ["id"]).fingerprint() != first
    # The same rows in other row groups have another order.
    write(other / "1.parquet", [table(range(20, 26)), table(range(26, 30))])
    assert data.Parquet(other / "*").fingerprint() != first


def fails(*args, **options):
    with pytest.raises(data.DataError) as error:
        data.Parquet(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_files_that_are_not_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    write(path, [table(range(9))])
    content = path.read_bytes()
    for wrong in (b"", content[:-3], gzip.compress(content), b"id\n1\n"):
        path.write_bytes(wrong)
        text = fails(path)
        assert text.startswith(f"Cannot read {path}: ")
        assert "expected a complete Parquet file" in text
    # The footer is complete, a page is not.
    path.write_bytes(content[:4] + bytes(400) + content[404:])
    with pytest.raises(data.DataError, match=f"Cannot read {path}, row group 0: "):
        data.Parquet(path).read(np.arange(1))


def test_columns_that_cannot_be_read(tmp_path):
    path = tmp_path / "x.parquet"
    when = pa.array([0], pa.timestamp("us"))
    write(path, [pa.table({"id": [1], "when": when})])
    assert f"column when of type timestamp[us] in {path}; expected" in fails(path)
    assert "column ids, which" in fails(path, ["ids"])
    assert "expected some of id, when" in fails(path, ["ids"])
    assert data.Parquet(path, ["id"]).read(np.array([0]))["id"].tolist() == [1]
    columns = [pa.array([1]), pa.array([2])]
    write(path, [pa.Table.from_arrays(columns, names=["id", "id"])])
    assert f"several columns id in {path}; expected names that differ" in fails(path)


def test_a_page_that_does_not_have_its_checksum(tmp_path):
    path = tmp_path / "x.parquet"
    values = pa.table({"x": np.arange(1000)})
    options = {"use_dictionary": False, "compression": "none"}
    pq.write_table(values, path, write_page_checksum=True, **options)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=r"x.parquet, row group 0: .*CRC"):
        data.Parquet(path).read(np.array([0]))


def test_files_of_other_schemas(tmp_path):
    def write_columns(name, **columns):
        write(tmp_path / name, [pa.table(columns)])

    write_columns("0.parquet", a=pa.array([1]), b=pa.array(["x"]))
    # Another form of text is the same.
    write_columns("1.parquet", b=pa.array(["x"], pa.large_string()), a=pa.array([1]))
    source = data.Parquet(tmp_path / "*")
    assert source.read(np.array([1, 0]))["b"].tolist() == [b"x", b"x"]
    write_columns("2.parquet", a=pa.array([1.0]), b=pa.array(["x"]))
    text = fails(tmp_path / "*")
    assert "2.parquet with the column a of type double, which is int64 in" in text
    assert text.count("0.parquet") == 1
    write_columns("2.parquet", a=pa.array([1]), b=pa.array(["x"]), c=pa.array([1]))
    assert "2.parquet with the column c, which is not in" in fails(tmp_path / "*")
    assert len(data.Parquet(tmp_path / "*", ["a"])) == 3
    write_columns("2.parquet", a=pa.array([1]))
    assert "the column b, which " in fails(tmp_path / "*")


def test_nulls_and_lists_of_several_lengths(tmp_path):
    path = tmp_path / "x.parquet"
    numbers, texts = pa.array([1, None, None]), pa.array(["x", "y", None])
    lists = pa.array([[1], [2, 3], [4]])
    inner = pa.array([[1], [None], [2]])
    columns = {"numbers": numbers, "texts": texts, "lists": lists, "inner": inner}
    write(path, [pa.table(columns)])

    def reason(name):
        with pytest.raises(data.DataError) as error:
            data.Parquet(path, [name]).read(np.arange(1))
        return str(error.value)

    place = f"{path}, row group 0"
    assert f"Received 2 nulls in the column numbers of {place}; " in reason("numbers")
    assert "Received 1 nulls in the column texts" in reason("texts")
    assert "Received 1 nulls in the column inner" in reason("inner")
    assert "lists of 1 to 2 values in the column lists" in reason("lists")
    write(path, [pa.table({"lists": [[1, 2]]}), pa.table({"lists": [[1]]})])
    source = data.Parquet(path)
    source.read(np.array([0]))
    with pytest.raises(
        data.DataError, match=r"shape \(1,\) .* row group 1, and of sha"
    ):
        source.read(np.array([1]))


def test_no_rows(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, [table([])])
    assert "a without rows in it or in the other 1 files" in fails(tmp_path / "*")
    assert "window of 0; expected 1 or more" in fails(tmp_path / "*", window=0)


def test_a_file_that_changes(tmp_path):
    path = tmp_path / "x.parquet"
    write(path, [table(range(3)), table(range(4))])
    source = data.Parquet(path)
    source.read(np.array([0]))
    write(path, [table(range(3)), table(range(5))])
    with pytest.raises(data.DataError, match=f"{path}, which has changed since"):
        source.read(np.array([3]))
    path.unlink()
    with pytest.raises(data.DataError, match="No such file"):
        source.read(np.array([3]))


def test_without_pyarrow(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    text = fails(tmp_path / "x")
    assert text == "pyarrow is not installed: pip install 'hvdtrain[parquet]'."
