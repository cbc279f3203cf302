"""Shards of tensors between sharded layers: which layers take them, and which not."""

import keras
import meshes as shared
import numpy as np
import pytest

import hvdtrain.keras as hvd
from hvdtrain import parallel

INPUTS, HIDDEN, OUTPUTS, BATCH = 13, 17, 3, 6


@pytest.fixture(scope="module")
def meshes():
    with shared.all_meshes() as found:
        yield found


def column(gather_output=False):
    return parallel.ColumnParallelDense(HIDDEN, gather_output=gather_output)


def row():
    return parallel.RowParallelDense(OUTPUTS, input_is_parallel=True)


class Own(keras.layers.Layer):
    """A layer whose treatment of a shard is not known."""

    def call(self, x):
        return keras.ops.softmax(x)


L = keras.layers
FULL = "takes a full tensor, and each rank has a shard .*ColumnParallelDense"
# What follows the inputs, the loss and metrics, and what the error says.
MISPLACED = {
    "normalization": (lambda x: row()(L.LayerNormalization()(column()(x))), FULL),
    "dropout": (lambda x: row()(L.Dropout(0.5)(L.ReLU()(column()(x)))), FULL),
    "softmax": (lambda x: row()(L.Activation("softmax")(column()(x))), FULL),
    "an operation": (lambda x: row()(keras.ops.softmax(column()(x))), FULL),
    "after an operation": (lambda x: L.Dense(1)(keras.ops.gelu(column()(x))), FULL),
    "nested": (
        lambda x: L.Dense(1)(keras.Sequential([keras.Input((INPUTS,)), column()])(x)),
        FULL,
    ),
    "wrapped": (
        lambda x: L.TimeDistributed(L.Dense(1))(column()(L.RepeatVector(2)(x))),
        FULL,
    ),
    "a second column": (lambda x: row()(column()(column()(x))), FULL),
    "a full input": (
        lambda x: row()(L.ReLU()(column(gather_output=True)(x))),
        "RowParallelDense .* takes this rank's shard.*ColumnParallelDense",
    ),
    "a shard and a full tensor": (
        lambda x: row()(column()(x) * L.Dense(1, "sigmoid")(x)),
        "Multiply .* combines this rank's shard .*mappings.copy",
    ),
    "an input": (
        lambda x: row()(x),
        "RowParallelDense .* takes this rank's shard .*InputLayer",
    ),
    "scores of a shard": (
        lambda x: parallel.ParallelDropout(0.5)(column()(x)),
        "model returns this rank's shard.*Received: 'mse'",
    ),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_a_shard_taken_for_the_full_tensor_is_an_error(meshes, name):
    make, message = MISPLACED[name]
    inputs = keras.Input((INPUTS,))
    with meshes[-1]:
        model = keras.Model(inputs, make(inputs))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), mesh=meshes[-1])
    model.compile(optimizer, metrics=["mse"])
    x = np.zeros((BATCH, INPUTS), "float32")
    with pytest.raises(ValueError, match=message):
        model.fit(x, x, verbose=0)


def test_elementwise_operations_and_own_layers_take_shards(meshes):
    inputs = keras.Input((INPUTS,))
    with meshes[-1]:
        x = L.GlobalMaxPooling1D()(L.RepeatVector(2)(column()(inputs)))
        x = parallel.ParallelDropout(0.1)(keras.ops.gelu(x) * L.ReLU()(x) + 1.0)
        x = keras.activations.relu(keras.ops.where(x > 0, x, 0.1 * x))
        inner = keras.Sequential([keras.Input(x.shape[1:]), L.ReLU(), row()])
        model = keras.Model(inputs, inner(x) + row()(Own()(x)))
    assert model.predict(np.zeros((2, INPUTS)), verbose=0).shape == (2, OUTPUTS)
