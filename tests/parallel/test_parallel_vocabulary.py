"""Cross-entropy and accuracy of divided logits, against those of whole ones."""

import keras
import meshes as shared
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import parallel

ranks, four_ranks = pytest.mark.ranks, pytest.mark.four_ranks
RNG = np.random.default_rng(5)
BATCH, LENGTH, CLASSES = 3, 5, 13
LOGITS = RNG.normal(size=(BATCH, LENGTH, CLASSES)).astype("float32")
LABELS = RNG.integers(0, CLASSES, (BATCH, LENGTH))
WEIGHTS = RNG.random((BATCH, LENGTH)).astype("float32")
MASK = RNG.random((BATCH, LENGTH)) < 0.6


@pytest.fixture(scope="module")
def meshes():
    with shared.all_meshes() as found:
        yield found


def part_of(logits, mesh, axis=-1):
    """The part of the logits that a `ColumnParallelDense` leaves on this rank."""
    axes = np.array_split(np.arange(logits.shape[axis]), mesh.model.size)
    return np.take(logits, axes[mesh.model.index], axis)


# Not as they are: without the maximum over the ranks, e^800 overflows.
LARGE = LOGITS * 800
FORBIDDEN = np.where(np.arange(CLASSES) == LABELS[0, 0], LOGITS, -np.inf)
FORBIDDEN[..., 0] = 1
CASES = {
    "ids in columns": ({}, LOGITS, LABELS[..., None], None, None),
    "large, sum": ({"reduction": "sum"}, LARGE, LABELS, None, None),
    "minus infinity": ({}, FORBIDDEN[:1, :1], LABELS[:1, :1], None, None),
    "two axes": ({"reduction": None}, LOGITS[0], LABELS[0], None, None),
    "a mask": ({}, LOGITS, LABELS, None, MASK),
    "ignored class, weights and a mask": (
        {"ignore_class": -1, "reduction": "mean_with_sample_weight"},
        np.where(MASK[..., None], np.nan, LOGITS),
        np.where(MASK, -1, LABELS),
        WEIGHTS,
        MASK[::-1],
    ),
}


@ranks
@four_ranks
def test_the_loss_is_that_of_whole_logits(meshes):
    for mesh in meshes:
        for name, (options, logits, labels, weights, mask) in CASES.items():
            dense = keras.losses.SparseCategoricalCrossentropy(True, **options)
            # Keras 3.12 has gradients of NaN for ignored logits that are NaN.
            whole = np.where(np.isnan(logits), 0, logits).astype("float32")
            wanted, by_logits = run(dense, labels, whole, weights, mask)
            loss = parallel.ParallelSparseCategoricalCrossentropy(
                True, mesh=mesh, **options
            )
            part = part_of(logits, mesh)
            found, by_part = run(loss, labels, part, weights, mask)
            np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=name)
            by_logits = part_of(by_logits, mesh)
            np.testing.assert_allclose(by_part, by_logits, atol=1e-6, err_msg=name)
            assert loss.get_config() == dense.get_config()


def run(loss, labels, logits, weights=None, mask=None):
    logits = tf.constant(logits)
    if mask is not None:
        logits._keras_mask = tf.constant(mask)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        value = loss(labels, logits, sample_weight=weights)
    return value.numpy(), tape.gradient(value, logits).numpy()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits_are_computed_with_in_float32(meshes, dtype):
    half = tf.cast(LOGITS * 8, dtype)
    wide = keras.losses.SparseCategoricalCrossentropy(True)
    wanted, by_logits = run(wide, LABELS, tf.cast(half, "float32"))
    loss = parallel.ParallelSparseCategoricalCrossentropy(True, mesh=meshes[0])
    part = tf.constant(part_of(half.numpy(), meshes[0]))
    found, by_part = run(loss, LABELS, part)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    # The gradient by a tensor has its dtype.
    assert by_part.dtype == part.dtype
    rounded = tf.cast(part_of(by_logits, meshes[0]), dtype).numpy()
    np.testing.assert_array_equal(by_part, rounded)


@four_ranks
def test_a_label_that_is_no_class_gives_nan_on_all_ranks(meshes):
    loss = parallel.ParallelSparseCategoricalCrossentropy(True, mesh=meshes[-1])
    for label in (-1, CLASSES):
        found, by_part = run(
            loss, np.array([label]), part_of(LOGITS[0, :1], meshes[-1])
        )
        assert np.isnan(found)
        assert np.isnan(by_part).all()


def test_what_is_not_divided_logits_is_refused(meshes):
    with meshes[0]:
        with pytest.raises(ValueError, match="leave out the softmax"):
            parallel.ParallelSparseCategoricalCrossentropy()
        with pytest.raises(ValueError, match="Received: axis=1; expected -1"):
            parallel.ParallelSparseCategoricalCrossentropy(True, axis=1)
        with pytest.raises(ValueError, match=r"label_smoothing=0\.1; expected 0"):
            parallel.ParallelSparseCategoricalCrossentropy(True, label_smoothing=0.1)
        loss = parallel.ParallelSparseCategoricalCrossentropy(True)
    loss(LABELS, part_of(LOGITS, meshes[0]))
    with pytest.raises(ValueError, match="takes the output of a ColumnParallelDense"):
        loss(LABELS, LOGITS)


def test_three_numbers_a_label_cross_the_ranks(meshes):
    loss = parallel.ParallelSparseCategoricalCrossentropy(True, mesh=meshes[0])
    labels = 1000
    part = part_of(np.zeros((labels, CLASSES), "float32"), meshes[0])
    function = tf.function(loss, autograph=False)
    graph = function.get_concrete_function(np.zeros(labels, int), part).graph
    sent = [
        op.inputs[0] for op in graph.get_operations() if op.type.endswith("Allreduce")
    ]
    exchanged = sum(x.shape.num_elements() * x.dtype.size for x in sent)
    # A number of each message compares the ranks' calls.
    assert 3 * 4 * labels <= exchanged <= 3 * 4 * labels + 4 * len(sent)


@ranks
@four_ranks
def test_the_accuracy_is_that_of_whole_logits(meshes):
    # The second logits have equal maxima on several ranks.
    tied = np.abs(np.round(LOGITS))
    labels = np.where(MASK, tied.argmax(-1), LABELS)
    for mesh in meshes:
        dense = keras.metrics.SparseCategoricalAccuracy()
        metric = parallel.ParallelSparseCategoricalAccuracy(mesh=mesh)
        for logits, weights in [(LOGITS, None), (tied, WEIGHTS)]:
            dense.update_state(labels, logits, sample_weight=weights)
            metric.update_state(labels, part_of(logits, mesh), sample_weight=weights)
        assert 0.2 < float(metric.result()) == float(dense.result()) < 0.8
        assert metric.get_config() == dense.get_config()
