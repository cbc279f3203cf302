"""Weights are decayed in their memory, and as Keras does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.keras.replication import get_hook
from hvdtrain.keras.weight_decay import WeightDecay

pytestmark = pytest.mark.usefixtures("one_rank")
INPUTS = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
LABELS = INPUTS[:, :1]


def compiled_model(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256)])
    model.compile(optimizer, "mse")
    return model


def adamw(**options):
    return keras.optimizers.AdamW(0.01, weight_decay=0.5, **options)


def address(variable):
    return np.asarray(tf.convert_to_tensor(variable.value)).ctypes.data


def names_before(operation):
    """Return the names of the operations that have to run before this one."""
    before = [*operation.control_inputs, *(each.op for each in operation.inputs)]
    return {each.name for each in before}.union(*map(names_before, before))


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_decay_is_that_of_keras(options, run_eagerly):
    plain = compiled_model(adamw(**options))
    distributed = compiled_model(hvd.DistributedOptimizer(adamw(**options)))
    for model in (plain, distributed):
        model.run_eagerly = run_eagerly
        model.fit(INPUTS, LABELS, batch_size=8, verbose=0, shuffle=False)
    for value, expected in zip(distributed.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_no_weight_is_copied():
    model = compiled_model(hvd.DistributedOptimizer(adamw()))
    model.make_train_function()
    batches = iter(tf.data.Dataset.from_tensors((INPUTS, LABELS)).repeat())
    # The first update copies: initial values of variables are shared.
    model.train_function(batches)
    before = address(model.weights[0])
    for _ in range(5):
        model.train_function(batches)
        assert address(model.weights[0]) == before


def test_a_weight_is_decayed_after_its_gradient():
    optimizer = adamw()
    variables = [keras.Variable(np.ones(3, "float32")) for _ in range(2)]
    optimizer.build(variables)
    decay = WeightDecay(optimizer)

    @tf.function
    def update(x):
        gradient = tf.identity(x, name="gradient")
        decay.follow([gradient], variables[:1])
        optimizer._apply_weight_decay(variables)

    graph = update.get_concrete_function(tf.ones(3)).graph
    updates = [
        operation
        for operation in graph.get_operations()
        if operation.type == "AssignSubVariableOp"
    ]
    # The second variable has no gradient.
    assert ["gradient" in names_before(each) for each in updates] == [True, False]
    update(tf.ones(3))
    # 1 - 1 * 0.5 * 0.01, by hand.
    for variable in variables:
        np.testing.assert_allclose(variable, np.full(3, 0.995), rtol=1e-6)


class _Sparse(keras.layers.Layer):
    """Gives its table gradients of rows alone."""

    def build(self, shape):
        self.table = self.add_weight(shape=(16, 4), initializer="ones")

    def call(self, inputs):
        indices = tf.cast(tf.abs(inputs[:, :1]) * 4, "int32") % 16
        return tf.reshape(tf.gather(self.table.value, indices), (-1, 4))


def _exclude(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: _exclude(adamw()),
        lambda: adamw(global_clipnorm=0.1, use_ema=True),
        lambda: keras.optimizers.LossScaleOptimizer(adamw()),
    ],
    ids=["excluded", "clipped", "scaled"],
)
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.release
def test_the_decay_is_that_of_keras_with_options(make, skips):
    def trained(optimizer):
        keras.utils.set_random_seed(0)
        layers = [keras.Input((64,)), _Sparse(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(optimizer, "mse")
        model.fit(INPUTS, LABELS, batch_size=8, verbose=0, shuffle=False)
        return model.get_weights()

    expected = trained(make())
    optimizer = hvd.DistributedOptimizer(make())
    if skips:
        get_hook(optimizer).skip_nonfinite()
    for value, other in zip(trained(optimizer), expected, strict=True):
        np.testing.assert_array_equal(value, other)
