"""The rule that compares names of variables in two processes."""

import re

import keras
import pytest

from hvdtrain.checkpoint.names import KerasNames

pytestmark = pytest.mark.usefixtures("one_rank")

Dense = keras.layers.Dense


def compiled(model, shape=(4,)):
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse", metrics=["mae"])
    model.build((None, *shape))
    model.optimizer.build(model.trainable_variables)
    return model


def sequential():
    layers = [Dense(4), Dense(3), keras.layers.Dropout(0.5), Dense(1)]
    return compiled(keras.Sequential([keras.Input((4,)), *layers]))


def nested():
    inputs, inside = keras.Input((4,)), keras.Input((4,))
    inner = keras.Model(inside, Dense(3)(Dense(4)(inside)))
    deep = keras.Sequential([keras.Input((3,)), Dense(3), Dense(3)])
    return compiled(keras.Model(inputs, Dense(1)(deep(inner(inputs)))))


class Block(keras.layers.Layer):
    """Has a layer whose name begins with the block's own, and an unnamed weight."""

    def __init__(self):
        super().__init__()
        self.named = Dense(4, name=f"{self.name}_dense")

    def build(self, shape):
        self.scale = self.add_weight(shape=(4,))
        self.named.build(shape)

    def call(self, x):
        return x * self.scale


class Perceptron(keras.layers.Layer):
    """Has layers with numbers of its own after the block's name."""

    def __init__(self):
        super().__init__()
        self.parts = [Dense(4, name=f"{self.name}_{i}") for i in (1, 2)]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Rare(Dense):
    """A layer that is made again as one of its base class, as for a sharded table."""


def of_another_class():
    layers = [Dense.from_config(Rare(4).get_config()) for _ in range(2)]
    return compiled(keras.Sequential([keras.Input((4,)), *layers]))


def blocks_with_numbers():
    # In the first model of a process, perceptron_1 is the second block, and a layer of
    # the first one.
    layers = [Perceptron(), Perceptron(), Dense(1)]
    return compiled(keras.Sequential([keras.Input((4,)), *layers]))


class Two(keras.Model):
    """As a GAN: two models in a list, and blocks."""

    def __init__(self):
        super().__init__()
        self.models = [sequential(), sequential()]
        self.blocks = [Block(), Block()]

    def build(self, shape):
        for block in self.blocks:
            block.build(shape)

    def call(self, x):
        return x


def recurrent():
    cells = [keras.layers.LSTMCell(2), keras.layers.GRUCell(3)]
    layers = [
        keras.layers.Bidirectional(keras.layers.LSTM(2, return_sequences=True)),
        keras.layers.Bidirectional(keras.layers.LSTM(2, return_sequences=True)),
        keras.layers.RNN(cells),
    ]
    model = keras.Sequential([keras.Input((3, 4)), *layers, Dense(1)])
    return compiled(model, (3, 4))


def layers_of_another_model():
    base = keras.Sequential([keras.Input((4,)), Dense(4), Dense(3)])
    return compiled(keras.Model(base.inputs, Dense(1)(base.layers[0].output)))


def beside_names_of_a_file():
    """A layer that the user has not named, and others named as in a file."""
    layers = [Dense(4, name="dense"), Dense(4, name="dense_1")]
    inner = keras.Sequential([keras.Input((4,)), *layers])
    return compiled(keras.Sequential([keras.Input((4,)), inner, Dense(1)]))


def features():
    space = keras.utils.FeatureSpace(
        {"a": keras.utils.FeatureSpace.float_normalized()}, output_mode="concat"
    )
    space.preprocessors["a"].build((None, 1))
    return compiled(keras.Sequential([space.preprocessors["a"]]), (1,))


def pairs(before, now):
    """Return the paths of a checkpoint of one model, and of the other model."""
    states = [[*model.variables, *model.optimizer.variables] for model in (before, now)]
    return [(old.path, new.path) for old, new in zip(*states, strict=True)]


@pytest.mark.parametrize(
    "make_model",
    [
        sequential,
        nested,
        lambda: compiled(Two()),
        recurrent,
        layers_of_another_model,
        beside_names_of_a_file,
        blocks_with_numbers,
        of_another_class,
        features,
    ],
)
def test_a_model_that_is_made_again_has_the_same_names(make_model):
    keras.utils.clear_session(free_memory=False)
    models = [make_model() for _ in range(3)]
    assert any(old != new for old, new in pairs(*models[:2]))
    for before in models:
        for now in models:
            assert KerasNames(now).difference(pairs(before, now)) == ""


def branches(names):
    layers = [Dense(4, name=name) for name in names.split()]
    return compiled(keras.Sequential([keras.Input((4,)), *layers], name="all"))


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        # Names of a user are compared as they are.
        ("branch_1 branch_2", "branch_2 branch_1", "branch_1 branch_2"),
        ("branch_1 branch_2", "branch_2 branch_3", "branch_1 branch_2"),
        ("branch_9", "branch_10", "branch_9 branch_10"),
        ("Left", "left", "Left left"),
        ("my_dense_1", "my_dense_2", "my_dense_1 my_dense_2"),
        ("dense_1_out_1", "dense_1_out_2", "dense_1_out_1 dense_1_out_2"),
        ("dense out_1", "dense_1 out_2", "out_1 out_2"),
        # Automatic ones by the order of their numbers.
        ("dense dense_1", "dense_8 dense_10", ""),
        ("dense_8 dense_10", "dense dense_1", ""),
        ("dense dense_1", "dense_1 dense", "dense_1 dense dense dense_1"),
        (
            "dense_1 dense_2 dense_3",
            "dense_6 dense_4 dense_5",
            "dense_3 dense_5 dense_1 dense_6",
        ),
    ],
)
def test_names_of_layers(before, now, expected):
    before, now = branches(before), branches(now)
    found = KerasNames(now).difference(pairs(before, now))
    assert re.findall(r"all/(\w+)/kernel", found) == expected.split()
    # Names of slots alone show it, too.
    slots = [pair for pair in pairs(before, now) if "momentum" in pair[0]]
    assert bool(KerasNames(now).difference(slots)) == bool(expected)


def test_an_optimizer_of_an_older_keras():
    model = sequential()
    paths = [v.path for v in model.optimizer.variables]
    older = [re.sub(r"^sgd(_\d+)?/", "SGD/", path) for path in paths]
    assert KerasNames(model).difference(zip(older, paths, strict=True)) == ""
