"""Mixtures, padding and packing compute what one rank without a restart computes."""

import dataclasses
import functools
import multiprocessing
import pathlib
import re
import time

import dealing
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import data
from hvdtrain.data.sources import index_cache
from hvdtrain.data.sources.mixture import MixedSource, _counts
from hvdtrain.data.sources.source import as_source

GLOBAL_BATCH = 12


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Give each test a cache of its own."""
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "index"


def sampler(source, **options):
    return data.Sampler(
        **{
            "num_samples": len(source),
            "global_batch_size": GLOBAL_BATCH,
            "seed": 7,
        }
        | options
    )


def by_step(source, start, end, size, key):
    """Return the sorted keys of the samples of each step, of all ranks together."""
    return dealing.by_step(
        source,
        functools.partial(sampler, source),
        range(start, end),
        size=size,
        ids_of=lambda batch: [key(sample) for sample in unstacked(batch)],
        workers=1,
    )


def unstacked(batch):
    count = len(tf.nest.flatten(batch)[0])
    return [tf.nest.map_structure(lambda x, i=i: x[i], batch) for i in range(count)]


def assert_same_on_any_ranks(source, key, steps=12):
    """Check 4 ranks, then 3 from step 5, then 1 from step 9 against one rank."""
    expected = by_step(source, 0, steps, 1, key)
    found = [
        *by_step(source, 0, 5, 4, key),
        *by_step(source, 5, 9, 3, key),
        *by_step(source, 9, steps, 1, key),
    ]
    assert found == expected
    # The oracle sees another order.
    assert by_step(source, 1, steps + 1, 1, key) != expected
    passed = [
        key(sample)
        for rank in range(3)
        for batch in data.one_pass(
            source, rank=rank, size=3, local_batch_size=5
        ).as_numpy_iterator()
        for sample in unstacked(batch)
    ]
    one = data.one_pass(source, rank=0, size=1, local_batch_size=len(source))
    (whole,) = one.as_numpy_iterator()
    assert passed == [key(sample) for sample in unstacked(whole)]
    assert len(passed) == len(source)


def tokens_of(sample):
    return tuple(sample["tokens"].tolist())


class Encoded(data.Source):
    """Samples that are strings, which TensorFlow parses."""

    def __init__(self, start, stop, *, is_grouped=False, decode=None):
        self.numbers = range(start, stop)
        self.is_grouped = is_grouped
        self.decode = decode

    def __len__(self):
        return len(self.numbers)

    def read(self, indices):
        return np.array([b"%d" % self.numbers[i] for i in indices], object)

    @staticmethod
    def parse(values):
        return tf.strings.to_number(values, tf.int64)


class Examples(Encoded):
    """Serialized `tf.train.Example`s, for which tf.io wants a type also of none."""

    def read(self, indices):
        features = [
            tf.train.Feature(int64_list=tf.train.Int64List(value=[self.numbers[i]]))
            for i in indices
        ]
        examples = [
            tf.train.Example(features=tf.train.Features(feature={"x": feature}))
            for feature in features
        ]
        strings = np.empty(len(examples), object)
        strings[:] = [example.SerializeToString() for example in examples]
        return strings

    @staticmethod
    def parse(values):
        features = {"x": tf.io.FixedLenFeature((), tf.int64)}
        return tf.io.parse_example(values, features)["x"]


# -- data.mix


def test_a_mixture_keeps_exact_shares_and_epochs():
    lengths = (3000, 500, 77)
    starts = np.cumsum([0, *lengths])
    mixture = data.mix(
        [
            (np.arange(length), weight)
            for length, weight in zip(lengths, (0.7, 0.2, 0.1), strict=True)
        ]
    )
    assert len(mixture) == sum(lengths)
    numbers = mixture.shuffle(sampler(mixture), np.arange(10_240))
    owners = np.searchsorted(starts, numbers, side="right") - 1
    assert np.bincount(owners).tolist() == [7168, 2048, 1024]
    for end in range(1024, 10_240, 1024):
        shares = np.bincount(owners[:end], minlength=3)
        assert np.abs(shares - end * np.array([0.7, 0.2, 0.1])).max() <= 1
    for number, length in enumerate(lengths):
        own = numbers[owners == number] - starts[number]
        passes = len(own) // length
        assert passes == (2, 4, 13)[number]
        epochs = own[: passes * length].reshape(passes, length)
        assert (np.sort(epochs, axis=1) == np.arange(length)).all()
        assert (epochs[0] != epochs[1]).any()
        assert len(np.unique(own[passes * length :])) == len(own) % length


def test_a_mixture_has_no_regular_pattern():
    mixture = data.mix([(np.zeros(100), 1), (np.ones(100), 1)])
    numbers = mixture.shuffle(sampler(mixture), np.arange(1024))
    for size in (2, 4):
        for rank in range(size):
            assert abs((numbers[rank::size] < 100).mean() - 0.5) < 0.1


def test_positions_are_computed_alone_and_far_away():
    mixture = data.mix([(np.arange(100), 0.7), (np.arange(10), 1e-3)])
    positions = 10**12 + np.arange(3000)
    numbers = mixture.shuffle(sampler(mixture), positions)
    order = np.random.default_rng(0).permutation(3000).reshape(50, 60)
    shuffled = mixture.shuffle(sampler(mixture), positions[order])
    assert (shuffled == numbers[order]).all()
    assert 0 < (numbers >= 100).sum() < 10
    assert (numbers < 110).all()


@pytest.mark.parametrize("weights", [(1,) * 30, (7, 2, 1), (1, 1000, 3, 1, 1)])
def test_counts_are_monotone_and_exact(weights):
    counts = np.array([_counts(weights, p) for p in range(2 * sum(weights) + 1)])
    assert (counts.sum(axis=1) == np.arange(len(counts))).all()
    steps = np.diff(counts, axis=0)
    assert ((steps == 0) | (steps == 1)).all()
    exact = np.arange(len(counts))[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - exact).max() < 2
    assert (counts[sum(weights)] == weights).all()


def test_a_mixture_on_any_ranks():
    mixture = data.mix(
        [
            (np.arange(40), 5),
            (Encoded(100, 130), 3),
            (Examples(200, 210), 1.5),
            (data.mix([(np.arange(300, 305), 1), (Encoded(310, 313), 1)]), 0.5),
        ]
    )
    assert_same_on_any_ranks(mixture, int)


def test_a_grouped_mixture_on_any_ranks():
    mixture = data.mix([(Encoded(0, 40, is_grouped=True), 1), (Encoded(50, 90), 2)])
    assert mixture.is_grouped
    assert_same_on_any_ranks(mixture, int)


def test_a_mixture_of_dictionaries_with_decode():
    def nest(start):
        return {"x": np.arange(start, start + 20), "y": np.ones((20, 2), "float32")}

    mixture = data.mix([(nest(0), 1), (nest(50), 1)])
    assert_same_on_any_ranks(mixture, lambda sample: (int(sample["x"]), *sample["y"]))

    def decode(value):
        return value + 1000

    pairs = [(Encoded(s, s + 20, decode=decode), 1) for s in (0, 50)]
    (batch,) = data.batches(
        data.mix(pairs), sampler(data.mix(pairs)), 0, 1
    ).as_numpy_iterator()
    assert (batch >= 1000).all()


def test_a_source_with_its_own_order_keeps_it_in_a_mixture():
    class Backwards(Encoded):
        def shuffle(self, sampler, positions):
            assert sampler.num_samples == len(self)
            return len(self) - 1 - positions % len(self)

    # Fewer samples than ranks.
    mixture = data.mix([(Backwards(0, 3), 1), (np.arange(10, 40), 1)])
    numbers = mixture.shuffle(sampler(mixture, size=8, rank=7), np.arange(1024))
    own = numbers[numbers < 3]
    assert len(own) == 512
    assert own[:6].tolist() == [2, 1, 0, 2, 1, 0]


def test_the_fingerprint_of_a_mixture_has_weights_and_sources():
    def fingerprint(length=5, weight=0.5):
        return data.mix([(np.zeros(length), weight), (np.zeros(7), 0.5)]).fingerprint()

    assert fingerprint() == fingerprint(weight=1 / 2)
    assert fingerprint() != fingerprint(length=6)
    assert fingerprint() != fingerprint(weight=0.25)


@pytest.mark.parametrize("weights", [(1, 0), (1, -1), (1, float("nan")), (1, "many")])
def test_weights_that_are_refused(weights):
    with pytest.raises(data.DataError, match="expected positive numbers"):
        data.mix([(np.zeros(3), weight) for weight in weights])


def test_no_sources():
    with pytest.raises(data.DataError, match="Received no sources to mix"):
        data.mix([])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (np.zeros((9, 2), "float32"), "float32 (2,)"),
        (np.zeros((9, 3), "int64"), "int64 (3,)"),
        ({"x": np.zeros((9, 3), "float32")}, "{'x': 'float32 (3,)'}"),
        (Encoded(0, 9), "int64 ()"),
    ],
)
def test_sources_of_other_structure(other, text):
    mixture = data.mix([(np.zeros((9, 3), "float32"), 1), (other, 1)])
    message = f"Received samples float32 (3,) of source 0 and {text} of source 1 of a"
    with pytest.raises(data.DataError, match=re.escape(message)) as caught:
        data.batches(mixture, sampler(mixture), 0, 1)
    assert "\n" not in str(caught.value)


def test_sources_with_different_decode():
    with pytest.raises(data.DataError, match="sources 0 and 1 of a mixture with diff"):
        data.mix([(Encoded(0, 9), 1), (Encoded(0, 9, decode=tf.abs), 1)])


def test_a_mixture_is_read_by_threads_if_all_sources_are():
    assert not data.mix([(np.zeros(3), 1), (np.ones(3), 1)]).locks
    values = [1.0, 2.0]
    assert len(data.mix([(values, 1), (values, 1), ([3.0], 1)]).locks) == 2
    assert isinstance(data.mix([(np.zeros(3), 1)]), MixedSource)


# -- data.pad


ONE = np.ones(1, "uint8")


def ragged(count=30):
    return [list(range(number, number + number % 7)) for number in range(count)]


def test_padded_sequences_on_any_ranks():
    source = data.pad(ragged(), 8, value=-1)
    assert_same_on_any_ranks(source, lambda sample: tuple(sample.tolist()))


def test_values_after_the_end():
    floats = data.pad([np.float32(ONE)], 2, value=np.nan).read(np.arange(1))
    np.testing.assert_array_equal(floats, [[1, np.nan]])
    padded = data.pad([[1, 2], [], [3, 4, 5]], 3, value=-1).read(np.arange(3))
    assert padded.tolist() == [[1, 2, -1], [-1, -1, -1], [3, 4, 5]]
    assert padded.dtype == np.int64
    first, second = data.pad([[], [1.5]], 1).read(np.arange(2))
    assert (first, second, second.dtype) == (0, 1.5, np.float32)
    assert data.pad([[0.5], []], 2).read(np.array([1])).dtype == np.float32


def test_truncated_sequences():
    padded = data.pad([[1, 2, 3], [4]], 2, truncate=True).read(np.arange(2))
    assert padded.tolist() == [[1, 2], [4, 0]]


def test_nests_are_padded_by_key():
    samples = [
        {"tokens": np.arange(n, dtype="uint8"), "fixed": [1, 2], "label": n}
        for n in (2, 3)
    ]
    batch = data.pad(samples, {"tokens": 4}, value={"tokens": 9}).read(np.arange(2))
    assert batch["tokens"].tolist() == [[0, 1, 9, 9], [0, 1, 2, 9]]
    assert batch["tokens"].dtype == np.uint8
    assert batch["fixed"].tolist() == [[1, 2], [1, 2]]
    assert batch["label"].tolist() == [2, 3]
    pairs = data.pad([([1], 5, np.ones((2, 2))), ([1, 2], 6, np.ones((2, 2)))], 3)
    tokens, labels, matrices = pairs.read(np.arange(2))
    assert tokens.tolist() == [[1, 0, 0], [1, 2, 0]]
    assert labels.tolist() == [5, 6]
    assert matrices.shape == (2, 2, 2)
    first, second = data.pad([([1], [2, 3])], {0: 3}).read(np.arange(1))
    assert (first.shape, second.shape) == ((1, 3), (1, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: data.pad(ragged(), 0), "length 0; expected 1 or more"),
        (lambda: data.pad(Encoded(0, 3), 4), "Encoded to pad; expected an object"),
        (lambda: data.pad([], 4), "list without samples"),
        (
            lambda: data.pad([[1], [1, 2, 3]], 2).read(np.arange(2)),
            "sample 1 of length 3; expected 2 or less: give a greater length, or trunc",
        ),
        (
            lambda: data.pad([{"a": [1, 2]}], {"a": 1}).read(np.arange(1)),
            "sample 0 of length 2 of 'a'; expected 1",
        ),
        (
            lambda: data.pad([{"a": [1]}], {"b": 1}).read(np.arange(1)),
            "sample 0 without 'b'; expected the keys of length={'b': 1}",
        ),
        (
            lambda: data.pad([[1]], {"b": 1}).read(np.arange(1)),
            "sample 0 without 'b'",
        ),
        (
            lambda: data.pad([[1], [0.5]], 2).read(np.arange(2)),
            "sample 1 of dtype float32; expected int64, as of the first samples",
        ),
        (
            lambda: data.pad([np.int8(ONE), np.int64(ONE) * 300], 2).read(np.arange(2)),
            "Received 300 in sample 1; expected a number that int8 has",
        ),
        (
            lambda: data.pad([[1], [2**63 + 1]], 2).read(np.arange(2)),
            "Received 9223372036854775809 in sample 1; expected a number that int64",
        ),
        (
            lambda: data.pad([np.float16(ONE), ONE * 1e5], 2).read(np.arange(2)),
            "Received 100000.0 in sample 1; expected a number that float16 has",
        ),
        (
            lambda: data.pad([ONE], 2, value=np.nan).read(np.arange(1)),
            "Received nan as the value; expected a number that uint8 has",
        ),
        (
            lambda: data.pad([np.ones(1, "uint8")], 2, value=-1).read(np.arange(1)),
            "Received -1 as the value; expected a number that uint8 has",
        ),
    ],
)
def test_what_pad_refuses(make, message):
    with pytest.raises(data.DataError, match=re.escape(message)):
        make()


def test_the_fingerprint_of_padding():
    prints = [
        data.pad(ragged(), {"x": 5}, value=1).fingerprint(),
        data.pad(ragged(), {"x": 6}, value=1).fingerprint(),
        data.pad(ragged(), {"x": 5}).fingerprint(),
        data.pad(ragged(), {"x": 5}, value=1, truncate=True).fingerprint(),
    ]
    assert all(first not in prints[:i] for i, first in enumerate(prints))


# -- data.pack


SEQUENCES = [[1, 2, 3], [], [4, 5], [6, 7, 8, 9, 10, 11, 12, 13, 14], [15]]


def test_rows_of_sequences():
    rows = data.pack(SEQUENCES, 4)
    assert len(rows) == 3
    row = rows.read(np.arange(3))
    assert row["tokens"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert row["segments"].tolist() == [[1, 1, 1, 2], [1, 2, 2, 2], [1, 1, 1, 1]]
    assert row["positions"].tolist() == [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 2, 3]]
    assert {values.dtype for values in row.values()} == {np.dtype(np.int32)}
    again = rows.read(np.array([2, 0]))
    assert (again["tokens"] == row["tokens"][[2, 0]]).all()


def test_separators_and_targets():
    row, targets = data.pack(SEQUENCES, 5, separator=0, shift=True).read(np.arange(3))
    stream = [1, 2, 3, 0, 0, 4, 5, 0, *range(6, 15), 0, 15, 0]
    assert row["tokens"].ravel().tolist() == stream[:15]
    assert targets.ravel().tolist() == stream[1:16]
    assert row["segments"][:2].tolist() == [[1, 1, 1, 1, 2], [1, 1, 1, 2, 2]]
    assert row["positions"][:2].tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("separator", [None, 0])
@pytest.mark.parametrize("length", [1, 3, 7, 50])
def test_rows_equal_the_whole_stream(length, separator, shift):
    rng = np.random.default_rng(length)
    sequences = [rng.integers(1, 99, rng.integers(0, 9)) for _ in range(60)]
    tail = [] if separator is None else [separator]
    pieces = [[*tokens, *tail] for tokens in sequences]
    stream = np.concatenate(pieces)
    owners = np.repeat(np.arange(60), [len(piece) for piece in pieces])
    source = data.pack(sequences, length, separator=separator, shift=shift)
    assert len(source) == (len(stream) - shift) // length
    samples = source.read(np.arange(len(source)))
    row, targets = samples if shift else (samples, None)
    count = len(source) * length
    assert (row["tokens"].ravel() == stream[:count]).all()
    if shift:
        assert (targets.ravel() == stream[1 : count + 1]).all()
    for number, owned in enumerate(owners[:count].reshape(-1, length)):
        _, segments = np.unique(owned, return_inverse=True)
        assert (row["segments"][number] == segments + 1).all()
        positions = [np.flatnonzero(owned == owned[i])[0] for i in range(length)]
        assert (row["positions"][number] == np.arange(length) - positions).all()


def test_packed_rows_on_any_ranks():
    sequences = [[number] * (number % 5) for number in range(1, 90)]
    assert_same_on_any_ranks(data.pack(sequences, 5), tokens_of)
    assert_same_on_any_ranks(data.pack(np.arange(187), 4), tokens_of)


def test_memory_maps_of_tokens(tmp_path):
    np.arange(11, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", np.uint16, "r")
    row, targets = data.pack(tokens, 5, shift=True).read(np.array([1, 0]))
    assert row["tokens"].tolist() == [[5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]
    assert targets.tolist() == [[6, 7, 8, 9, 10], [1, 2, 3, 4, 5]]
    assert row["segments"].tolist() == [[1] * 5] * 2
    assert row["positions"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert type(row["tokens"]) is np.ndarray
    assert len(data.pack(tokens[:10], 5, shift=True)) == 1


class Records(data.Source):
    """Records of bytes, with a count of those that were read."""

    def __init__(self, records, name="a"):
        self.records = records
        self.name = name
        self.count = 0

    def __len__(self):
        return len(self.records)

    def read(self, indices):
        self.count += len(indices)
        values = np.empty(len(indices), object)
        values[:] = [self.records[index] for index in indices]
        return values

    def version(self):
        return self.name


def records(**options):
    tokens = [np.arange(n, dtype=np.uint16).tobytes() for n in (3, 4, 5)]
    return Records(tokens, **options)


def test_records_are_measured_once(cache):
    source = records()
    rows = data.pack(source, 6, dtype="uint16")
    assert source.count == 3
    assert rows.read(np.arange(2))["tokens"].tolist() == [
        [0, 1, 2, 0, 1, 2],
        [3, 0, 1, 2, 3, 4],
    ]
    again = records()
    data.pack(again, 3, dtype="uint16")
    assert again.count == 0
    for other, options in (
        (records(name="b"), {}),
        (records(), {"separator": 1}),
        (records(), {"dtype": "uint8"}),
    ):
        data.pack(other, 3, **{"dtype": "uint16"} | options)
        assert other.count == 3
    assert len(list(cache.rglob("*.int64"))) == 4


def test_sequences_in_memory_are_not_cached(cache):
    data.pack(SEQUENCES, 4)
    assert not cache.exists()


def test_a_source_that_nothing_identifies_is_not_cached(cache):
    data.pack(Records([b"\1\0\2\0"], name=None), 2, dtype="uint16")
    assert not cache.exists()


def test_records_that_have_changed():
    data.pack(records(), 3, dtype="uint16")
    source = records()
    source.records[1] = source.records[1][:-2]
    rows = data.pack(source, 3, dtype="uint16")
    message = "sequence 1 of 3 tokens; expected 4, as when its length was measured"
    with pytest.raises(data.DataError, match=message):
        rows.read(np.arange(4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: data.pack(SEQUENCES, 0), "length 0; expected 1 or more"),
        (lambda: data.pack(SEQUENCES, 16), "15 tokens; expected 16 or more"),
        (lambda: data.pack(SEQUENCES, 15, shift=True), "expected 16 or more"),
        (lambda: data.pack([[0.5]], 1), "sequence 0 of dtype float64 and shape (1,)"),
        (lambda: data.pack([[[1]]], 1), "shape (1, 1); expected integers in one"),
        (lambda: data.pack(np.ones(3), 1), "tokens of dtype float64"),
        (lambda: data.pack(np.ones(3, int), 1, separator=0), "an array is one seq"),
        (lambda: data.pack(records(), 1), "sequence 0 as bytes; expected dtype="),
        (
            lambda: data.pack(Records([b"123"]), 1, dtype="uint16"),
            "sequence 0 of 3 bytes; expected a multiple of 2, for uint16",
        ),
        (lambda: data.pack(Encoded(0, 9), 1), "Encoded to pack, with `parse`"),
        (lambda: data.pack((np.ones(3), np.ones(3)), 1), "ZippedSource to pack"),
    ],
)
def test_what_pack_refuses(make, message):
    with pytest.raises(data.DataError, match=re.escape(message)):
        make()


def test_the_fingerprint_of_packing():
    base = {"length": 2, "shift": False, "separator": None}
    prints = [
        data.pack(SEQUENCES, **base | change).fingerprint()
        for change in ({}, {"length": 3}, {"shift": True}, {"separator": 1})
    ]
    assert all(first not in prints[:i] for i, first in enumerate(prints))
    assert as_source(data.pack(SEQUENCES, 2)).fingerprint() == prints[0]


# -- The cache of indexes


def test_a_damaged_index_is_computed_again(cache):
    expected = index_cache.cached("a", lambda: np.arange(9))
    [path] = cache.rglob("*.int64")
    for length in (-1, -8, 0):
        path.write_bytes(path.read_bytes()[:length])
        assert index_cache.load("a") is None
        again = index_cache.cached("a", lambda: np.arange(9))
        assert (again == expected).all()
        assert str(path) in pathlib.Path("/proc/self/maps").read_text()


def test_a_cache_that_cannot_be_written(cache):
    cache.parent.mkdir()
    cache.write_text("a file")
    assert index_cache.cached("a", lambda: np.arange(3)).tolist() == [0, 1, 2]


def test_one_process_computes(cache):
    context = multiprocessing.get_context("fork")
    count = context.Value("i", 0)

    def compute():
        count.value += 1
        # Without a lock, the other processes start to compute meanwhile.
        time.sleep(0.2)
        return np.arange(3)

    def use():
        assert index_cache.cached("a", compute).tolist() == [0, 1, 2]

    processes = [context.Process(target=use) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert count.value == 1


def test_an_error_of_the_computation_is_raised():
    def compute():
        raise data.DataError("Received x.")

    with pytest.raises(data.DataError, match=r"Received x\."):
        index_cache.cached("a", compute)


def test_the_seed_and_the_source_select_the_order():
    mixture = data.mix([(np.arange(50), 1), (np.arange(50), 1)])
    orders = [
        mixture.shuffle(dataclasses.replace(sampler(mixture), seed=seed), np.arange(50))
        for seed in (1, 2)
    ]
    assert (orders[0] != orders[1]).any()
    own = [orders[0][orders[0] < 50][:10], orders[0][orders[0] >= 50][:10] - 50]
    assert (own[0] != own[1]).any()


def test_padded_sequences_are_packed_with_their_padding():
    packed = data.pack(data.pad([[1, 2], [3]], 3, value=7), 6)
    assert packed.read(np.array([0]))["tokens"].tolist() == [[1, 2, 7, 3, 7, 7]]


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**64 - 1])
def test_tokens_beyond_int32_are_refused(token):
    tokens = np.array([1, token], "uint64" if token > 2**63 else "int64")
    for sequences, separator in ((tokens, None), ([tokens], None), ([tokens], 0)):
        with pytest.raises(data.DataError, match=f"Received {token} as a token; exp"):
            data.pack(sequences, 2, separator=separator).read(np.array([0]))


def test_the_least_and_the_greatest_int32_are_tokens():
    tokens = [-(2**31), 2**31 - 1]
    read = data.pack(np.array(tokens), 2).read(np.array([0]))
    assert read["tokens"].tolist() == [tokens]


def test_each_rank_has_its_share_of_each_source_of_a_grouped_mixture():
    """Contiguous shares of the sample numbers would give a rank one source."""
    sources = Encoded(0, 500, is_grouped=True), Encoded(500, 1000, is_grouped=True)
    mixture = data.mix([(sources[0], 3), (sources[1], 1)])
    counts = []
    for rank in range(2):
        own = sampler(mixture, rank=rank, size=2, global_batch_size=64)
        batches = data.batches(mixture, own, 0, 20).as_numpy_iterator()
        counts.append([np.sum(batch >= 500) for batch in batches])
    assert np.abs(np.subtract(*counts)).max() <= 1
    assert min(counts[0]) > 0
