"""Each public class of Keras on several ranks, against one process: `matrix`.

Rows with inputs of one shape are branches of one model that is trained once. Each has
weights, an output and a loss of its own.
"""

import functools
import io
import pathlib
import warnings
from typing import Any, NamedTuple

import keras
import matrix
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.keras import loss_reductions
from hvdtrain.keras.callbacks.effects import EFFECTS
from hvdtrain.keras.metrics import reduce_metrics

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.skipif(hvd.size() == 1, reason="compares ranks with one process"),
]
TARGETS = np.random.default_rng(1).normal(size=(matrix.COUNT, 2))


class Trained(NamedTuple):
    """What a training leaves.

    Attributes:
        results: a tree for each branch: its weights, logs, and predictions.
        loss: the logged sum of all losses.
        warnings: the texts, of rank 0.
    """

    results: dict[str, Any]
    loss: list[float]
    warnings: set[str]


def train(make_branches, inputs, targets, options, *, is_distributed):
    """Train a model of the branches that a function makes, for two steps.

    Each rank has initial weights of its own, and takes those of rank 0.

    Args:
        targets: an array for all branches, or a dict of them.
        options: for `compile`.
    """
    keras.utils.clear_session(free_memory=False)
    loss_reductions._warn.cache_clear()
    keras.utils.set_random_seed(7 + hvd.rank() * is_distributed)
    branches = make_branches()
    tensors = keras.tree.map_structure(
        lambda tensor: keras.Input(tensor.shape[1:], dtype=tensor.dtype),
        next(iter(branches.values())).input,
    )
    model = keras.Model(tensors, {n: branch(tensors) for n, branch in branches.items()})
    if not isinstance(targets, dict):
        targets = dict.fromkeys(branches, targets)
    optimizer, callbacks, deal = keras.optimizers.SGD(0.1), [], lambda array: array
    batch_size = matrix.GLOBAL_BATCH_SIZE
    if is_distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
        deal, batch_size = oracle.shard, batch_size // hvd.size()
    model.compile(optimizer, run_eagerly=True, **options(branches))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = keras.tree.map_structure(deal, (inputs, targets))
        logs = oracle.fit(model, *own, batch_size, callbacks=callbacks).history
    predictions = model.predict_on_batch(inputs)
    results = {
        name: {
            "weights": branch.get_weights(),
            "logs": {k: logs[k] for k in logs if k.startswith(f"{name}_")},
            "predictions": predictions[name],
        }
        for name, branch in branches.items()
    }
    texts = {str(w.message) for w in caught if issubclass(w.category, UserWarning)}
    return Trained(results, logs["loss"], hvd.broadcast_object(texts, name="texts"))


def mean_squares(branches):
    return {"loss": dict.fromkeys(branches, "mse")}


def compare(section, make_branches, inputs, targets=TARGETS, options=mean_squares):
    """Train by one process and by all ranks; compare the results of each row."""
    expected, found = (
        train(make_branches, inputs, targets, options, is_distributed=is_distributed)
        for is_distributed in (False, True)
    )
    texts = "\n".join(found.warnings - expected.warnings)
    differing = []
    for name, results in found.results.items():
        row = f"{section}.{name.replace('-', ' ')}"
        if text := matrix.WARNED.get(row):
            assert text in texts, row
        elif row in matrix.RANDOM | matrix.OF_BATCHES:
            trained = results["weights"], results["predictions"]
            oracle.assert_bitwise_equal_over_ranks(keras.tree.flatten(trained))
        elif not are_close(results, expected.results[name], row in matrix.IN_FLOAT32):
            differing.append((row, results, expected.results[name]))
    assert not differing
    assert len(found.warnings - expected.warnings) == sum(
        f"{section}.{name}" in matrix.WARNED for name in found.results
    ), texts
    return found, expected


def are_close(found, expected, in_float32=False):
    """Return whether all arrays of two trees are close."""
    tolerance = 1e-5 if in_float32 else 1e-11
    pairs = keras.tree.map_structure(
        lambda a, b: np.allclose(a, b, rtol=tolerance, atol=tolerance), found, expected
    )
    return all(keras.tree.flatten(pairs))


def sample_and_all(section, tables):
    """Return parameters: the rows of a sample, if there are any, and all rows."""
    rows = {
        name: (context, row)
        for context, table in tables.items()
        for name, row in table.items()
    }
    sample = {n: row for n, row in rows.items() if f"{section}.{n}" in matrix.SAMPLE}
    every = pytest.param(rows, id=f"all-{next(iter(rows))}", marks=pytest.mark.release)
    found = [pytest.param(sample, id=f"sample-{next(iter(sample))}")] if sample else []
    return [*found, every]


def of_section(section):
    """Parametrize a test by the rows of a section."""
    return pytest.mark.parametrize(
        "rows", sample_and_all(section, matrix.TABLES[section])
    )


