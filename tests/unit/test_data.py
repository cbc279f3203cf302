"""Which rank sees which sample at which step: the shards and the batches."""

import dataclasses
import itertools
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import data, native
from hvdtrain.data.index_shuffle import index_shuffle
from hvdtrain.data.sample_functions import SampleFunctions, take_rows, use_library
from hvdtrain.data.sources.source import as_source
from hvdtrain.native import recorder

# Odd sizes, a batch larger than the data, a batch of the size of the data.
CASES = [
    (n, batch, seed)
    for n, batch in [(24, 12), (25, 12), (100, 24), (7, 12), (12, 12), (1000, 36)]
    for seed in (0, 1, 2**32 - 1)
]
SIZES = (1, 2, 3, 4)


def sampler(num_samples, global_batch_size, seed=0, rank=0, size=1):
    return data.Sampler(
        num_samples=num_samples,
        global_batch_size=global_batch_size,
        seed=seed,
        rank=rank,
        size=size,
    )


def job(num_samples, global_batch_size, *, seed, size, steps):
    """Return the sample numbers of all ranks, (steps, size, local batch)."""
    ranks = [
        sampler(num_samples, global_batch_size, seed, rank, size).indices(0, steps)
        for rank in range(size)
    ]
    return np.stack(ranks, axis=1)


def pictures(num_samples, *, shape=(2, 3, 1)):
    """Return images and labels with the sample number, below 256, as values."""
    numbers = np.arange(num_samples, dtype=np.uint8)
    x = np.broadcast_to(numbers[:, None, None, None], (num_samples, *shape))
    return x.copy(), numbers.astype(np.int64)


def test_by_hand():
    # Epochs 0 and 1 of five samples, from (seed, epoch).
    first, second = (
        index_shuffle(np.arange(5), num_samples=5, seed=7, epoch=epoch).tolist()
        for epoch in (0, 1)
    )
    a, b, c, d, e = first
    f, g, h, *_ = second
    # Two ranks share batches of four: the second batch runs over into epoch 1.
    assert sampler(5, 4, 7, rank=0, size=2).indices(0, 2).tolist() == [[a, c], [e, g]]
    assert sampler(5, 4, 7, rank=1, size=2).indices(0, 2).tolist() == [[b, d], [f, h]]


def test_order_never_changes():
    # A job that continues under a later version takes the next sample of its order.
    assert sampler(5, 5, 7).indices(0, 1).tolist() == [[1, 0, 2, 4, 3]]


def test_every_epoch_is_the_whole_set_without_overlap():
    wrong = []
    for (n, batch, seed), size in itertools.product(CASES, SIZES):
        steps = sampler(n, batch, seed).steps(3)
        dealt = job(n, batch, seed=seed, size=size, steps=steps)
        # Back from (rank, position on the rank) to the position in the job.
        sequence = dealt.transpose(0, 2, 1).ravel()
        epochs = sequence[: 3 * n].reshape(3, n)
        is_full = np.array_equal(np.sort(epochs, axis=1), [np.arange(n)] * 3)
        if not (is_full and 3 * n <= len(sequence) < 3 * n + batch):
            wrong.append((n, batch, seed, size))
    assert wrong == []


def test_global_batch_does_not_depend_on_the_number_of_ranks():
    wrong = []
    for n, batch, seed in CASES:
        alone, *shared = (
            np.sort(job(n, batch, seed=seed, size=size, steps=9).reshape(9, -1))
            for size in SIZES
        )
        if not all(np.array_equal(each, alone) for each in shared):
            wrong.append((n, batch, seed))
    assert wrong == []


def test_indices_of_a_part_are_that_part_of_the_whole():
    wrong = []
    for n, batch, seed in CASES:
        mine = sampler(n, batch, seed, rank=1, size=2)
        whole = mine.indices(0, 12)
        for start, end in itertools.combinations((0, 1, 5, 11, 12), 2):
            if not np.array_equal(mine.indices(start, end), whole[start:end]):
                wrong.append((n, batch, seed, start, end))
    assert wrong == []


def test_a_global_batch_that_changes_leaves_out_and_repeats_nothing():
    wrong = []
    for n, local_batch, sizes in itertools.product(
        (24, 25, 7), (1, 3, 4), [(2, 1), (1, 4, 2), (3, 2, 1, 3)]
    ):
        step = position = 0
        for size in sizes:
            parts = [
                data.Sampler(
                    num_samples=n,
                    global_batch_size=local_batch * size,
                    seed=1,
                    rank=rank,
                    size=size,
                    start_step=step,
                    start_sample=position,
                )
                for rank in range(size)
            ]
            end = step + 5 if size != sizes[-1] else parts[0].steps(4)
            dealt = np.stack([part.indices(step, end) for part in parts], axis=1)
            found = dealt.transpose(0, 2, 1).ravel()
            whole = sampler(n, 1, 1).indices(position, position + len(found))
            if not np.array_equal(found, whole.ravel()):
                wrong.append((n, local_batch, sizes, step))
            position, step = position + len(found), max(step, end)
        # Four epochs, and less than a batch more unless they had ended before.
        if position < 4 * n or (len(found) and position >= 4 * n + local_batch * size):
            wrong.append((n, local_batch, sizes, position))
    assert wrong == []


