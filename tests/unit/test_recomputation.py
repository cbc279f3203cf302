"""Layers that are recomputed in the backward pass, against the same without it."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import parallel

WIDTH, BATCH = 16, 8
X = np.random.default_rng(0).normal(size=(6 * BATCH, WIDTH)).astype("float32")


@pytest.fixture(autouse=True)
def _defaults():
    yield
    keras.config.set_dtype_policy("float32")
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})


def same(layer):
    return layer


def naive(layer):
    """What Keras' own scope would do, had it no error for keywords."""
    call = layer.call

    def recomputed(x, **keywords):
        return tf.recompute_grad(lambda x: call(x, **keywords))(x)

    layer.call = recomputed
    return layer


def block(wrap, activation="relu", regularizer=None):
    """Dropout, moving statistics, a loss, and a layer inside that is wrapped, too."""
    inner = [keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dropout(0.3)]
    return wrap(
        keras.Sequential(
            [
                keras.layers.Dense(WIDTH, activation),
                keras.layers.Dropout(0.3),
                keras.layers.BatchNormalization(),
                wrap(keras.Sequential(inner)),
                keras.layers.Dense(WIDTH, activity_regularizer=regularizer),
            ]
        )
    )


def trained(wrap, *, block_args=(), accumulation=None, epochs=2, **compile_args):
    """Return all variables and the history of a training."""
    keras.utils.set_random_seed(1)
    inputs = x = keras.Input((WIDTH,))
    for _ in range(2):
        x = x + block(wrap, *block_args)(x)
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(x))
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulation)
    model.compile(optimizer, "mse", jit_compile=False, **compile_args)
    history = model.fit(
        X, X[:, :1], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0
    ).history
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]], history


def assert_equal(results, expected):
    (variables, history), (expected_variables, expected_history) = results, expected
    assert history == expected_history
    for variable, wanted in zip(variables, expected_variables, strict=True):
        np.testing.assert_array_equal(variable, wanted)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("float32", {"accumulation": 2, "run_eagerly": True, "epochs": 1}),
        # In a graph, without accumulation: tests/parallel/test_recomputation.py.
        pytest.param(
            *("float32", {"accumulation": 2, "steps_per_execution": 2}),
            marks=pytest.mark.release,
        ),
        pytest.param(
            "float32",
            {"block_args": ("gelu", "l2"), "run_eagerly": True, "epochs": 1},
            marks=pytest.mark.release,
        ),
        pytest.param("mixed_float16", {}, marks=pytest.mark.release),
    ],
)
@pytest.mark.long
def test_training_is_equal_bit_for_bit(policy, options):
    keras.config.set_dtype_policy(policy)
    assert_equal(trained(parallel.remat, **options), trained(same, **options))


@pytest.mark.release
def test_with_gelu_it_is_equal_where_the_graphs_are_not_rewritten():
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    options = {"block_args": ("gelu", "l2")}
    assert_equal(trained(parallel.remat, **options), trained(same, **options))


@pytest.mark.long
def test_the_oracle_sees_a_second_update_and_other_masks():
    options = {"epochs": 1, "run_eagerly": True}
    with pytest.raises(AssertionError):
        assert_equal(trained(naive, **options), trained(same, **options))