def build(module, name, row):
    """Return the object of a row."""
    return row() if callable(row) else getattr(module, name.split()[0])(**row)


def installed(module, rows):
    """Return rows by names of outputs, without classes that this Keras has not."""
    return {
        name.replace(" ", "-"): (context, functools.partial(build, module, name, row))
        for name, (context, row) in rows.items()
        if hasattr(module, name.split()[0])
    }


def between_layers(layer, inputs):
    """Return a model with a layer between layers with weights."""
    tensors = keras.tree.map_structure(
        lambda array: keras.Input(inputs.shape, dtype=array.dtype.name),
        inputs.samples(),
    )
    x = tensors
    if inputs.is_hidden:
        front = keras.layers.Dense(inputs.shape[-1], "tanh")
        x = keras.tree.map_structure(front, x)
    x = keras.layers.Flatten()(layer(x))
    return keras.Model(tensors, keras.layers.Dense(2)(keras.layers.Rescaling(0.5)(x)))


def of_vectors(layer):
    """Return a model of one layer."""
    x = keras.Input(matrix.VECTORS.shape)
    return keras.Model(x, layer(x))


@pytest.mark.parametrize(
    "rows",
    [
        group
        for inputs, table in matrix.LAYERS.items()
        for group in sample_and_all("layers", {inputs: table})
    ],
)
def test_layers(rows):
    inputs = next(iter(rows.values()))[0]
    keras.config.set_floatx(inputs.floatx)
    keras.config.set_dtype_policy(inputs.floatx)
    rows = installed(keras.layers, rows)

    def make():
        return {n: between_layers(layer(), inputs) for n, (_, layer) in rows.items()}

    compare("layers", make, inputs.samples())


@of_section("losses")
def test_losses(rows):
    rows = installed(keras.losses, rows)
    targets = {
        name: draw(np.random.default_rng(3), matrix.COUNT)[0]
        for name, (draw, _) in rows.items()
    }

    def make():
        return {
            name: of_vectors(matrix.HEADS[draw]()) for name, (draw, _) in rows.items()
        }

    def options(branches):
        return {"loss": {name: rows[name][1]() for name in branches}}

    compare("losses", make, matrix.VECTORS.samples(), targets, options)


@of_section("metrics")
def test_logged_metrics(rows):
    """The samples are predictions, and a branch is trained."""
    # Mean and Sum take no predictions.
    rows = {n: row for n, row in rows.items() if row[0] is not matrix.values}
    rows = installed(keras.metrics, rows)
    draws = {draw for draw, _ in rows.values()} | {matrix.regression}
    drawn = {
        draw.__name__: draw(np.random.default_rng(3), matrix.COUNT) for draw in draws
    }
    inputs = {name: predicted for name, (_, predicted) in drawn.items()}
    targets = {name: drawn[draw.__name__][0] for name, (draw, _) in rows.items()}
    targets["trained"] = drawn["regression"][0]

    def make():
        tensors = {
            name: keras.Input(values.shape[1:], dtype=values.dtype.name)
            for name, values in inputs.items()
        }
        branches = {
            name: keras.layers.Identity(dtype=(x := tensors[draw.__name__]).dtype)(x)
            for name, (draw, _) in rows.items()
        }
        branches["trained"] = keras.layers.Dense(3)(tensors["regression"])
        return {name: keras.Model(tensors, x) for name, x in branches.items()}

    def options(branches):
        metrics = {name: [metric()] for name, (_, metric) in rows.items()}
        return {"loss": {"trained": "mse"}, "metrics": metrics}

    found, _ = compare("metrics", make, inputs, targets, options)
    assert all(found.results[name]["logs"] for name in rows)


