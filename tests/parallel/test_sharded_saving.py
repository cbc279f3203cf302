"""Models that are divided, saved: the file is that of the dense model."""

import os
import threading
import warnings

import keras
import numpy as np
import oracle
import pytest

import hvdtrain.keras as hvd
from hvdtrain import parallel

RANK, SIZE = hvd.rank(), hvd.size()
INPUTS, HIDDEN, OUTPUTS = 5, 7, 3
X = np.random.default_rng(0).normal(size=(8, INPUTS)).astype("float32")
Y = np.arange(8) % OUTPUTS


@pytest.fixture(scope="module")
def mesh():
    mesh = parallel.Mesh(model=2)
    yield mesh
    mesh.remove()


@pytest.fixture(scope="module")
def stages():
    """A mesh with a pipeline of two ranks."""
    mesh = parallel.Mesh(pipeline=2)
    yield mesh
    mesh.remove()


@pytest.fixture
def directory(tmp_path):
    """One directory for all ranks."""
    return hvd.broadcast_object(str(tmp_path), name="directory")


def model(column, row, optimizer):
    network = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            column(HIDDEN, "tanh", activity_regularizer=keras.regularizers.L2(0.1)),
            row(OUTPUTS, "softmax"),
        ]
    )
    network.compile(optimizer, oracle.LOSS)
    return network


def divided(mesh, optimizer):
    column = {"gather_output": False}
    row = {"input_is_parallel": True}
    with mesh:
        return model(
            lambda *a, **k: parallel.ColumnParallelDense(*a, **k, **column),
            lambda *a: parallel.RowParallelDense(*a, **row),
            hvd.DistributedOptimizer(optimizer, mesh=mesh),
        )


def test_the_file_is_a_dense_model(mesh, directory):
    keras.utils.set_random_seed(1)
    trained = divided(mesh, keras.optimizers.Adam(0.1))
    history = trained.fit(X, Y, verbose=0).history
    path = os.path.join(directory, "model.keras")
    trained.save(path)
    # The oracle: the dense model, trained alike.
    keras.utils.set_random_seed(1)
    dense = model(keras.layers.Dense, keras.layers.Dense, keras.optimizers.Adam(0.1))
    expected = dense.fit(X, Y, verbose=0).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-6)
    loaded = keras.models.load_model(path)
    assert [type(each) for each in loaded.layers] == [keras.layers.Dense] * 2
    oracle.assert_same_state(loaded, dense, atol=1e-6)
    # On a mesh again, with the slots of the optimizer.
    again = divided(mesh, keras.optimizers.Adam(0.1))
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    oracle.assert_same_state(again, trained)


def squares(y_true, y_pred):
    """A loss of one's own, which Keras cannot find by its name."""
    return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


