"""SyncBatchNormalization, against one process with the batch of all ranks."""

import functools
import inspect
import warnings

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.keras.layers import check_synchronized

RANK, SIZE = hvd.rank(), hvd.size()


def rows_of(rank, *, equal):
    # Unequal: rank r has 3 r + 1 rows but the last of several ranks has none.
    if equal:
        return 4
    return 0 if SIZE > 1 and rank == SIZE - 1 else 3 * rank + 1


def data(*, equal, shape=(5,), offset=0.0):
    """All ranks' rows, one after another, and this rank's slice of them."""
    counts = [rows_of(rank, equal=equal) for rank in range(SIZE)]
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(sum(counts), *shape)).astype("float32") * 2 + 1 + offset
    start = sum(counts[:RANK])
    return rows, slice(start, start + counts[RANK])


def loss_of(outputs, rows):
    weights = np.random.default_rng(4).normal(size=rows.shape).astype("float32")
    return lambda part: tf.reduce_sum(tf.sin(outputs) * weights[part])


def run(layer, inputs, all_rows, part, mask=None):
    """Output, gradients by input, gamma and beta, and moving statistics."""
    x = tf.constant(inputs)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = tf.cast(layer(x, training=True, mask=mask), tf.float32)
            loss = loss_of(outputs, all_rows)(part)
        gradients = tape.gradient(loss, [x, *layer.trainable_variables])
        return outputs, gradients

    outputs, (by_input, *by_weights) = step(x)
    return outputs, by_input, by_weights, layer.non_trainable_variables


KERAS_OWN = functools.partial(keras.layers.BatchNormalization, synchronized=True)
BOTH = pytest.mark.parametrize(
    "layer_class", [hvd.SyncBatchNormalization, KERAS_OWN], ids=["hvd", "keras"]
)


def compare(
    all_rows,
    part,
    *,
    layer_class=hvd.SyncBatchNormalization,
    mask=None,
    tolerance=1e-5,
    **arguments,
):
    twin = keras.layers.BatchNormalization(**arguments)
    twin.build((None, *all_rows.shape[1:]))
    layer = layer_class(**arguments)
    layer.build((None, *all_rows.shape[1:]))
    everything = slice(None)
    expected = run(twin, all_rows, all_rows, everything, mask)
    mine = mask if mask is None else mask[part]
    outputs, by_input, by_weights, moving = run(
        layer, all_rows[part], all_rows, part, mine
    )
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(outputs, expected[0][part], **close)
    np.testing.assert_allclose(by_input, expected[1][part], **close)
    for gradient, value in zip(by_weights, expected[2], strict=True):
        total = hvd.allreduce(gradient, op=hvd.Sum)
        np.testing.assert_allclose(total, value, rtol=tolerance, atol=10 * tolerance)
    for variable, value in zip(moving, expected[3], strict=True):
        np.testing.assert_allclose(variable, value, **close)


@pytest.mark.ranks
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("shape", [(5,), (3, 2, 4)])
def test_equal_to_the_big_batch(equal, shape):
    compare(*data(equal=equal, shape=shape))


def test_channels_first():
    compare(*data(equal=False, shape=(4, 3, 2)), axis=1)


@pytest.mark.skipif(
    "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters,
    reason="Keras has it from 3.14 on",
)
def test_renormalisation():
    compare(*data(equal=True), renorm=True)


@pytest.mark.parametrize("equal", [True, False])
@BOTH
def test_masked_steps_do_not_count(equal, layer_class):
    rows, part = data(equal=equal, shape=(6, 4))
    mask = np.random.default_rng(5).integers(0, 2, rows.shape[:2]).astype(bool)
    mask[0] = True
    compare(rows, part, layer_class=layer_class, mask=mask)


def test_variance_of_values_far_from_zero():
    # E[x²] - E[x]² of float32 would be off by more than the variance itself.
    compare(*data(equal=True, offset=1e4), tolerance=2e-3)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    compare(*data(equal=False), tolerance=2e-2, dtype=policy)


