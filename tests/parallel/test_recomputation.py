"""Layers that are recomputed in the backward pass, on several ranks."""

import keras
import numpy as np
import oracle
import pytest

import hvdtrain.keras as hvd
from hvdtrain import parallel
from hvdtrain.collectives import graph
from hvdtrain.parallel.recomputation import is_remat

WIDTH, SIZE = oracle.FEATURES, hvd.size()


def same(layer):
    return layer


def network(wrap, make_block, blocks=2):
    keras.utils.set_random_seed(7)
    layers = [
        wrap(keras.Sequential(make_block(), name=f"block_{i}")) for i in range(blocks)
    ]
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            *layers,
            keras.layers.Dense(oracle.CLASSES, activation="softmax"),
        ]
    )


def train(model, *, mesh=None):
    """Return the variables and the history after some steps, and the collectives."""
    inputs, labels = oracle.samples(steps=4)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), mesh=mesh)
    model.compile(optimizer, oracle.LOSS)
    if mesh is None:
        inputs, labels = oracle.shard(inputs), oracle.shard(labels)
    before = graph.number_of_collectives()
    history = oracle.fit(
        *(model, inputs, labels),
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    ).history
    count = graph.number_of_collectives() - before
    variables = [*model.variables, *model.optimizer.variables]
    return [v.numpy() for v in variables], history, count


def assert_equal(results, expected):
    variables, *others = results
    expected_variables, *expected_others = expected
    assert others == expected_others
    for variable, wanted in zip(variables, expected_variables, strict=True):
        np.testing.assert_array_equal(variable, wanted)


def masked():
    return [
        keras.layers.Dense(WIDTH, "relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(WIDTH, "tanh"),
    ]


def normalized():
    return [*masked(), keras.layers.BatchNormalization()]


def sharded():
    """Layers that reduce, gather and draw masks over a model group."""
    return [
        parallel.ColumnParallelDense(17, "tanh", gather_output=False),
        parallel.ParallelDropout(0.3),
        parallel.RowParallelDense(WIDTH, input_is_parallel=True),
        keras.layers.LayerNormalization(),
        parallel.ColumnParallelDense(WIDTH, "tanh"),
    ]


@pytest.mark.ranks
def test_data_parallel_training_is_equal_bit_for_bit():
    results, expected = (
        train(network(wrap, normalized)) for wrap in (parallel.remat, same)
    )
    assert_equal(results, expected)


@pytest.mark.ranks
@pytest.mark.long
def test_sharded_layers_are_equal_and_communicate_once():
    mesh = parallel.Mesh(model=SIZE)
    with mesh:
        models = [network(wrap, sharded) for wrap in (parallel.remat, same)]
    assert_equal(*(train(model, mesh=mesh) for model in models))
    mesh.remove()


@pytest.mark.long
@pytest.mark.ranks
def test_the_stages_of_a_pipeline_are_recomputed():
    mesh = parallel.Mesh(pipeline=SIZE)
    models = [
        parallel.PipelineModel(network(wrap, masked, SIZE), microbatches=2, mesh=mesh)
        for wrap in (parallel.remat, same)
    ]
    for model, is_wrapped in zip(models, (True, False), strict=True):
        assert any(map(is_remat, model.network.layers)) == is_wrapped
    assert_equal(*(train(model, mesh=mesh) for model in models))
    mesh.remove()


@pytest.mark.ranks
def test_statistics_over_all_ranks_are_refused():
    model = network(
        parallel.remat, lambda: [hvd.SyncBatchNormalization(), keras.layers.Dense(3)]
    )
    with pytest.raises(ValueError, match=r"cannot repeat the call.*a collective"):
        train(model)
