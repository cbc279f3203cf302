"""`train_and_evaluate` of a model that is sharded over ranks: checkpoints and files."""

import pathlib
import tempfile

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import parallel, training
from hvdtrain.job import JobError, World
from hvdtrain.training import EvalSpec, TrainSpec

RANK, SIZE = hvd.rank(), hvd.size()
WORLD = World(rank=RANK, size=SIZE)
STEPS, GLOBAL_BATCH_SIZE = 12, 8
X = np.random.RandomState(0).normal(size=(48, 5)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture(
    scope="module", params=["model", pytest.param("pipeline", marks=pytest.mark.long)]
)
def mesh(request):
    mesh = parallel.Mesh(**{request.param: 2})
    yield mesh
    mesh.remove()


@pytest.fixture
def directory():
    """One that rank 0 made; the others have its name only."""
    with tempfile.TemporaryDirectory() as own:
        yield hvd.broadcast_object(str(pathlib.Path(own) / "run"), name="directory")
        hvd.allreduce(0, name="leave_directory")


def model(mesh, rate):
    column, row, options = keras.layers.Dense, keras.layers.Dense, {}
    if mesh and mesh.model.size > 1:
        column, row = parallel.ColumnParallelDense, parallel.RowParallelDense
        options = {"mesh": mesh}
    network = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(6, "relu"),
            keras.layers.Dropout(rate),
            column(7, "tanh", **options),
            row(1, **options),
        ]
    )
    if mesh and mesh.pipeline.size > 1:
        network = parallel.PipelineModel(network, microbatches=2, mesh=mesh)
    optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=3)
    optimizer = hvd.DistributedOptimizer(optimizer, mesh=mesh)
    network.compile(optimizer, "mse", metrics=["mae"])
    return network


def train(mesh, *, rate=0.0, directory=None, callbacks=(), network=None, inputs=X):
    return training.fit(
        network or (lambda: model(mesh, rate)),
        (inputs, Y),
        global_batch_size=GLOBAL_BATCH_SIZE,
        max_steps=STEPS,
        validation=(inputs[:24], Y[:24]),
        every_epochs=0,
        steps_per_execution=1,
        callbacks=lambda plan: [
            *callbacks,
            hvd.callbacks.ConsistencyCheckCallback(5),
        ],
        model_dir=directory,
        save_every_steps=1,
        seed=1,
        mesh=mesh,
        world=WORLD,
        observers=(),
    )


@pytest.mark.four_ranks
@pytest.mark.long
def test_a_killed_job_computes_what_the_uninterrupted_one_computes(mesh, directory):
    if SIZE == 4 and mesh.pipeline.size > 1:
        pytest.skip("replicas of a sharded model are on the axis model here")
    expected = train(mesh, rate=0.3)
    with pytest.raises(oracle.KilledError):
        train(mesh, rate=0.3, directory=directory, callbacks=[oracle.killed_after(8)])
    result = train(mesh, rate=0.3, directory=directory)
    assert 0 < result.start_step < STEPS
    pairs = zip(
        [*result.model.variables, *result.model.optimizer.variables],
        [*expected.model.variables, *expected.model.optimizer.variables],
        strict=True,
    )
    for found, wanted in pairs:
        np.testing.assert_array_equal(found.numpy(), wanted.numpy(), wanted.path)
    assert result.history == expected.history
    assert result.test_metrics == expected.test_metrics
    training.run_directory.write(WORLD, directory, model=result.model, summary={})
    outputs = result.model.predict(X, verbose=0)
    full = keras.models.load_model(f"{directory}/model.keras")
    np.testing.assert_allclose(full.predict(X, verbose=0), outputs, atol=1e-6)


@pytest.mark.long
def test_a_job_continues_on_another_mesh(mesh, directory):
    expected = train(None)
    # Checkpoints of the full model, then of the sharded one.
    for kind in (None, mesh):
        with pytest.raises(oracle.KilledError):
            train(kind, directory=directory, callbacks=[oracle.killed_after(4)])
    result = train(None, directory=directory)
    assert 4 < result.start_step < STEPS
    pairs = zip(result.model.weights, expected.model.weights, strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=wanted.path)
    for name, value in expected.test_metrics.items():
        assert result.test_metrics[name] == pytest.approx(value, rel=1e-4)


def train_with_tables(mesh, table, *, seed=2, **options):
    """One window of accumulated gradients, of which each checkpoint is in the middle.

    Args:
        mesh: of two ranks that are one replica, or None for two replicas.
        table: the class of the embeddings.
        seed: of initial values; by default not that of the first run.
        **options: of `train`.
    """

    def network():
        keras.utils.set_random_seed(seed)
        of_mesh = {} if table is keras.layers.Embedding else {"mesh": mesh}
        ids = keras.Input((1,), dtype="int32")
        frozen = table(13, 2, trainable=False, **of_mesh)(ids)
        rows = keras.layers.Concatenate()([frozen, table(13, 3, **of_mesh)(ids)])
        rows = keras.layers.Flatten()(rows)
        network = keras.Model(ids, keras.layers.Dense(1)(rows))
        optimizer = keras.optimizers.SGD(5.0, gradient_accumulation_steps=STEPS)
        network.compile(hvd.DistributedOptimizer(optimizer, mesh=mesh), "mse")
        return network

    ids = np.arange(len(X)).reshape(-1, 1) % 13
    return train(mesh, network=network, inputs=ids, **options)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["model"], indirect=True)
def test_tables_continue_on_other_numbers_of_replicas(mesh, directory):
    replicated, sharded = keras.layers.Embedding, parallel.ShardedEmbedding
    expected = train_with_tables(None, replicated, seed=1)
    runs = [(None, replicated), (None, sharded), (mesh, sharded), (None, sharded)]
    for number, run in enumerate(runs):
        options = {"directory": directory, "callbacks": [oracle.killed_after(1)]}
        with pytest.raises(oracle.KilledError):
            train_with_tables(*run, seed=2 if number else 1, **options)
    result = train_with_tables(mesh, replicated, directory=directory)
    assert len(runs) <= result.start_step < STEPS
    for found, wanted in zip(result.model.weights, expected.model.weights, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=wanted.path)


def test_tables_that_are_sharded_over_data_need_equal_batches():
    def model():
        table = parallel.ShardedEmbedding(5, 2)
        network = keras.Sequential([keras.Input((1,), dtype="int32"), table])
        network.compile(keras.optimizers.SGD(0.1), "mse")
        return network

    size = 4 + RANK
    batch = np.zeros((size, 1)), np.zeros((size, 1, 2))
    batches = tf.data.Dataset.from_tensors(batch)
    with pytest.raises(JobError, match="Expected: equal local batch sizes"):
        training.train_and_evaluate(
            model,
            TrainSpec(
                input_fn=lambda *_: batches,
                max_steps=1,
                pass_steps=1,
                local_batch_size=size,
            ),
            EvalSpec(input_fn=lambda: batches),
            world=WORLD,
        )