def test_steps_and_positions_after_a_change_by_hand():
    # 7 steps of 4 samples; 22 of 50 are left then, in batches of 8.
    changed = dataclasses.replace(sampler(10, 8), start_step=7, start_sample=28)
    assert (changed.pass_steps, changed.steps(5), changed.steps_to(29)) == (2, 10, 8)
    assert changed.steps(1) == 7  # it was over before
    with pytest.raises(data.DataError, match="the step 6; expected 7 or more"):
        changed.indices(6, 8)


def test_epochs_and_seeds_differ():
    orders = [sampler(50, 50, seed).indices(0, 2) for seed in (0, 1)]
    distinct = {tuple(order) for order in np.concatenate(orders)}
    assert len(distinct) == 4


@pytest.mark.parametrize(("epochs", "steps"), [(0, 0), (1, 3), (2, 5), (3, 8), (4, 10)])
def test_steps_cover_the_epochs(epochs, steps):
    assert sampler(10, 4).steps(epochs) == steps


def test_another_process_deals_the_same():
    program = (
        "import sys; from hvdtrain import data, job, program, training; "
        "s = data.Sampler(num_samples=100, global_batch_size=9, seed=5, "
        "rank=2, size=3); "
        "print(s.indices(30, 40).tolist()); assert 'tensorflow' not in sys.modules"
    )
    there = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    here = sampler(100, 9, 5, rank=2, size=3).indices(30, 40).tolist()
    assert there.stdout.strip() == str(here)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"global_batch_size": 1, "size": 2}, "at least one sample per rank"),
        ({"global_batch_size": 0}, "at least one sample"),
        ({"global_batch_size": -2, "size": 2}, "at least one sample"),
        ({"size": 11, "global_batch_size": 11}, "fewer ranks"),
        ({"rank": 2, "size": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"num_samples": 0}, "0 samples"),
        ({"start_sample": -1}, "start_sample -1"),
        ({"global_batch_size": 2.5}, "global_batch_size=2.5; expected an integer"),
    ],
)
def test_bad_numbers_are_one_clear_line(arguments, reason):
    good = {"num_samples": 10, "global_batch_size": 4, "seed": 0}
    with pytest.raises(data.DataError, match=reason) as caught:
        data.Sampler(**{**good, **arguments})
    assert "\n" not in str(caught.value)


def batches_of(dataset):
    return [(x.numpy(), y.numpy()) for x, y in dataset]


def test_batches_are_the_indexed_images():
    x, y = pictures(40)
    mine = sampler(40, 12, seed=3, rank=1, size=2)
    got = batches_of(data.batches((x, y), mine, 0, 11))
    assert len(got) == 11
    for (images, labels), chosen in zip(got, mine.indices(0, 11), strict=True):
        assert images.dtype == np.uint8
        assert images.shape == (6, 2, 3, 1)
        assert np.array_equal(labels, chosen)
        assert np.array_equal(images, x[chosen])


def test_stream_has_fixed_shapes_and_a_known_length():
    x, y = pictures(40)
    batches = data.batches((x, y), sampler(40, 8), 3, 200)
    images, labels = batches.element_spec
    assert images.shape == (8, 2, 3, 1)
    assert labels.shape == (8,)
    assert len(batches) == 197


@pytest.mark.parametrize("start", [1, 63, 64, 65, 130])
def test_resumed_stream_is_the_rest_of_the_uninterrupted_one(start):
    x, y = pictures(50)
    mine = sampler(50, 8, seed=1, rank=0, size=2)
    whole = batches_of(data.batches((x, y), mine, 0, 140))
    rest = batches_of(data.batches((x, y), mine, start, 140))
    assert len(rest) == 140 - start
    for (images, labels), (same_images, same_labels) in zip(
        whole[start:], rest, strict=True
    ):
        assert np.array_equal(images, same_images)
        assert np.array_equal(labels, same_labels)


def test_stream_of_images_larger_than_a_block():
    x, y = pictures(6, shape=(700, 500, 3))
    mine = sampler(6, 2, seed=2)
    got = batches_of(data.batches((x, y), mine, 0, 4))
    assert [labels.tolist() for _, labels in got] == mine.indices(0, 4).tolist()
    assert all(images.shape == (2, 700, 500, 3) for images, _ in got)