def test_metrics_of_unequal_shards():
    rows = {
        name: (draw, row)
        for draw, t in matrix.METRICS.items()
        for name, row in t.items()
    }
    # Sizes in the proportion 1 : 2 : 3 ...
    ends = np.cumsum(np.arange(hvd.size() + 1)) * 60
    own = slice(*(ends // (ends[-1] // 60))[hvd.rank() : hvd.rank() + 2])
    single, shared = [], []
    for name, (draw, make) in installed(keras.metrics, rows).items():
        truth, predicted = draw(np.random.default_rng(3), 60)
        for metrics, part in ((single, slice(None)), (shared, own)):
            metrics.append(make())
            metrics[-1].name = name
            metrics[-1].update_state(truth[part], predicted[part])
    local = [np.asarray(metric.result()) for metric in shared]
    found = reduce_metrics(shared)
    for metric in single:
        np.testing.assert_allclose(
            *(found[metric.name], metric.result()), rtol=1e-9, err_msg=metric.name
        )
    for metric, before in zip(shared, local, strict=True):
        np.testing.assert_array_equal(np.asarray(metric.result()), before)


GRADIENTS = np.random.default_rng(4).normal(size=(4, hvd.size(), 3, 4))


def update(make, *, is_distributed):
    """Return variables after steps of an optimizer, and its own."""
    keras.utils.clear_session(free_memory=False)
    optimizer = make()
    variables = [
        keras.Variable(np.ones((3, 4)), name="matrix"),
        keras.Variable(np.ones(4), name="vector"),
    ]
    if is_distributed:
        optimizer = hvd.DistributedOptimizer(optimizer)
    for by_rank in GRADIENTS:
        gradient = by_rank[hvd.rank()] if is_distributed else by_rank.mean(axis=0)
        gradient = tf.constant(gradient)
        optimizer.apply([gradient, gradient[0]], variables)
    optimizer.finalize_variable_values(variables)
    return [np.asarray(v) for v in [*variables, *optimizer.variables]]


def compare_updates(optimizers):
    for name, make in optimizers.items():
        expected = update(make, is_distributed=False)
        found = update(make, is_distributed=True)
        oracle.assert_bitwise_equal_over_ranks(found)
        assert are_close(found, expected), name


def test_a_missing_reduction_is_seen(monkeypatch):
    monkeypatch.setattr(hvd, "DistributedOptimizer", lambda optimizer: optimizer)
    with pytest.raises(AssertionError, match="differs from rank"):
        compare_updates({"SGD": lambda: keras.optimizers.SGD(0.1)})


@of_section("optimizers")
def test_optimizers(rows):
    rows = installed(keras.optimizers, rows)
    compare_updates({name: make for name, (_, make) in rows.items()})


@pytest.mark.release
def test_optimizers_that_decay_average_and_clip():
    rows = {n: (None, {**r, **matrix.FEATURES}) for n, r in matrix.OPTIMIZERS.items()}
    rows = installed(keras.optimizers, rows)
    compare_updates({name: make for name, (_, make) in rows.items()})


@of_section("optimizers.schedules")
def test_schedules(rows):
    rows = installed(keras.optimizers.schedules, rows)
    compare_updates(
        {
            name: lambda make=make: keras.optimizers.SGD(make())
            for name, (_, make) in rows.items()
        }
    )


def compare_kernels(section, rows, argument):
    rows = installed(getattr(keras, section), rows)

    def make():
        return {
            name: of_vectors(keras.layers.Dense(6, **{argument: of_kernel()}))
            for name, (_, of_kernel) in rows.items()
        }

    inputs = matrix.VECTORS.samples()
    found, expected = compare(section, make, inputs, targets=np.ones_like(inputs))
    # The losses of regularizers are in it.
    assert are_close(found.loss, expected.loss, in_float32=True)


@of_section("regularizers")
def test_regularizers(rows):
    compare_kernels("regularizers", rows, "kernel_regularizer")


@of_section("constraints")
def test_constraints(rows):
    compare_kernels("constraints", rows, "kernel_constraint")


@of_section("initializers")
def test_initializers(rows):
    compare_kernels("initializers", rows, "kernel_initializer")


def fit_with_callbacks(*, is_distributed):
    """Return weights, logs and the file of CSVLogger; files are of rank 0."""
    keras.utils.set_random_seed(7)
    rows = {name: (None, row) for name, row in matrix.CALLBACKS.items()}
    callbacks = [make() for _, make in installed(keras.callbacks, rows).values()]
    optimizer, deal = keras.optimizers.SGD(0.1, use_ema=True), lambda array: array
    batch_size = matrix.GLOBAL_BATCH_SIZE
    if is_distributed:
        optimizer, deal = hvd.DistributedOptimizer(optimizer), oracle.shard
        batch_size //= hvd.size()
        if hvd.rank():
            callbacks = [c for c in callbacks if not EFFECTS[type(c)].path]
        callbacks.sort(key=lambda c: type(c) is not keras.callbacks.BackupAndRestore)
        place = int(hvd.rank() == 0)
        callbacks[place:place] = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", run_eagerly=True)
    own = deal(matrix.VECTORS.samples()), deal(TARGETS)
    history = oracle.fit(
        model, *own, batch_size, epochs=4, callbacks=callbacks, validation_data=own
    )
    file = hvd.broadcast_object(hvd.rank() or pathlib.Path("log.csv").read_text())
    log = np.loadtxt(io.StringIO(file), delimiter=",", skiprows=1)
    return model.get_weights(), history.history, log


def test_callbacks(tmp_path, monkeypatch):
    results = []
    for is_distributed in (False, True):
        (folder := tmp_path / str(is_distributed)).mkdir()
        monkeypatch.chdir(folder)
        results.append(fit_with_callbacks(is_distributed=is_distributed))
    assert are_close(*results)
    # EarlyStopping has stopped it.
    assert len(results[0][1]["loss"]) == 2