def staged(stages=None):
    """A model, as a pipeline on a mesh with stages."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(HIDDEN, "tanh"), keras.layers.Dense(OUTPUTS)]
    network = keras.Sequential([keras.Input((INPUTS,)), *layers])
    return parallel.PipelineModel(network, mesh=stages) if stages else network


@pytest.mark.long
def test_a_pipeline_saves_the_state_of_an_optimizer_that_a_step_has_built(
    stages, directory
):
    path = os.path.join(directory, "pipeline.keras")
    trained, dense = staged(stages), staged()
    for network in (trained, dense):
        # Of its variables, one is common to all stages and has a number as its name.
        network.compile(keras.optimizers.Nadam(0.1), squares, metrics=[squares])
        network.fit(X, X[:, :OUTPUTS], verbose=0, shuffle=False)
    trained.save(path)
    loaded = keras.models.load_model(path, {"squares": squares})
    assert loaded.loss is squares
    oracle.assert_same_state(loaded, dense, atol=1e-6)


def test_weights_of_a_pipeline_without_an_optimizer(stages, directory):
    path = os.path.join(directory, "pipeline.weights.h5")
    expected, again = staged(stages), staged(stages)
    for weight in expected.weights:
        weight.assign(weight + 1)
    expected.save_weights(path)
    expected.save(path.replace("weights.h5", "keras"))
    again.load_weights(path)
    # An optimizer stays as it is where the file has none.
    trained = staged(stages)
    trained.compile("adam", "mse", run_eagerly=True)
    trained.train_on_batch(X, X[:, :OUTPUTS])
    state = [variable.numpy() for variable in trained.optimizer.variables]
    trained.load_weights(path)
    found = [*again.weights, *trained.weights, *trained.optimizer.variables]
    wanted = [*expected.weights, *expected.weights, *state]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_file_needs_no_other_package(mesh, directory):
    path = os.path.join(directory, "model.weights.h5")
    keras.utils.set_random_seed(1)
    divided(mesh, keras.optimizers.SGD()).save_weights(path)
    keras.utils.set_random_seed(2)
    dense = model(keras.layers.Dense, keras.layers.Dense, "sgd")
    dense.load_weights(path)
    keras.utils.set_random_seed(1)
    expected = model(keras.layers.Dense, keras.layers.Dense, "sgd")
    for a, b in zip(dense.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rank_0_writes_a_model_on_a_mesh_of_which_nothing_is_divided(mesh, directory):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), mesh=mesh)
    network = model(keras.layers.Dense, keras.layers.Dense, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network.save(os.path.join(directory, f"{RANK}.keras"))
    hvd.allgather_object(None, name="saved")
    assert os.listdir(directory) == ["0.keras"]
    texts = [str(each.message) for each in caught if "no file" in str(each.message)]
    assert len(texts) == (RANK > 0)


def test_each_rank_writes_its_file_on_a_mesh_of_replicas(directory):
    mesh = parallel.Mesh()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), mesh=mesh)
    network = model(keras.layers.Dense, keras.layers.Dense, optimizer)
    path = os.path.join(directory, f"{RANK}.keras")
    network.save(path)
    assert os.path.isfile(path)
    hvd.allgather_object(None, name="saved")
    mesh.remove()


def test_an_error_on_rank_0_is_one_of_all_ranks(mesh, directory):
    error = OSError if RANK == 0 else RuntimeError
    with pytest.raises(error, match="missing"):
        divided(mesh, keras.optimizers.SGD()).save(
            os.path.join(directory, "missing", "model.keras")
        )


def test_a_call_on_one_rank_is_an_error(mesh, directory, monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "1")
    network = divided(mesh, keras.optimizers.SGD())
    pipe = os.path.join(directory, "pipe")
    if RANK == 0:
        os.mkfifo(pipe)
    hvd.allgather_object(None, name="pipe")
    if RANK == 0:
        with pytest.raises(RuntimeError, match="not on all other ranks within 1 sec"):
            network.evaluate(X, Y, verbose=0)
        open(pipe, "w").close()
        for thread in threading.enumerate():
            if thread.name == "CollectiveCall":
                thread.join(60)
    else:
        open(pipe).close()
        # The call that rank 0 has left is in flight still.
        with pytest.raises(RuntimeError, match=r"model.evaluate on rank 0 and model"):
            network.predict(X, verbose=0)


def test_without_a_stall_check_a_call_has_no_limit(mesh, directory, monkeypatch):
    monkeypatch.setenv("HOROVOD_STALL_CHECK_DISABLE", "1")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.1")
    network = divided(mesh, keras.optimizers.SGD())
    pipe = os.path.join(directory, "pipe")
    if RANK == 0:
        os.mkfifo(pipe)
    hvd.allgather_object(None, name="pipe")
    if RANK == 0:
        # The other rank calls it when the limit, were there one, is over.
        late = threading.Timer(0.5, lambda: open(pipe, "w").close())
        late.start()
        found = network.predict(X, verbose=0)
        late.join(60)
    else:
        open(pipe).close()
        found = network.predict(X, verbose=0)
    np.testing.assert_array_equal(found, hvd.broadcast(found, 0))


def test_a_pipeline_is_loaded_on_all_ranks(stages):
    network = staged(stages)
    network.compile("sgd", "mse")
    call = network.load_weights if RANK == 0 else network.predict
    with pytest.raises(RuntimeError, match=r"load_weights on rank 0 and model."):
        call(X)


def test_calls_of_different_methods_are_an_error(mesh):
    network = divided(mesh, keras.optimizers.SGD())
    call = network.evaluate if RANK == 0 else network.predict
    with pytest.raises(RuntimeError, match=r"model.evaluate.* rank 0 and model.pred"):
        call(X, verbose=0)


def test_a_callback_that_saves_is_on_all_ranks(mesh, directory):
    network = divided(mesh, keras.optimizers.SGD())
    path = os.path.join(directory, "{epoch}.keras")
    saving = [
        keras.callbacks.ModelCheckpoint(path),
        hvd.callbacks.BestModelCheckpoint("loss", filepath=path.format(epoch="best")),
    ]
    with pytest.raises(
        RuntimeError, match=r"ModelCheckpoint .* rank 0 and model.fit on rank 1"
    ):
        network.fit(X, Y, verbose=0, callbacks=saving if RANK == 0 else [])
    with pytest.raises(ValueError, match="delete the others' directory"):
        network.fit(X, Y, callbacks=[keras.callbacks.BackupAndRestore(directory)])
    network.fit(X, Y, verbose=0, callbacks=saving)
    expected = network.predict(X, verbose=0)
    for epoch in (1, "best"):
        loaded = keras.models.load_model(path.format(epoch=epoch))
        np.testing.assert_allclose(loaded(X), expected, atol=1e-6)


def test_a_file_of_another_model_is_refused(mesh, directory):
    path = os.path.join(directory, "other.weights.h5")
    if RANK == 0:
        other = [keras.layers.Dense(HIDDEN + 2), keras.layers.Dense(OUTPUTS)]
        keras.Sequential([keras.Input((INPUTS,)), *other]).save_weights(path)
    hvd.allgather_object(None, name="written")
    with pytest.raises(ValueError, match=r"of the shape \(5, 7\). Received: .* \(5, 9"):
        divided(mesh, keras.optimizers.SGD()).load_weights(path)


def test_a_format_without_dense_weights_is_refused(mesh, directory):
    with pytest.raises(ValueError, match=r"saved as a .keras file"):
        divided(mesh, keras.optimizers.SGD()).save(os.path.join(directory, "m.h5"))


def test_a_rank_cannot_wait_for_the_others(mesh):
    network = divided(mesh, keras.optimizers.SGD())
    with pytest.raises(ValueError, match="JoinCallback cannot be used with a model"):
        network.fit(X, Y, verbose=0, callbacks=[hvd.callbacks.JoinCallback()])
