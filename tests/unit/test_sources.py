"""Sources in memory, their order, and the batches of all ranks."""

import collections
import functools
import itertools
import math
import os
import re
import sys
import threading
import time

import dealing
import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import data, native
from hvdtrain.data import batching
from hvdtrain.data.index_shuffle import index_shuffle
from hvdtrain.data.sample_functions import SampleFunctions, use_library
from hvdtrain.data.sources.source import as_source
from hvdtrain.output import describe

SAMPLES = 103
X = np.arange(3 * SAMPLES, dtype=np.float32).reshape(SAMPLES, 3)
Y = np.arange(SAMPLES)


class Sequence:
    """A sample is a dictionary of a number, of bytes with a zero, and of an array."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {
            "id": index,
            "text": b"text %d\0" % index,
            "x": (X[index], 0.5),
        }


class WithMany(Sequence):
    """As data sets of Hugging Face and torch are read, a batch at a time."""

    def __getitem__(self, index):
        raise AssertionError("read one by one")

    def __getitems__(self, indices):
        return [Sequence()[index] for index in indices]


def sampler(size=1, rank=0, *, batch=12, samples=SAMPLES, **more):
    return data.Sampler(
        num_samples=samples,
        global_batch_size=batch,
        seed=3,
        rank=rank,
        size=size,
        **more,
    )


def by_step(source, get_ids, *, size, start=0, end=20, **more):
    """Return the sorted ids of all ranks, by step."""
    samples = len(as_source(source))
    return dealing.by_step(
        source,
        functools.partial(sampler, samples=samples),
        range(start, end),
        size=size,
        ids_of=lambda batch: get_ids(batch).tolist(),
        **more,
    )


@pytest.mark.parametrize(
    ("source", "get_ids"),
    [
        (Y, lambda batch: batch),
        ((X, Y), lambda batch: batch[1]),
        ({"y": Y, "a": {"x": X}}, lambda batch: batch["y"]),
        (Sequence(), lambda batch: batch["id"]),
        (WithMany(), lambda batch: batch["id"]),
        ((Sequence(), Y), lambda batch: batch[0]["id"]),
        (list(range(SAMPLES)), lambda batch: batch),
    ],
)
def test_a_job_on_other_ranks_continues_with_the_same_samples(source, get_ids):
    whole = by_step(source, get_ids, size=1)
    assert by_step(source, get_ids, size=4, end=7) == whole[:7]
    assert by_step(source, get_ids, size=3, start=7, end=11) == whole[7:11]
    assert by_step(source, get_ids, size=1, start=11) == whole[11:]
    # 8 full batches, and 7 samples of the ninth, are the first epoch.
    counts = collections.Counter(itertools.chain(*whole[:8]))
    assert set(counts.values()) == {1}
    assert set(itertools.chain(*whole[:9])) == set(range(SAMPLES))


def test_samples_of_a_sequence_keep_their_structure_and_types():
    batches = data.batches(Sequence(), sampler(), 0, 2)
    shapes = batches.element_spec
    assert shapes["text"] == tf.TensorSpec((12,), tf.string)
    assert shapes["x"][0] == tf.TensorSpec((12, 3), tf.float32)
    assert shapes["x"][1] == tf.TensorSpec((12,), tf.float32)
    batch = next(batches.as_numpy_iterator())
    # NumPy's own type for bytes drops the zero.
    assert batch["text"].tolist() == [b"text %d\0" % i for i in batch["id"]]
    np.testing.assert_array_equal(batch["x"][0], X[batch["id"]])


def test_a_memory_map_is_read_by_its_rows(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    plain = data.batches(X, sampler(), 3, 9)
    for batch, again in zip(data.batches(mapped, sampler(), 3, 9), plain, strict=True):
        np.testing.assert_array_equal(batch, again)


def test_a_seed_belongs_to_the_position_of_a_sample():
    def transform(sample, seed):
        return {"id": sample, "random": tf.random.stateless_uniform((), seed)}

    def draws(size, start, end):
        drawn = [set() for _ in range(start, end)]
        for rank in range(size):
            batches = data.batches(
                Y, sampler(size, rank), start, end, transform=transform, workers=3
            )
            for step, batch in enumerate(batches.as_numpy_iterator()):
                drawn[step].update(zip(batch["id"], batch["random"], strict=True))
        return drawn

    whole = draws(1, 0, 20)
    assert draws(3, 5, 12) == whole[5:12]
    # The same sample in two epochs, and two samples, have other numbers.
    values = [value for step in whole for _, value in step]
    assert len(set(values)) == len(values) == 240


def test_batches_padded_to_their_longest_sample_do_not_depend_on_the_start():
    class Padded(data.Source):
        def __len__(self):
            return SAMPLES

        def read(self, indices):
            return indices

        @staticmethod
        def parse(indices):
            return tf.sequence_mask(indices)

    def shapes(start):
        return [b.shape for b in data.batches(Padded(), sampler(), start, 12)]

    assert shapes(5) == shapes(0)[5:]
    assert len(set(shapes(0))) > 1


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 7, 200])
def test_one_pass_reads_each_sample_once(size, batch):
    read = [
        ids
        for rank in range(size)
        for b in data.one_pass(
            (X, Y), rank=rank, size=size, local_batch_size=batch
        ).as_numpy_iterator()
        for ids in b[1]
    ]
    assert read == list(range(SAMPLES))


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("samples", [1, 2, 3, 5, 10, 103, 1000, 4097])
def test_index_shuffle_is_a_permutation(monkeypatch, samples, is_native):
    select_library(monkeypatch, is_native)
    numbers = np.arange(samples)
    orders = {
        tuple(index_shuffle(numbers, num_samples=samples, seed=seed, epoch=epoch))
        for seed in (0, 2**32 - 1)
        for epoch in (0, 1, 10**6)
    }
    assert all(sorted(order) == list(numbers) for order in orders)
    # Six of them, unless there are few.
    assert samples < 10 or len(orders) == 6


def select_library(monkeypatch, is_native):
    monkeypatch.setattr(SampleFunctions, "shuffle", None)
    if is_native:
        use_library(native.load().functions)
        assert SampleFunctions.shuffle


@pytest.mark.parametrize("is_native", [True, False])
def test_index_shuffle_never_changes(monkeypatch, is_native):
    # A job that continues under another version reads the same samples.
    select_library(monkeypatch, is_native)
    shuffled = index_shuffle(np.arange(8), num_samples=8, seed=1, epoch=2)
    assert shuffled.tolist() == [5, 2, 6, 0, 4, 3, 7, 1]
    far = index_shuffle(np.array([0, 10**12 - 1]), num_samples=10**12, seed=7, epoch=0)
    assert far.tolist() == [149052437847, 680262585781]


@pytest.mark.parametrize("samples", [1, 3, 5, 103, 60_000, 10**12, 2**62])
def test_the_native_library_shuffles_as_numpy(monkeypatch, samples):
    numbers = np.random.RandomState(0).randint(samples, size=(50, 20))
    options = {"num_samples": samples, "seed": 2**32 - 1, "epoch": 3}
    select_library(monkeypatch, True)
    by_library = index_shuffle(numbers, **options)
    select_library(monkeypatch, False)
    np.testing.assert_array_equal(index_shuffle(numbers, **options), by_library)


# 99.9th percentiles of chi-squared with 119 and 719 degrees of freedom.
@pytest.mark.parametrize(("samples", "bound"), [(5, 173.6), (6, 842.6)])
def test_all_permutations_are_as_frequent(samples, bound):
    draws = 25 * math.factorial(samples) // 10
    numbers = np.arange(samples)
    counts = collections.Counter(
        tuple(index_shuffle(numbers, num_samples=samples, seed=seed, epoch=epoch))
        for seed in range(10)
        for epoch in range(draws)
    )
    orders = itertools.permutations(range(samples))
    chi_squared = sum((counts[order] - 25) ** 2 / 25 for order in orders)
    assert chi_squared < bound


def test_any_sample_of_a_million_million_is_found():
    class Virtual(data.Source):
        def __len__(self):
            return 10**12

        def read(self, indices):
            return indices

    batches = data.batches(Virtual(), sampler(samples=10**12), 10**6, 10**6 + 3)
    ids = np.concatenate(list(batches.as_numpy_iterator()))
    assert len(set(ids.tolist())) == 36
    assert ids.max() > 10**11


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.float32(1), "Received float32 as samples"),
        (lambda: np.zeros(()), r"shape \(\); expected \(samples, ...\)"),
        (lambda: (X, Y[:5]), r"numbers of samples \{0: 103, 1: 5\}"),
        (lambda: {"x": X, "y": []}, "Received list without samples"),
        (lambda: "train.tfrecord", "Received str as samples"),
        (lambda: np.ma.masked_equal(X, 0), "Received a masked array"),
        (lambda: np.zeros(3, "datetime64[s]"), "an array of datetime64"),
    ],
)
def test_what_is_no_source_is_one_clear_line(make, message):
    with pytest.raises(data.DataError, match=message) as caught:
        as_source(make())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2, 3], "of dtype object with int in the samples from 0 on; expected"),
        ([None, "a", b"b"], "of dtype object with NoneType in the samples"),
    ],
)
def test_an_array_of_objects_is_one_clear_line(values, message):
    with pytest.raises(data.DataError, match=message) as caught:
        one_batch(np.array(values, object))
    assert "\n" not in str(caught.value)


def one_batch(source):
    """The samples of a source in one batch, as TensorFlow has them."""
    pass_ = data.one_pass(source, rank=0, size=1, local_batch_size=len(source))
    [batch] = pass_.as_numpy_iterator()
    return batch


@pytest.mark.parametrize("make", [np.asarray, list], ids=["array", "sequence"])
def test_every_dtype_of_numpy_has_its_values_or_is_one_clear_line(make):
    codes = [*np.typecodes["All"], ">i4", ">u2", ">f2", ">f4", ">f8", ">c8"]
    for code in codes:
        values = np.arange(3).astype("m8[s]" if code in "mM" else code)
        # A list of objects has numbers.
        if values.dtype.char in "gGMmV" or (code == "O" and make is np.asarray):
            with pytest.raises(data.DataError, match=r"; expected .*(numbers|dtype)"):
                one_batch(make(values))
            continue
        expected = np.char.encode(values) if code == "U" else values
        assert one_batch(make(values)).tolist() == expected.tolist(), code


def test_a_sample_that_is_not_a_number_is_shown():
    with pytest.raises(data.DataError, match="Received sample 1 with None; expected"):
        as_source([1, None]).read(np.arange(2))


def test_an_array_of_text_and_bytes_as_objects():
    array = np.array(["a", b"bc"], object)
    [batch] = data.one_pass(array, rank=0, size=1, local_batch_size=2)
    assert batch.numpy().tolist() == [b"a", b"bc"]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([np.zeros(3), np.zeros(4)], r"sample \d of shape \([34],\).*data\.pad"),
        ([{"a": 1}, {"b": 1}], "of other structure"),
        ([{"a": 1}, {"a": 1, "b": 1}], "of other structure"),
        ([None, None], "sample 0 with None; expected numbers, text"),
        ([["a"], ["b"]], r"sample 0 with \['a'\]; expected numbers, text"),
        ([[1], [[1], 2]], r"Received \[\[1\], 2\] as an array"),
        ([(1, 2), (1, 2, 3)], "of other structure"),
    ],
)
def test_samples_of_other_structure_are_one_clear_line(samples, message):
    source = as_source(samples)
    with pytest.raises(data.DataError, match=message):
        source.read(np.array([0, 1]))


def test_arguments_that_do_not_fit_are_one_clear_line():
    with pytest.raises(
        data.DataError, match="sampler of 5 samples for a source of 103"
    ):
        data.batches(X, sampler(samples=5), 0, 1)
    with pytest.raises(data.DataError, match="steps 3 to 2"):
        data.batches(X, sampler(), 3, 2)
    with pytest.raises(data.DataError, match="0 workers"):
        data.batches(X, sampler(), 0, 1, workers=0)
    with pytest.raises(data.DataError, match="103 samples for 104 ranks"):
        data.one_pass(X, rank=0, size=104, local_batch_size=1)


def test_mapped_samples_are_a_function_of_the_samples():
    pairs = data.map_samples((X, Y), lambda sample: (sample[0] + 1, sample[1]))
    twice = data.map_samples(pairs, lambda sample: {"x": sample[0], "y": sample[1]})
    own = sampler(2, 1)
    for mapped, plain in zip(
        data.batches(twice, own, 2, 5).as_numpy_iterator(),
        data.batches((X, Y), own, 2, 5).as_numpy_iterator(),
        strict=True,
    ):
        np.testing.assert_array_equal(mapped["x"], plain[0] + 1)
        np.testing.assert_array_equal(mapped["y"], plain[1])
    assert pairs.fingerprint() == as_source((X, Y)).fingerprint()


def test_a_tuple_of_one_array_stays_a_tuple():
    # Small samples are read in blocks of steps, large ones step by step.
    for x in (X, np.zeros((SAMPLES, 2**16), np.float32)):
        spec = data.batches((x,), sampler(), 0, 3).element_spec
        assert spec == (tf.TensorSpec((12, x.shape[1]), tf.float32),)


def test_shapes_do_not_depend_on_the_step():
    texts = [b"x" * (1 if i % 2 else 10**6) for i in range(SAMPLES)]
    specs = {data.batches(texts, sampler(), step, 9).element_spec for step in range(8)}
    assert specs == {tf.TensorSpec((12,), tf.string)}


class Parsed(data.Source):
    def __init__(self, parse):
        self.parse = parse

    def __len__(self):
        return SAMPLES

    def read(self, indices):
        return indices


@pytest.mark.parametrize("how", ["batches", "one_pass", "mix"])
def test_a_parse_that_drops_samples_is_refused(how):
    source = Parsed(lambda indices: tf.boolean_mask(indices, indices != 50))
    if how == "one_pass":
        read = data.one_pass(source, rank=0, size=1, local_batch_size=12)
    else:
        source = data.mix([(source, 1), (Y, 1)]) if how == "mix" else source
        read = data.batches(source, sampler(samples=len(source)), 0, 20)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(read)
    last, whole = describe(caught.value)
    assert last == whole
    assert re.match(r"Received \d+ samples from parse for \d+; expected as many", last)


@pytest.mark.parametrize(
    "parse",
    [
        lambda indices: tf.RaggedTensor.from_tensor(indices[:, None]),
        lambda indices: (indices, tf.sparse.from_dense(indices[:, None])),
        tf.reduce_sum,
        lambda indices: None,
    ],
)
def test_a_parse_that_returns_no_dense_samples_is_refused(parse):
    with pytest.raises(data.DataError, match="from parse; expected dense tensors"):
        data.batches(Parsed(parse), sampler(), 0, 1)


def of_library(library, name, base=collections.UserList):
    """An object of a class that looks as one of a library that is not installed."""
    return type(name, (base,), {"__module__": f"{library}.of_it"})({0: 1})


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (iter([1, 2]), "list_iterator .*by their numbers.*streaming=True.*a list"),
        (tf.data.Dataset.range(3), "RangeDataset .*train_and_evaluate takes a tf.data"),
        (of_library("datasets", "DatasetDict", dict), "one of its splits"),
        (of_library("grain", "BatchMapDataset"), "without .batch()"),
        (of_library("pandas", "DataFrame"), "to_numpy"),
        (of_library("pandas", "Series"), "series.to_numpy()"),
        (keras.utils.PyDataset(), "fit makes batches: its arrays"),
        (range(sys.maxsize), "without an end; .* leave out repeat()"),
        ("train.parquet", "Received str .*data.TFRecord"),
    ],
)
def test_what_holds_no_samples_by_number_is_one_line_with_the_remedy(samples, message):
    with pytest.raises(data.DataError, match=message) as caught:
        as_source(samples)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (OSError(5, "Input/output error"), r"sample 7 of .*OSError.*_sources.py, line"),
        (StopIteration(), "sample 7 of .*StopIteration"),
        (None, "sample 7, None, of other structure than sample 6"),
        ((None, 1), "sample 7 with None"),
        ((np.zeros(3, np.float32), 1), r"sample 7 of shape \(3,\) and sample 6"),
        ((np.zeros(2), 1), "sample 7 of float64 and sample 6 of float32"),
        ((np.zeros(2, np.float32), 1, 1), "sample 7, .* of other structure than"),
    ],
)
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_bad_sample_is_named(sample, message, is_padded):
    class Samples:
        def __len__(self):
            return 12

        def __getitem__(self, index):
            if index == 7 and isinstance(sample, Exception):
                raise sample
            return sample if index == 7 else (np.zeros(2, np.float32), 1)

    source = as_source(Samples())
    if is_padded and isinstance(sample, Exception):
        source = data.pad(Samples(), 3)
    with pytest.raises(data.DataError, match=message):
        source.read(np.arange(6, 9))


def test_a_batch_that_cannot_be_read_is_named():
    class Samples(WithMany):
        def __getitems__(self, indices):
            raise KeyError("text")

    with pytest.raises(data.DataError, match=r"samples from 6 on of .*KeyError: 'tex"):
        as_source(Samples()).read(np.arange(6, 9))


def test_a_sequence_is_read_by_one_thread_at_a_time():
    """Also while an evaluation reads the same object."""

    class Exclusive:
        is_read = False

        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            assert not self.is_read
            self.is_read = True
            time.sleep(1e-5)
            self.is_read = False
            return index

    shared = Exclusive()
    training = data.batches(shared, sampler(), 0, 100).as_numpy_iterator()
    for batch, _ in zip(training, range(5), strict=False):
        assert len(batch) == 12
        list(data.one_pass(shared, rank=0, size=1, local_batch_size=5))


def test_a_source_that_reads_another_number_of_samples_is_refused():
    class Short(data.Source):
        def __len__(self):
            return 40

        def read(self, indices):
            return indices[: (len(indices) + 1) // 2]

    read = data.one_pass(Short(), rank=0, size=1, local_batch_size=10)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"expected int64 of shape"
    ):
        list(read)


def test_keys_that_change_between_batches_are_refused():
    samples = [{"a": 0, "b" if number < 12 else "c": 1} for number in range(24)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="of other structure than"):
        list(data.one_pass(samples, rank=0, size=1, local_batch_size=12))


def test_parsed_samples_that_are_large_are_read_step_by_step():
    calls = []

    class Counted(Parsed):
        def read(self, indices):
            calls.append(len(indices))
            return indices

    source = Counted(lambda indices: tf.one_hot(indices, 500_000))
    batches = data.batches(source, sampler(), 0, 5)
    assert next(batches.as_numpy_iterator()).shape == (12, 500_000)
    # One to see the structure.
    assert set(calls) == {1, 12}


def test_mixed_columns_have_equal_functions():
    def add(sample):
        return sample + 1

    pairs = [(data.map_samples(X, add), Y), (data.map_samples(X + 1, add), Y)]
    mixture = data.mix([(pair, 1) for pair in pairs])
    own = sampler(samples=len(mixture))
    x, y = next(data.batches(mixture, own, 0, 1).as_numpy_iterator())
    assert set(x[:, 0] - 3 * y) == {1, 2}


def test_text_is_utf_8():
    for texts in (np.array(["a", "ü€"] * 6), ["a", "ü€"] * 6):
        read = next(
            data.one_pass(
                texts, rank=0, size=1, local_batch_size=12
            ).as_numpy_iterator()
        )
        assert read.tolist() == [b"a", "ü€".encode()] * 6


def test_numbers_of_python_are_as_in_tf_data():
    for value, dtype in [
        (0.5, tf.float32),
        ([0.5, 1.0], tf.float32),
        (np.float64(0.5), tf.float64),
        (np.ones(2), tf.float64),
        (True, tf.bool),
    ]:
        read = data.one_pass([value] * 3, rank=0, size=1, local_batch_size=3)
        assert read.element_spec.dtype == dtype


@pytest.mark.parametrize("ordered", ["mixture", "mapped mixture"])
def test_a_source_with_an_order_of_its_own_stands_alone(ordered):
    mixture = data.mix([(Y, 9), (Y, 1)])
    if ordered == "mapped mixture":
        mixture = data.map_samples(mixture, lambda sample: sample)
    with pytest.raises(data.DataError, match="since its samples have an order"):
        as_source((mixture, np.arange(2 * SAMPLES)))


class Together(data.Source):
    """Numbers, of which a call returns when `calls` calls read at the same time."""

    def __init__(self, calls):
        self._barrier = threading.Barrier(calls, timeout=20)

    def __len__(self):
        return SAMPLES

    def read(self, indices):
        # One sample is read first, for its type.
        if len(indices) > 1:
            self._barrier.wait()
        return indices


@pytest.mark.parametrize("is_remote", [False, True])
def test_as_many_blocks_are_read_at_a_time_on_few_cores(is_remote, monkeypatch):
    monkeypatch.setattr(batching, "_MAX_BLOCK_STEPS", 1)
    workers = None if is_remote else len(os.sched_getaffinity(0)) + 2
    calls = workers or max(8, len(os.sched_getaffinity(0)))
    source = Together(calls)
    source.is_remote = is_remote
    sampler = data.Sampler(num_samples=SAMPLES, global_batch_size=4, seed=1)
    batches = data.batches(source, sampler, 0, 2 * calls, workers=workers)
    assert len(list(batches)) == 2 * calls
