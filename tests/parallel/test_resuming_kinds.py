"""`training.fit` of each kind of parallelism: killed, continued, finished, moved.

A job on several ranks is compared bit for bit with the uninterrupted one. A job that
moves to one process and back is compared with one process, which here is each rank by
itself: all of them read all samples, and their averages change nothing.
"""

import functools
import itertools
import json
import pathlib
import shutil

import keras
import meshes
import numpy as np
import oracle
import pytest
import safetensors.numpy

import hvdtrain.keras as hvd
from hvdtrain import parallel, training
from hvdtrain.checkpoint.snapshot import capture
from hvdtrain.job import World
from hvdtrain.parallel.mesh import Axes
from hvdtrain.sharding import full_values

RANK, SIZE = hvd.rank(), hvd.size()
WORLD, ALONE = World(rank=RANK, size=SIZE), World()
# Checkpoints are in the middle of an epoch of three steps, and of a window of three.
STEPS, GLOBAL_BATCH_SIZE, SAMPLES = 8, 8, 24
rng = np.random.default_rng(0)
X = rng.integers(0, 23, (SAMPLES, 5)).astype("int32")
Y = rng.integers(0, 3, SAMPLES)

KINDS = ["replicated", "state", "full", "tables", "model", "pipeline"]
OPTIMIZERS = {
    # Three kinds of slots: averages, two for each weight, and one more.
    "averages": lambda: keras.optimizers.Adam(
        0.02, epsilon=1e-2, amsgrad=True, use_ema=True, ema_momentum=0.5
    ),
    "slots": lambda: keras.optimizers.RMSprop(
        0.01, epsilon=1e-2, momentum=0.9, centered=True
    ),
    "accumulators": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=3
    ),
}
SAMPLE = [("pipeline", "averages"), ("model", "accumulators"), ("full", "accumulators")]
# Each optimizer once.
IN_CI = [("tables", "averages"), ("state", "slots"), ("pipeline", "accumulators")]
# Four ranks are two replicas of a model on two.
ON_FOUR_RANKS = ("model", "slots")


def cases(sample):
    """Return all kinds with all optimizers, with the marks of those not in `sample`."""
    # A job that continues on other ranks was killed before.
    in_ci = [ON_FOUR_RANKS] if sample else IN_CI
    for pair in itertools.product(KINDS, OPTIMIZERS):
        mark = pytest.mark.long if pair in in_ci else pytest.mark.release
        marks = [] if pair in sample else [mark]
        if sample and pair == ON_FOUR_RANKS:
            marks.append(pytest.mark.four_ranks)
        yield pytest.param(*pair, marks=marks)


@pytest.fixture(scope="module")
def meshes_by_kind():
    found = {kind: parallel.Mesh(**{kind: 2}) for kind in ("model", "pipeline")}
    yield found
    for mesh in found.values():
        mesh.remove()


def make_network(kind, mesh, rate, is_alone):
    layers = keras.layers
    column, row = layers.Dense, layers.Dense
    if kind == "model" and mesh:
        column = functools.partial(parallel.ColumnParallelDense, mesh=mesh)
        row = functools.partial(parallel.RowParallelDense, mesh=mesh)
    ids = keras.Input((5,), dtype="int32")
    table = meshes.Summing(23, 4)
    if kind == "tables":
        axes = Axes() if is_alone else None
        (rows,) = parallel.DistributedEmbedding([table], mesh=axes)([ids])
    else:
        rows = table(ids)
    x = layers.Dense(6, "gelu", trainable=False)(layers.Flatten()(rows))
    x = layers.Dropout(rate)(layers.Dense(8, "relu")(x))
    return keras.Model(ids, row(3)(column(7, "tanh")(x)))


def make_model(kind, optimizer, mesh, rate, is_alone):
    network = make_network(kind, mesh, rate, is_alone)
    options = {"mesh": mesh}
    if kind == "pipeline" and mesh:
        network = parallel.PipelineModel(network, microbatches=2, mesh=mesh)
    elif kind == "full" and not is_alone:
        parallel.fully_shard(network, min_size=16)
    elif kind == "state" and not is_alone:
        options = {"shard_state": True}
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[optimizer](), **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=True)
    return network


def train(
    kind,
    optimizer,
    mesh=None,
    *,
    rate=0.0,
    directory=None,
    save_steps=4,
    is_killed=False,
    world=WORLD,
):
    """Train; a job that is killed has one checkpoint more than before."""
    callbacks = [oracle.killed_after(save_steps)] if is_killed else []
    return training.fit(
        lambda: make_model(kind, optimizer, mesh, rate, world is ALONE),
        (X, Y),
        global_batch_size=GLOBAL_BATCH_SIZE,
        max_steps=STEPS,
        validation=(X[:8], Y[:8]),
        every_epochs=0,
        callbacks=[*callbacks, hvd.callbacks.ConsistencyCheckCallback(5)],
        steps_per_execution=1,
        model_dir=directory,
        save_every_steps=save_steps,
        seed=1,
        mesh=mesh,
        world=world,
        observers=(),
    )


