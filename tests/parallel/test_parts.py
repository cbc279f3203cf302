"""Parts of tensors between divided layers: what takes them, and what is refused."""

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
    """What it makes of a part is not known."""

    def call(self, x):
        return keras.ops.softmax(x)


L = keras.layers
WHOLE = "takes a whole tensor, and each rank has a part .*ColumnParallelDense"
# What follows the inputs, the loss and metrics, and what the error says.
MISPLACED = {
    "normalization": (lambda x: row()(L.LayerNormalization()(column()(x))), WHOLE),
    "dropout": (lambda x: row()(L.Dropout(0.5)(L.ReLU()(column()(x)))), WHOLE),
    "softmax": (lambda x: row()(L.Activation("softmax")(column()(x))), WHOLE),
    "an operation": (lambda x: row()(keras.ops.softmax(column()(x))), WHOLE),
    "after an operation": (lambda x: L.Dense(1)(keras.ops.gelu(column()(x))), WHOLE),
    "nested": (
        lambda x: L.Dense(1)(keras.Sequential([keras.Input((INPUTS,)), column()])(x)),
        WHOLE,
    ),
    "wrapped": (
        lambda x: L.TimeDistributed(L.Dense(1))(column()(L.RepeatVector(2)(x))),
        WHOLE,
    ),
    "a second column": (lambda x: row()(column()(column()(x))), WHOLE),
    "a whole input": (
        lambda x: row()(L.ReLU()(column(gather_output=True)(x))),
        "RowParallelDense .* takes this rank's part.*ColumnParallelDense",
    ),
    "a part and a whole": (
        lambda x: row()(column()(x) * L.Dense(1, "sigmoid")(x)),
        "Multiply .* combines this rank's part .*mappings.copy",
    ),
    "an input": (
        lambda x: row()(x),
        "RowParallelDense .* takes this rank's part .*InputLayer",
    ),
    "scores of a part": (
        lambda x: parallel.ParallelDropout(0.5)(column()(x)),
        "model returns this rank's part.*Received: 'mse'",
    ),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_a_part_taken_for_the_whole_is_an_error(meshes, name):
    make, message = MISPLACED[name]
    inputs = keras.Input((INPUTS,))
    with meshes[-1]:
        model = keras.Model(inputs, make(inputs))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), mesh=meshes[-1])
    model.compile(optimizer, metrics=["mse"])
    x = np.zeros((BATCH, INPUTS), "float32")
    with pytest.raises(ValueError, match=message):
        model.fit(x, x, verbose=0)


def test_elementwise_operations_and_own_layers_take_parts(meshes):
    inputs = keras.Input((INPUTS,))
    with meshes[-1]:
        x = L.GlobalMaxPooling1D()(L.RepeatVector(2)(column()(inputs)))
        x = parallel.ParallelDropout(0.1)(keras.ops.gelu(x) * L.ReLU()(x) + 1.0)
        x = keras.activations.relu(keras.ops.where(x > 0, x, 0.1 * x))
        inner = keras.Sequential([keras.Input(x.shape[1:]), L.ReLU(), row()])
        model = keras.Model(inputs, inner(x) + row()(Own()(x)))
    assert model.predict(np.zeros((2, INPUTS)), verbose=0).shape == (2, OUTPUTS)
