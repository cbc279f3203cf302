"""`keras.distribution.ModelParallel` on TensorFlow, against plain Keras.

The mesh is (batch, model). Each rank computes the oracle by itself, outside of the
distribution, with the global batch.
"""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import assert_bitwise_equal_over_ranks, difference

import hvdtrain.distribution
import hvdtrain.keras as hvd

hvdtrain.distribution.enable()
keras.distribution.initialize()

BATCH, STEPS, WORDS, WIDTH, CLASSES = 24, 2, 12, 12, 3
SIZE = hvd.size()
# Ranks along the model axis: all, none, and two of four.
MODEL_RANKS = sorted({1, SIZE, math.gcd(SIZE, 2)})
# By the name of the layer: how its weights are laid out.
COLUMNS = {"up/kernel": (None, "model"), "up/bias": ("model",)}
LAYOUTS = {
    "columns": COLUMNS,
    "rows": {"down/kernel": ("model", None)},
    "pair": {**COLUMNS, "down/kernel": ("model", "batch")},
    "einsum": {
        "heads/kernel": (None, "model", None),
        "heads/bias": ("model", None),
        "merge/kernel": ("model", None, "batch"),
    },
    "table by column": {"table/embeddings": ("batch", "model")},
    "table by row": {"table/embeddings": ("model", None)},
    "no call with blocks": {
        "norm/.*": ("model",),
        "conv/kernel": (None, None, "model"),
    },
    "elements": {".*kernel": ("batch", None, None), "table/.*": (None, "batch")},
    "all": {
        **COLUMNS,
        "table/.*": ("model", "batch"),
        "(heads|merge)/kernel": ("model", "batch", None),
        "conv/kernel": (None, "batch", "model"),
        "(down|head)/kernel": ("model", "batch"),
        ".*(gamma|beta)": ("batch",),
    },
}
# The kernels of dense layers have two axes, those of the others three.
LAYOUTS["elements"] = {
    "(heads|merge|conv)/kernel": ("batch", None, None),
    "(up|down|head)/kernel": ("batch", None),
    "table/.*": (None, "batch"),
}


class DenseEmbedding(keras.layers.Embedding):
    """A table whose gradient is dense, as under `keras.distribution`."""

    def call(self, inputs):
        one_hot = keras.ops.one_hot(inputs, WORDS, dtype=self.compute_dtype)
        return one_hot @ self.embeddings


def build(embedding=keras.layers.Embedding, dtype="float64"):
    keras.utils.set_random_seed(3)
    layers = functools.partial(getattr, keras.layers)
    options = {"dtype": dtype}
    inputs = keras.Input((4,), dtype="int32")
    x = embedding(WORDS, WIDTH, name="table", **options)(inputs)
    x = layers("Conv1D")(WIDTH, 3, padding="same", name="conv", **options)(x)
    y = layers("EinsumDense")(
        "...d,dnh->...nh",
        (4, 3),
        "gelu",
        bias_axes="nh",
        name="heads",
        **options,
    )(x)
    y = layers("EinsumDense")(
        "abnh,nhd->abd", (None, WIDTH), bias_axes="d", name="merge", **options
    )(y)
    x = layers("LayerNormalization")(name="norm", **options)(x + y)
    y = layers("Dense")(2 * WIDTH, "softmax", name="up", **options)(x)
    x = x + layers("Dense")(WIDTH, name="down", **options)(y)
    x = layers("BatchNormalization")(name="statistics", **options)(x)
    x = layers("Flatten")(**options)(x)
    x = layers("Dense")(CLASSES, "softmax", name="head", **options)(x)
    return keras.Model(inputs, x)


def batches(count=BATCH * STEPS):
    rng = np.random.default_rng(4)
    words = rng.integers(0, WORDS, (count, 4)).astype("int32")
    samples = words, rng.integers(0, CLASSES, count)
    return tf.data.Dataset.from_tensor_slices(samples).batch(BATCH)


def fit(model, optimizer, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(dtype="float64")
    metrics = ["accuracy", keras.metrics.Sum()] if "sum" in options else ["accuracy"]
    model.compile(optimizer, loss, metrics=metrics)
    options.pop("sum", None)
    return model.fit(batches(), shuffle=False, verbose=0, **options).history


def distribution(model_ranks, layouts):
    shape = SIZE // model_ranks, model_ranks
    mesh = keras.distribution.DeviceMesh(
        shape, ["batch", "model"], keras.distribution.list_devices()
    )
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, axes in layouts.items():
        layout_map[path] = axes
    return keras.distribution.ModelParallel(layout_map=layout_map)


@functools.cache
def trained_in_one_process(make_optimizer):
    expected = build(DenseEmbedding)
    history = fit(expected, make_optimizer())
    return expected, history, expected.evaluate(batches(), verbose=0)


def momentum():
    return keras.optimizers.SGD(0.3, momentum=0.9)


def adam():
    return keras.optimizers.Adam(
        0.01, global_clipnorm=0.1, gradient_accumulation_steps=2, use_ema=True
    )


@pytest.mark.parametrize("model_ranks", MODEL_RANKS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_fit_equals_one_process(name, model_ranks):
    check(momentum, LAYOUTS[name], model_ranks)


@pytest.mark.parametrize("model_ranks", MODEL_RANKS)
def test_options_of_an_optimizer_equal_one_process(model_ranks):
    check(adam, LAYOUTS["all"], model_ranks)


def check(make_optimizer, layouts, model_ranks):
    expected, history, evaluation = trained_in_one_process(make_optimizer)
    with distribution(model_ranks, layouts).scope():
        model = build()
        own_history = fit(model, make_optimizer())
        own_evaluation = model.evaluate(batches(), verbose=0)
        predicted = model.predict(batches(), verbose=0)
    weights = model.get_weights()
    assert_bitwise_equal_over_ranks(weights)
    assert difference(weights, expected.get_weights()) < 1e-12
    # The states of Keras' metrics are float32.
    for key, values in history.items():
        np.testing.assert_allclose(own_history[key], values, rtol=1e-6)
    np.testing.assert_allclose(own_evaluation, evaluation, rtol=1e-6)
    assert difference([predicted], [expected.predict(batches(), verbose=0)]) < 1e-12
