"""What a pipeline cannot split is refused by name."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.parallel.pipeline import splitting, stage
from hvdtrain.sharding.shards import Sharding, set_sharding

layers = keras.layers


def mesh_of(index):
    """The axes of a mesh with two stages, on a rank of the stage `index`."""
    return SimpleNamespace(
        pipeline=SimpleNamespace(index=index, size=2),
        model=SimpleNamespace(process_set=SimpleNamespace(ranks=[0])),
    )


def chain(*middle, inputs=None):
    x = first = inputs if inputs is not None else keras.Input((4,))
    for layer in [layers.Dense(4, name="a"), *middle, layers.Dense(4, name="b")]:
        x = layer(x)
    return keras.Model(first, x)


def residual():
    x = keras.Input((4,))
    y = layers.Dense(4, name="a")(x)
    return keras.Model(x, layers.Add()([layers.Dense(4, name="b")(y), y]))


def shared():
    x, dense = keras.Input((4,)), layers.Dense(4, name="a")
    return keras.Model(x, dense(layers.Dense(4, name="b")(dense(x))))


def tied():
    dense = layers.Dense(4)
    parts = [keras.Sequential([dense], name=name) for name in "ab"]
    return keras.Sequential([keras.Input((4,)), *parts])


def two_inputs():
    x, y = keras.Input((4,)), keras.Input((4,))
    return keras.Model([x, y], layers.Add()([x, y]))


def masked():
    embedding = layers.Embedding(5, 4, mask_zero=True)
    return keras.Sequential([keras.Input((3,)), embedding, layers.Dense(4, name="b")])


class Subclass(keras.Model):
    pass


def subclassed():
    model = chain()
    return Subclass(model.inputs, model.outputs)


class Counter(layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), trainable=False)

    def call(self, x):
        return x


class Variable(layers.Layer):
    """A layer with a variable that Keras does not list."""

    def build(self, shape):
        self.count = tf.Variable(0.0)

    def call(self, x):
        return x


def own_function(x):
    return x


def sharded():
    model = chain()
    # Of a mesh of one rank, in place of one with model=2.
    halves = Sharding(axis=0, size=4, num_shards=2, rank=0, process_set=None)
    set_sharding(model.get_layer("a").kernel, halves)
    return model


REFUSED = {
    "BatchNormalization 'n' .* depends on the whole batch": lambda: chain(
        keras.Sequential([layers.BatchNormalization(name="n")])
    ),
    "Counter 'c' .* depends on the whole batch": lambda: chain(Counter(name="c")),
    "Variable 'v' .* depends on the whole batch": lambda: chain(Variable(name="v")),
    "register_keras_serializable": lambda: chain(layers.Dense(4, own_function)),
    "LSTM 'l' .* batches before": lambda: chain(
        layers.LSTM(4, stateful=True, name="l"),
        inputs=keras.Input((3, 4), batch_size=2),
    ),
    "activity_regularizer": lambda: chain(layers.Dense(4, activity_regularizer="l2")),
    r"one tensor from stage 0 .* \['a', 'b'\]|\['b', 'a'\]": residual,
    "layer 'a' is called in stage 0 and, on the output of 'b', in stage 1": shared,
    "layers 'a' and 'b' share the variable": tied,
    "Dense 'a' .* sharded, and not over the axis model": sharded,
    "2 inputs": two_inputs,
    "output of .*embedding.* has a mask": masked,
    "a Subclass": subclassed,
    "is built": lambda: keras.Sequential([layers.Dense(4)]),
    "Stage 1 has no trainable weights": lambda: keras.Sequential(
        [keras.Input((4,)), layers.Dense(4), layers.ReLU(name="b")]
    ),
    "shape that is known": lambda: chain(inputs=keras.Input((None, 4))),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_split(reason):
    model = REFUSED[reason]()
    stages = [model.layers[-1].name] if model.layers else []
    with pytest.raises(ValueError, match=reason):
        stage.build(model, stages, mesh_of(0))


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        (["unknown"], r"'unknown'.*\['b'\]"),
        (["a"], "first layers of the second stage"),
        ([1, 2], "add up to the 2 layers"),
        ([2], r"1 stages, for a mesh with pipeline=2"),
    ],
)
def test_stages_that_do_not_fit(stages, reason):
    with pytest.raises(ValueError, match=reason):
        stage.build(chain(), stages, mesh_of(0))


def test_normalizations_and_a_call_that_is_shared_within_a_stage():
    dense = layers.Dense(4, name="twice")
    norm = layers.BatchNormalization(trainable=False)
    adapted = layers.Normalization()
    adapted.adapt(np.arange(12, dtype="float32").reshape(3, 4))
    model = chain(norm, adapted, layers.Dense(4, name="c"), dense, dense)
    x = np.ones((2, 4), "float32")
    value = x
    for index in range(2):
        part = stage.build(model, ["c"], mesh_of(index))
        value = part.network(value)
    np.testing.assert_array_equal(value, model(x))
    rebuilt = part.full_model.build()
    described = [(weight.path, weight.shape) for weight in rebuilt.weights]
    assert described == [(weight.path, weight.shape) for weight in model.weights]


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([0, 100, 1], 2, [2, 1]),
        ([3, 0, 4, 5, 0, 2, 9, 1], 3, [3, 3, 2]),
        ([0, 1, 0, 1, 0, 1], 3, [3, 2, 1]),
    ],
)
def test_the_largest_stage_has_as_few_parameters_as_possible(sizes, count, expected):
    assert splitting.balance(sizes, count) == expected


def test_stages_without_weights_are_refused():
    with pytest.raises(ValueError, match="2 layers with weights; expected at least 3"):
        splitting.balance([0, 4, 4], 3)