def kill(*arguments, **options):
    """Train for two steps more."""
    with pytest.raises(oracle.KilledError):
        train(*arguments, **options, save_steps=2, is_killed=True)
    # The writer of rank 0 has ended.
    hvd.allreduce(0, name="killed")


def copy(directory, name):
    """Return a copy that this rank alone uses."""
    return shutil.copytree(directory, f"{directory}-{name}-{RANK}")


def full_state(model, world):
    """Full values on rank 0, by name: weights, optimizer state, and state of ranks."""
    captured = capture(model, world, everywhere=False)
    arrays = captured.arrays if captured else {}
    left_out = "metrics", "random"
    return {k: v for k, v in sorted(arrays.items()) if not k.startswith(left_out)}


def shared(arrays):
    """The weights and optimizer state, which are the same on any number of ranks."""
    return [value for name, value in arrays.items() if name.startswith("shared/")]


def stored(directory):
    """Read the newest checkpoint as docs/checkpoints.md does."""
    newest = max(pathlib.Path(directory, "checkpoints").glob("step-*.json"))
    file = newest.with_name(json.loads(newest.read_text())["arrays"])
    return shared(dict(sorted(safetensors.numpy.load_file(file).items())))


@functools.cache
def train_alone(kind, optimizer):
    return train(kind, optimizer, world=ALONE)


def assert_same_job(result, expected):
    models = result.model, expected.model
    found, wanted = ([*m.weights, *m.optimizer.variables] for m in models)
    for variable, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy(), other.path)
    arrays, wanted = (full_state(each, WORLD) for each in models)
    np.testing.assert_equal([*arrays.values()], [*wanted.values()])
    assert result.history == expected.history
    assert result.test_metrics == expected.test_metrics


@pytest.mark.parametrize(("kind", "optimizer"), [*cases(SAMPLE)])
def test_a_killed_and_a_finished_job_are_the_uninterrupted_one(
    kind, optimizer, directory, meshes_by_kind, monkeypatch
):
    # The chief keeps full values in files.
    monkeypatch.setattr(full_values, "_LEAST_FILE_BYTES", 64)
    mesh = meshes_by_kind.get(kind)
    job = functools.partial(train, kind, optimizer, mesh, rate=0.3)
    expected = job()
    with pytest.raises(oracle.KilledError):
        job(directory=directory, is_killed=True)
    result = job(directory=directory)
    assert result.start_step == 4
    assert_same_job(result, expected)
    again = job(directory=directory)
    assert again.start_step == again.step == STEPS
    assert_same_job(again, expected)
    alone = train(
        kind, optimizer, rate=0.3, directory=copy(directory, "alone"), world=ALONE
    )
    assert alone.start_step == STEPS
    wanted = shared(full_state(expected.model, WORLD))
    found = shared(full_state(alone.model, ALONE))
    if RANK == 0:
        np.testing.assert_equal(found, wanted)
        # The averages are assigned to the weights after the last checkpoint.
        if optimizer != "averages":
            np.testing.assert_equal(stored(directory), wanted)


@pytest.mark.parametrize(("kind", "optimizer"), [*cases(sample=[])])
def test_a_job_continues_on_one_rank_and_on_all(
    kind, optimizer, directory, meshes_by_kind
):
    mesh, expected = meshes_by_kind.get(kind), train_alone(kind, optimizer)
    own = f"{directory}-{RANK}"
    kill(kind, optimizer, directory=own, world=ALONE)
    kill(kind, optimizer, mesh, directory=f"{directory}-0")
    own = copy(f"{directory}-0", "killed")
    result = train(kind, optimizer, directory=own, world=ALONE)
    assert result.start_step == 4
    pairs = zip(result.model.weights, expected.model.weights, strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=wanted.path)
    for name, value in expected.test_metrics.items():
        assert result.test_metrics[name] == pytest.approx(value, rel=1e-4)
    # What one rank has finished is read by all.
    hvd.allreduce(0, name="finished")
    again = train(kind, optimizer, mesh, directory=f"{directory}-0-killed-0")
    assert again.start_step == STEPS
    assert again.test_metrics == result.test_metrics
    found = shared(full_state(again.model, WORLD))
    if RANK == 0:
        np.testing.assert_equal(found, shared(full_state(result.model, ALONE)))
