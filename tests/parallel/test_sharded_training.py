"""`training.fit` with tables that are sharded over ranks."""

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
IDS = np.arange(48).reshape(-1, 1) % 13
Y = np.random.RandomState(0).normal(size=(48, 1)).astype("float32")


@pytest.fixture(scope="module")
def mesh():
    mesh = parallel.Mesh(model=2)
    yield mesh
    mesh.remove()


def train_with_tables(mesh, table, *, seed=2, directory=None, callbacks=()):
    """One window of accumulated gradients, of which each checkpoint is in the middle.

    Args:
        mesh: of two ranks that are one replica, or None for two replicas.
        table: the class of the embeddings.
        seed: of initial values; by default not that of the first run.
        directory: of checkpoints.
        callbacks: of Keras.
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

    return training.fit(
        network,
        (IDS, Y),
        global_batch_size=GLOBAL_BATCH_SIZE,
        max_steps=STEPS,
        validation=(IDS[:24], Y[:24]),
        every_epochs=0,
        steps_per_execution=1,
        callbacks=[*callbacks, hvd.callbacks.ConsistencyCheckCallback(5)],
        model_dir=directory,
        save_every_steps=1,
        seed=1,
        mesh=mesh,
        world=WORLD,
        observers=(),
    )


@pytest.mark.long
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