@BOTH
@pytest.mark.parametrize("by_tape", [False, True])
def test_training_equals_one_process(layer_class, by_tape):
    rng = np.random.default_rng(6)
    rows = 4 * SIZE
    x, y = rng.normal(size=(3 * rows, 6)), rng.normal(size=(3 * rows, 2))
    options = {"dtype": "float64"}
    frozen = {"trainable": False, "moving_mean_initializer": "ones"}

    def train(norm, inputs, labels, *, is_distributed):
        keras.utils.set_random_seed(8)
        layers = keras.layers
        model = keras.Sequential(
            [
                keras.Input((6,), **options),
                layers.Dense(8, **options),
                norm(**options),
                layers.Activation("tanh", **options),
                norm(**options, **frozen),
                layers.Dense(2, **options),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1)
        batch = rows // (SIZE if is_distributed else 1)
        if by_tape:
            for step in range(3):
                part = slice(step * batch, (step + 1) * batch)
                with tf.GradientTape() as tape:
                    outputs = model(inputs[part], training=True)
                    loss = tf.reduce_mean((outputs - labels[part]) ** 2)
                if is_distributed:
                    tape = hvd.DistributedGradientTape(tape)
                optimizer.apply(
                    tape.gradient(loss, model.trainable_variables),
                    model.trainable_variables,
                )
            return model.get_weights()
        if is_distributed:
            optimizer = hvd.DistributedOptimizer(optimizer)
        model.compile(optimizer, keras.losses.MeanSquaredError(**options))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            callbacks *= is_distributed
            oracle.fit(model, inputs, labels, batch, callbacks=callbacks)
        return model.get_weights()

    mine = slice(RANK, None, SIZE)
    weights = train(layer_class, x[mine], y[mine], is_distributed=True)
    local = keras.layers.BatchNormalization
    expected = train(local, x, y, is_distributed=False)
    for value, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks
def test_a_layer_over_all_ranks_of_a_model_that_some_train_is_refused():
    sets = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    model = keras.Sequential([keras.Input((3,)), KERAS_OWN(name="bn")])
    if SIZE > 1:
        with pytest.raises(ValueError, match=r"BatchNormalization bn .* over all rank"):
            check_synchronized(model, sets[RANK])
    check_synchronized(model, hvd.global_process_set)
    for process_set in sets:
        hvd.remove_process_set(process_set)


def test_two_layers_side_by_side_though_a_rank_has_built_a_layer_more():
    if RANK == 0:
        hvd.SyncBatchNormalization()
    a, b = hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization()
    rows, part = data(equal=True)

    @tf.function
    def both(x):
        return a(x, training=True), b(2 * x, training=True)

    normalised = (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-3)
    for _ in range(3):
        np.testing.assert_allclose(both(rows[part])[0], normalised[part], atol=1e-5)


def test_inference_uses_the_moving_statistics_of_this_rank():
    layer = hvd.SyncBatchNormalization(epsilon=0.0)
    x = tf.constant([[2.0 + RANK]])
    assert float(layer(x, training=False)[0, 0]) == pytest.approx(2.0 + RANK)


def test_a_process_set_normalises_on_its_own():
    sets = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    layer = hvd.SyncBatchNormalization(process_set=sets[RANK])
    x = np.array([[1.0], [3.0]], "float32") * (RANK + 1)
    outputs = layer(x, training=True)
    for process_set in sets:
        hvd.remove_process_set(process_set)
    np.testing.assert_allclose(outputs, [[-1.0], [1.0]], atol=1e-3)


def test_saved_and_loaded(tmp_path):
    model = keras.Sequential([keras.Input((3,)), hvd.SyncBatchNormalization()])
    path = tmp_path / f"{RANK}.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert isinstance(loaded.layers[0], hvd.SyncBatchNormalization)


@pytest.mark.parametrize("fused", [True, None])
def test_fused_is_an_error(fused):
    with pytest.raises(ValueError, match="cannot be fused"):
        hvd.SyncBatchNormalization(fused=fused)