@pytest.mark.parametrize("start", [0, 9])
def test_batches_of_a_file_have_the_samples_of_the_indices(tmp_path, start):
    """Over an array on disk, for more passes than its indices would fit in memory."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(20, dtype="float32").reshape(10, 2))
    x = np.load(path, mmap_mode="r")
    mine = sampler(10, 4, seed=1, rank=1, size=2)
    found = data.batches({"x": x, "index": np.arange(10)}, mine, start, 10**9)
    assert len(found) == 10**9 - start
    assert found.element_spec["x"].shape == (2, 2)
    expected = mine.indices(start, start + 5)
    for batch, indices in zip(found.take(5), expected, strict=True):
        np.testing.assert_array_equal(batch["index"], indices)
        np.testing.assert_array_equal(batch["x"], x[indices])


def test_empty_stream():
    x, y = pictures(6)
    assert not batches_of(data.batches((x, y), sampler(6, 2), 4, 4))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("n", "batch"), [(4, 4), (13, 1), (48, 12), (100, 12)])
def test_evaluation_sees_each_image_once(n, size, batch):
    x, y = pictures(n)
    seen = []
    for rank in range(size):
        part = data.one_pass((x, y), rank=rank, size=size, local_batch_size=batch)
        for images, labels in batches_of(part):
            assert 1 <= len(labels) <= batch
            assert np.array_equal(images, x[labels])
            seen.extend(labels.tolist())
    assert sorted(seen) == list(range(n))


def test_evaluation_refuses_what_does_not_fit():
    x, y = pictures(3)
    with pytest.raises(data.DataError, match="3 samples for 4 ranks"):
        data.one_pass((x, y), rank=0, size=4, local_batch_size=1)
    with pytest.raises(data.DataError, match="batch of 0"):
        data.one_pass((x, y), rank=0, size=1, local_batch_size=0)


def test_wait_for_input_is_the_time_until_a_batch_is_there():
    def slow(element):
        time.sleep(0.02)
        return element

    slow_dataset = tf.data.Dataset.range(10).map(
        lambda element: tf.numpy_function(slow, [element], tf.int64)
    )
    # TensorFlow would read ahead while an element is used, which is no wait.
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    slow_dataset = slow_dataset.with_options(options)
    before = recorder.seconds_of_input_waits()
    assert [int(element) for element in slow_dataset] == list(range(10))
    assert recorder.seconds_of_input_waits() - before >= 10 * 0.02


def test_keras_takes_every_sample_of_the_batches():
    import keras

    x, y = pictures(50)
    model = keras.Sequential(
        [keras.Input((2, 3, 1)), keras.layers.Flatten(), keras.layers.Dense(50)]
    )
    # Its state `count` is the number of samples that it was shown.
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # 10 steps and 7 batches: neither is a multiple of the steps per execution.
    model.compile("sgd", loss, metrics=[accuracy], steps_per_execution=4)
    batches = data.batches((x, y), sampler(50, 6), 0, 10)
    model.fit(batches, shuffle=False, verbose=0)
    assert int(accuracy.count) == 60
    assert int(model.optimizer.iterations) == 10
    part = data.one_pass((x, y), rank=0, size=1, local_batch_size=8)
    model.evaluate(part, verbose=0)
    assert int(accuracy.count) == 50


def test_ranks_divide_a_batch_that_is_no_multiple_of_their_number():
    whole = sampler(50, 7, 0).indices(3, 9)
    parts = [sampler(50, 7, 0, rank=rank, size=3).indices(3, 9) for rank in range(3)]
    assert [part.shape for part in parts] == [(6, 3), (6, 2), (6, 2)]
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(part, whole[:, rank::3])


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(9000, dtype="float32").reshape(10, 9, 100),
        np.asfortranarray(np.arange(1000.0).reshape(10, 100)),
        np.arange(4000, dtype="int16").reshape(20, 200)[::2],
        np.arange(10) % 3 == 0,
        np.arange(1000, dtype=">f4").reshape(10, 100),
        np.arange(2000).reshape(10, 200).astype(tf.bfloat16.as_numpy_dtype),
        np.empty((10, 0), "float32"),
    ],
    ids=["contiguous", "columns", "strided", "scalars", ">f4", "bfloat16", "empty"],
)
def test_rows_are_as_indexed_and_need_no_copy(monkeypatch, array, is_native):
    monkeypatch.setattr(SampleFunctions, "take", None)
    if is_native:
        use_library(native.load().functions)
    numbers = np.array([9, 0, 3, 3, 8])
    taken = take_rows(array, numbers)
    np.testing.assert_array_equal(taken, array[numbers])
    assert taken.dtype == array.dtype
    # TensorFlow copies others. NumPy's address of an empty array may be any.
    assert taken.ctypes.data % 64 == 0 or not taken.size
    for number in (-1, 10, 2**40):
        with pytest.raises(IndexError, match="within 0 to 9"):
            take_rows(array, np.array([0, number]))


def test_a_class_derived_from_numpys_is_read_by_its_own_indexing():
    class Halved(np.ndarray):
        def __getitem__(self, key):
            return np.asarray(super().__getitem__(key)) / 2

    source = as_source(np.arange(10.0).view(Halved))
    assert source.read(np.array([4, 6])).tolist() == [2.0, 3.0]
