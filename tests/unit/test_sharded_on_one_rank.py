"""Sharded models on one rank, which has their full weights, against Keras layers."""

import keras
import numpy as np
import oracle
import pytest

import hvdtrain.keras as hvd
from hvdtrain import parallel

X = np.random.default_rng(0).integers(0, 9, (8, 5))
Y = np.arange(8) % 3


@pytest.fixture(scope="module")
def mesh():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CONTROLLER", "gloo")
        patch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
        hvd.init()
    return parallel.Mesh()


def keras_layers():
    return [
        keras.layers.Embedding(9, 4),
        keras.layers.MultiHeadAttention(2, 3),
        keras.layers.Dense(7, "tanh"),
        keras.layers.Dense(3, "softmax"),
    ]


def sharded_layers(mesh):
    with mesh:
        return [
            parallel.ShardedEmbedding(9, 4),
            parallel.ParallelMultiHeadAttention(2, 3),
            parallel.ColumnParallelDense(7, "tanh", gather_output=False),
            parallel.RowParallelDense(3, "softmax", input_is_parallel=True),
        ]


def network(make_layers):
    keras.utils.set_random_seed(1)
    table, attention, first, last = make_layers()
    inputs = keras.Input((5,))
    x = table(inputs)
    x = keras.layers.GlobalAveragePooling1D()(attention(x, x))
    return keras.Model(inputs, last(first(x)))


def sharded(mesh):
    return network(lambda: sharded_layers(mesh))


def staged(mesh):
    return parallel.PipelineModel(network(keras_layers), microbatches=1, mesh=mesh)


def distributed(mesh):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, mesh=mesh, shard_state=True)


@pytest.mark.parametrize(
    "make", [sharded, pytest.param(staged, marks=pytest.mark.long)]
)
def test_the_file_is_the_full_model(mesh, tmp_path, make):
    expected, model, again = network(keras_layers), make(mesh), make(mesh)
    expected.compile(keras.optimizers.SGD(0.1, momentum=0.9), oracle.LOSS)
    model.compile(distributed(mesh), oracle.LOSS)
    for trained in (expected, model):
        oracle.fit(trained, X, Y)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    kinds = {type(layer).__module__.partition(".")[0] for layer in loaded.layers}
    assert kinds == {"keras"}
    oracle.assert_same_state(loaded, expected, atol=1e-6)
    model.save_weights(tmp_path / "model.weights.h5")
    again.load_weights(tmp_path / "model.weights.h5")
    for weight, wanted in zip(again.weights, model.weights, strict=True):
        np.testing.assert_array_equal(weight, wanted)


def test_fully_shard_leaves_a_model_as_it_is(mesh):
    def build():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(3, "softmax", name="head")]
        )

    model, expected = build(), build()
    assert parallel.fully_shard(model, min_size=1) is model
    assert type(model.layers[0].kernel) is type(expected.layers[0].kernel)
    for network in (model, expected):
        network.compile("sgd", oracle.LOSS)
        oracle.fit(network, X, Y)
    oracle.assert_same_state(model, expected)
    with pytest.raises(ValueError, match=r"^fully_shard takes a model that is built"):
        parallel.fully_shard(keras.Sequential([keras.layers.Dense(3)]))