@keras.saving.register_keras_serializable()
class Mixing(keras.layers.Layer):
    """Tensors in keywords and nests, an unused weight and an output of integers."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), name="kernel")
        self.unused = self.add_weight(shape=(1,), name="unused")
        self.count = self.add_weight(shape=(), name="count", trainable=False)

    def call(self, pair, *, scale):
        self.count.assign_add(1.0)
        first, second = pair
        product = keras.ops.tanh(first @ self.kernel) * scale["by"] + second
        return {"product": product * self.count, "argmax": tf.argmax(product, axis=-1)}


@pytest.mark.parametrize("is_graph", [False, True])
def test_nests_of_tensors(is_graph):
    def run(layer, *tensors):
        first, second, by, third, other = tensors
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            outputs = layer((first, second), scale={"by": by})
            outputs = layer((third, outputs["product"]), scale={"by": other})
        targets = [*tensors, *(v.value for v in layer.trainable_variables)]
        gradients = tape.gradient(outputs["product"], targets)
        return gradients, outputs["argmax"], layer.count.value

    results = []
    # One use of each: gradients of several uses are added up in another order.
    tensors = tf.unstack(tf.reshape(X[:40], (5, BATCH, WIDTH)))
    for wrap in (parallel.remat, same):
        keras.utils.set_random_seed(3)
        layer = wrap(Mixing())
        layer((tensors[0], tensors[0]), scale={"by": tensors[0]})
        function = tf.function(run) if is_graph else run
        (*gradients, by_unused), *others = function(layer, *tensors)
        assert by_unused is None
        results.append([*gradients, *others])
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_masks_pass_through():
    def run(wrap):
        keras.utils.set_random_seed(4)
        layers = [keras.layers.Dense(5), keras.layers.LSTM(4, return_sequences=True)]
        model = keras.Sequential(
            [
                keras.layers.Masking(),
                wrap(keras.Sequential(layers)),
                keras.layers.GlobalAveragePooling1D(),
            ]
        )
        x = np.ones((2, 3, 4), "float32")
        x[:, 2] = 0
        with tf.GradientTape() as tape:
            outputs = model(x)
        return [outputs, *tape.gradient(outputs, model.trainable_weights)]

    for found, wanted in zip(run(parallel.remat), run(same), strict=True):
        np.testing.assert_array_equal(found, wanted)


PEAK = """
import resource, sys
import keras, numpy as np
from hvdtrain import parallel
wrap = parallel.remat if sys.argv[1] == "remat" else lambda layer: layer
layers = [keras.Sequential([keras.layers.Dense(512, "gelu") for _ in range(4)])
          for _ in range(8)]
model = keras.Sequential([keras.Input((512,)), *map(wrap, layers)])
model.compile("sgd", "mse", jit_compile=False)
x = np.zeros((2 * 2048, 512), "float32")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.fit(x, x, batch_size=2048, verbose=0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.release
def test_the_peak_of_memory_is_lower_under_fit():
    # Processes of their own: a peak of memory is the highest since a process started.
    remat, without = [
        int(subprocess.check_output([sys.executable, "-c", PEAK, name], timeout=300))
        for name in ("remat", "without")
    ]
    assert remat < 0.6 * without


class Drawing(keras.layers.Layer):
    def call(self, x):
        return x * keras.random.uniform(keras.ops.shape(x))


class DrawingInTensorFlow(keras.layers.Layer):
    def call(self, x):
        return x * tf.random.uniform(tf.shape(x))


class Closing(keras.layers.Layer):
    """Uses a weight that is not its own."""

    def build(self, shape):
        self.__dict__["weight"] = keras.Variable(1.0)

    def call(self, x):
        return x * self.__dict__["weight"]


class MakingRagged(keras.layers.Layer):
    def call(self, x):
        return tf.RaggedTensor.from_tensor(x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Drawing(), "assigns .*keras.random.SeedGenerator"),
        (DrawingInTensorFlow(), "the stateful operation RandomUniform"),
        (Closing(), "a weight that it does not have"),
        (MakingRagged(), "a RaggedTensor"),
        (keras.layers.Embedding(9, 4), "sparse gradients"),
    ],
)
def test_what_cannot_be_repeated_is_an_error(layer, message):
    parallel.remat(layer)

    @tf.function
    def gradients(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            outputs = layer(x)
        return tape.gradient(outputs, [x, *[v.value for v in layer.trainable_weights]])

    with pytest.raises(ValueError, match=f"cannot repeat the call.*{message}"):
        gradients(tf.ones((2, 3)))


def test_a_file_and_a_clone_are_the_plain_model(tmp_path):
    model = keras.Sequential([keras.Input((WIDTH,)), block(parallel.remat)])
    model.save(tmp_path / "model.keras")
    others = [
        keras.models.load_model(tmp_path / "model.keras"),
        keras.models.clone_model(model),
    ]
    for other in others:
        assert "call" not in vars(other.layers[0])
    np.testing.assert_array_equal(model(X), others[0](X))
    assert parallel.remat(model.layers[0]) is model.layers[0]
