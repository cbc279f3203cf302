"""`training.predict` on all ranks writes the bytes that one process writes."""

import errno
import os
import pathlib
import tempfile

import keras
import numpy as np
import oracle
import pytest

import hvdtrain.keras as hvd
from hvdtrain import parallel, training
from hvdtrain.data import Source
from hvdtrain.job import JobError, World

RANK, SIZE = hvd.rank(), hvd.size()
WORLD = World(rank=RANK, size=SIZE)
# Neither divisible by the batch nor by the parts nor by the ranks.
SAMPLES = 53
X = np.random.RandomState(0).normal(size=(SAMPLES, 4)).astype("float32")
OPTIONS = {"local_batch_size": 4, "samples_per_part": 8}


@pytest.fixture
def directory():
    """One that rank 0 made; the others have its name only."""
    with tempfile.TemporaryDirectory() as own:
        yield pathlib.Path(hvd.broadcast_object(own, name="directory"))
        hvd.allreduce(0, name="leave_directory")


def make_model():
    keras.utils.set_random_seed(7)
    x = keras.Input((4,))
    hidden = keras.layers.Dense(8, "tanh")(x)
    outputs = {
        "score": keras.layers.Dense(1)(hidden),
        "classes": [
            keras.layers.Dense(3, "softmax")(hidden),
            keras.layers.Reshape((2, 4))(hidden),
        ],
    }
    return keras.Model(x, outputs)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


class Failing(Source):
    """Has ten times the samples, and fails at one of them."""

    def __init__(self, at=None, on_rank=None):
        self.at = at if on_rank in (None, RANK) else None
        self.read_numbers = []

    def __len__(self):
        return 10 * SAMPLES

    def read(self, indices):
        self.read_numbers += indices.tolist()
        if self.at in indices:
            raise RuntimeError("no such sample")
        return np.stack([X[number % SAMPLES] for number in indices])


@pytest.mark.ranks
@pytest.mark.parametrize("suffix", ["parquet", "npy", "tfrecord"])
def test_ranks_write_the_bytes_of_one_process(directory, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    model = make_model()
    result = training.predict(
        model, X, out=f"{directory}/all/scores-*.{suffix}", world=WORLD, **OPTIONS
    )
    assert result.samples == SAMPLES
    assert result.paths[6] == f"{directory}/all/scores-00006-of-00007.{suffix}"
    if RANK == 0:
        out = directory / f"one/scores-*.{suffix}"
        training.predict(model, X, out=out, world=World(), **OPTIONS)
        one = contents(directory / "one")
        assert len(one) == 8
        assert contents(directory / "all") == one


@pytest.mark.ranks
def test_arrays_are_those_of_keras():
    model = make_model()
    found = training.predict(model, (X, X[:, 0]), world=WORLD, **OPTIONS)
    expected = model.predict(X, verbose=0)
    assert found.keys() == expected.keys()
    for one, other in zip(
        keras.tree.flatten(found), keras.tree.flatten(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)
    one = oracle.on_one_process(
        lambda: training.predict(model, X, world=World(), **OPTIONS)
    )
    oracle.assert_bitwise_equal_over_ranks(keras.tree.flatten(found))
    np.testing.assert_array_equal(found["score"], one["score"])


def test_a_job_that_failed_predicts_what_is_missing(directory):
    model, out, parts = make_model(), f"{directory}/scores-*.npy", 67
    # In the last part of rank 0.
    failing = Failing((parts - 1) // SIZE * SIZE * 8, on_rank=0)
    with pytest.raises(JobError, match="no such sample"):
        training.predict(model, failing, out=out, world=WORLD, **OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in directory.glob("*.npy")}
    assert 0 < len(before) < parts
    assert not list(directory.glob(".partial*"))
    source = Failing()
    result = training.predict(model, source, out=out, world=WORLD, **OPTIONS)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    found = np.concatenate([np.load(path) for path in result.paths])
    expected = training.predict(model, Failing(), world=WORLD, **OPTIONS)
    np.testing.assert_array_equal(found["score"], expected["score"])
    # Of parts that were kept, only one sample is read again, to compare the sources.
    read = hvd.allgather_object({*source.read_numbers}, name="read")
    kept = [int(path.name[7:12]) for path in before]
    for part in {*kept} - {0}:
        again = {*range(8 * part, 8 * part + 8)} & set().union(*read)
        assert again <= {10 * SAMPLES // 2}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weights", "Received weights=.* on rank 0 and weights=.* on rank 1"),
        ("source", "other samples than on rank 0"),
        ("out", "Received out=.*0.npy on rank 0 and out=.*1.npy on rank 1"),
    ],
)
def test_ranks_that_differ_are_refused(directory, what, message):
    model, x, out = make_model(), X, f"{directory}/scores-*.npy"
    if what == "weights" and RANK == 1:
        model.weights[0].assign(model.weights[0] + 1)
    if what == "source":
        x = X + RANK
    if what == "out":
        out = f"{directory}/scores-*-{RANK}.npy"
    with pytest.raises(JobError, match=message):
        training.predict(model, x, out=out, world=WORLD, **OPTIONS)


def test_a_directory_of_each_rank_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=r"_scores\.json .*which all ranks share"):
        training.predict(make_model(), X, out="scores-*.npy", world=WORLD, **OPTIONS)


def test_sharded_tables(directory):
    """Ranks with fewer parts call the model as often as the others."""
    ids = np.arange(SAMPLES) * 7 % 19
    table = np.random.RandomState(1).normal(size=(19, 3)).astype("float32")

    def build(layer):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((), dtype="int64"), layer])
        model.add(keras.layers.Dense(2))
        return model

    fully_sharded = build(keras.layers.Embedding(19, 3, weights=[table]))
    parallel.fully_shard(fully_sharded, min_size=4)
    sharded = build(parallel.ShardedEmbedding(19, 3, weights=table))
    out = f"{directory}/scores-*.npy"
    training.predict(sharded, ids, out=out, world=WORLD, **OPTIONS)
    found = np.concatenate([np.load(p) for p in sorted(directory.glob("*.npy"))])
    replicated = build(keras.layers.Embedding(19, 3, weights=[table]))
    expected = training.predict(replicated, ids, world=WORLD, **OPTIONS)
    np.testing.assert_array_equal(found, expected)
    gathered = training.predict(fully_sharded, ids, world=WORLD, **OPTIONS)
    np.testing.assert_allclose(gathered, expected, atol=1e-6)


def test_ranks_of_a_replica_predict_together(directory):
    with parallel.Mesh(model=SIZE) as mesh:
        keras.utils.set_random_seed(7)
        layers = [keras.layers.Dense(8, "tanh"), parallel.ColumnParallelDense(6)]
        sharded = keras.Sequential([keras.Input((4,)), *layers])
    keras.utils.set_random_seed(7)
    dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh")])
    dense.add(keras.layers.Dense(6))
    with pytest.raises(JobError, match="sharded model without its mesh"):
        training.predict(sharded, X, world=WORLD, **OPTIONS)
    out = f"{directory}/scores-*.npy"
    training.predict(sharded, X, out=out, mesh=mesh, world=WORLD, **OPTIONS)
    found = np.concatenate([np.load(p) for p in sorted(directory.glob("*.npy"))])
    np.testing.assert_allclose(found, dense.predict(X, verbose=0), atol=1e-6)
    # Nothing differs: no part is predicted again.
    again = training.predict(sharded, X, out=out, mesh=mesh, world=WORLD, **OPTIONS)
    assert again.samples == SAMPLES
    mesh.remove()


@pytest.mark.long
def test_stages_of_a_pipeline_predict_together():
    def make_full():
        keras.utils.set_random_seed(7)
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3, name="last")]
        return keras.Sequential([keras.Input((4,)), *layers])

    with parallel.Mesh(pipeline=2) as mesh:
        model = parallel.PipelineModel(make_full, stages=["last"])
    found = training.predict(model, X, mesh=mesh, world=WORLD, **OPTIONS)
    np.testing.assert_allclose(found, make_full().predict(X, verbose=0), atol=1e-6)
    mesh.remove()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_file_that_cannot_be_written_is_an_error_of_all(
    directory, monkeypatch, is_sharded
):
    def save(path, values):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if RANK == 0:
        monkeypatch.setattr(np, "save", save)
    with parallel.Mesh(model=SIZE) as mesh:
        dense = parallel.ColumnParallelDense if is_sharded else keras.layers.Dense
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input((4,)), dense(6)])
    out = f"{directory}/scores-*.npy"
    message = r"^rank 0 on .*: Cannot use scores-\d+-of-00007\.npy in .*: No space left"
    with pytest.raises(JobError, match=message):
        training.predict(
            model, X, out=out, mesh=mesh if is_sharded else None, world=WORLD, **OPTIONS
        )
    mesh.remove()
