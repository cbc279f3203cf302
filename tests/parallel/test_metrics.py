"""Metrics of all ranks are those of one process that sees every sample."""

import itertools
import warnings

import keras
import matrix
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.distribution
import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import World
from hvdtrain.keras import metrics as metrics_module
from hvdtrain.keras.metrics import reduce_metrics, set_aggregation

# Positive and negative scores of two ranks. Rank 0: 20 of 25 pairs are in order.
# Rank 1: 5 + 5 + 4 + 3 + 5 = 22 of 25. Together: 78 of 100.
POSITIVE = [[7, 13, 6, 14, 12], [17, 18, 11, 9, 16]]
NEGATIVE = [[1, 4, 5, 3, 19], [0, 8, 10, 2, 15]]


@pytest.mark.ranks
def test_auc_is_not_the_mean_of_the_ranks():
    metric = keras.metrics.AUC()
    if hvd.rank() < 2:
        scores = POSITIVE[hvd.rank()] + NEGATIVE[hvd.rank()]
        metric.update_state([1] * 5 + [0] * 5, np.array(scores) / 20.0)
    local = hvd.allgather_object(float(metric.result()), name="local")
    assert np.mean(local[:2]) == pytest.approx(0.84, abs=1e-6)
    assert reduce_metrics([metric]) == {"auc": pytest.approx(0.78, abs=1e-6)}


def unequal_shards(count):
    """Slices for the ranks: sizes in the proportion 1 : 2 : 3 ..."""
    ends = np.cumsum(np.arange(hvd.size() + 1)) * count
    ends //= ends[-1] // count
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


class Aggregations(keras.metrics.Metric):
    """One variable of each kind, and results that are a dict."""

    def __init__(self):
        super().__init__(name="aggregations")
        self.states = {
            kind: self.add_variable((2,), "zeros", aggregation=kind, name=kind)
            for kind in ("sum", "none", "mean", "only_first_replica")
        }

    def update_state(self, value):
        for state in self.states.values():
            state.assign_add(value * np.ones(2, "float32"))

    def result(self):
        return {kind: state[0] for kind, state in self.states.items()}


def test_each_variable_is_combined_by_its_aggregation():
    metric = Aggregations()
    metric.update_state(hvd.rank() + 1.0)
    total = sum(range(1, hvd.size() + 1))
    assert reduce_metrics([metric]) == {
        "sum": total,
        "none": total,
        "mean": pytest.approx(total / hvd.size()),
        "only_first_replica": 1.0,
    }


class Largest(keras.metrics.Metric):
    """The largest error, and the mean in a metric of Keras."""

    def __init__(self, name, **options):
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", name="largest", **options)
        self.mean = keras.metrics.Mean()

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = keras.ops.abs(y_true - y_pred)
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(errors)))
        self.mean.update_state(errors)

    def result(self):
        return {"largest": self.largest + 0.0, "mean": self.mean.result()}


class LargeIoU(keras.metrics.MeanIoU):
    """Another input for a metric of Keras."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.ones_like(y_true), keras.ops.ones_like(y_pred))


def test_a_state_that_is_not_known_to_be_a_sum_is_named_once():
    model = oracle.build_model()
    stated = Largest("stated", aggregation="only_first_replica")
    model.compile(loss="mse", metrics=[Largest("worst"), stated, LargeIoU(2), "mae"])
    zeros = np.zeros((4, oracle.FEATURES + oracle.CLASSES), "float32")
    model.test_on_batch(*np.split(zeros, [oracle.FEATURES], axis=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            reduce_metrics(model.metrics)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (hvd.rank() == 0)
    for text in texts:
        assert "The state 'largest' of the metric 'worst' (Largest) is added" in text


@pytest.mark.parametrize("metrics", [{"a": 1}, lambda: None])
def test_an_attribute_metrics_of_a_users_own(metrics):
    metric = Largest("own", aggregation="only_first_replica")
    metric.metrics = metrics
    assert reduce_metrics([metric])["largest"] == 0


def test_a_warning_that_is_an_error_blocks_no_rank():
    metric = Largest("strict")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if hvd.rank():
            reduce_metrics([metric])
        else:
            with pytest.raises(UserWarning, match="'strict'"):
                reduce_metrics([metric])
    assert hvd.allgather_object(hvd.rank(), name="after") == list(range(hvd.size()))


def test_a_rank_without_a_batch_is_an_error_on_every_rank():
    metric = keras.metrics.F1Score()
    if hvd.rank() != 1:
        metric.update_state(*matrix.one_hot(np.random.default_rng(0), 8))
    with pytest.raises(ValueError, match="at least one batch to every rank"):
        reduce_metrics([metric])


def test_no_metrics():
    assert reduce_metrics([]) == {}


def two_headed_model():
    keras.utils.set_random_seed(7)
    inputs = keras.Input((oracle.FEATURES,))
    outputs = {
        "kind": keras.layers.Dense(oracle.CLASSES, activation="softmax", name="kind")(
            inputs
        ),
        "value": keras.layers.Dense(1, name="value")(inputs),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        "sgd",
        {"kind": oracle.LOSS, "value": "mse"},
        metrics={"kind": ["accuracy"], "value": [keras.metrics.R2Score()]},
        weighted_metrics={"kind": ["accuracy"], "value": ["mae"]},
    )
    return model


@pytest.mark.ranks
def test_evaluate_on_unequal_shards():
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(60, oracle.FEATURES)).astype("float32")
    labels = {
        "kind": rng.integers(0, oracle.CLASSES, 60),
        "value": rng.normal(size=(60, 1)).astype("float32"),
    }
    weights = rng.uniform(0.5, 2, 60).astype("float32")

    def part(rows):
        return inputs[rows], {k: v[rows] for k, v in labels.items()}, weights[rows]

    shards = [part(rows) for rows in unequal_shards(60)]
    # Keras averages the losses of the heads over batches: the same batches here.
    expected = two_headed_model().evaluate(
        (shard for shard in shards), steps=hvd.size(), verbose=0, return_dict=True
    )
    model = two_headed_model()
    model.evaluate((shard for shard in [shards[hvd.rank()]]), steps=1, verbose=0)
    assert reduce_metrics(model.metrics) == pytest.approx(expected, rel=1e-5)


class State(keras.metrics.Metric):
    """A state and how the targets change it; its result is the variable itself."""

    def __init__(self, name, change, *, start=0.0, aggregation=None):
        super().__init__(name=name)
        self.change, self.start = change, start
        self.state = self.add_variable((), keras.initializers.Constant(start))
        if aggregation:
            set_aggregation(self.state, aggregation)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.state.assign(self.change(self.state, keras.ops.reshape(y_true, (-1,))))

    def reset_state(self):
        self.state.assign(self.start)

    def result(self):
        return self.state


def largest(state, values):
    return keras.ops.maximum(state, keras.ops.max(values))


# The targets of all ranks are 1, 2, ...; both ranks of a batch of four have other ones.
TARGETS = np.arange(1.0, 4 * hvd.size() + 1).reshape(-1, 1).astype("float32")
OF_ALL_RANKS = {
    "count": TARGETS.sum(),
    "largest": TARGETS.max(),
    "smallest": 1.0,
    # Not declared: the sum of the ranks' maxima.
    "undeclared": None,
    "mae": TARGETS.mean(),
}


def model_with_states(optimizer="sgd"):
    network = keras.layers.Dense(1, kernel_initializer="zeros", trainable=True)
    model = keras.Sequential([keras.Input((1,)), network])
    states = [
        State("count", lambda state, values: state + keras.ops.sum(values)),
        State("largest", largest, aggregation="max"),
        State(
            "smallest",
            lambda state, values: keras.ops.minimum(state, keras.ops.min(values)),
            start=100.0,
            aggregation="min",
        ),
        State("undeclared", largest),
    ]
    if optimizer == "sgd":
        optimizer = keras.optimizers.SGD(0.0)
    model.compile(optimizer, "mse", metrics=[*states, "mae"], run_eagerly=True)
    return model


def distributed_model():
    return model_with_states(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))


def by_callback():
    model, own = distributed_model(), oracle.shard(TARGETS)
    # The last rank alone validates, with the samples of all.
    is_last = hvd.rank() == hvd.size() - 1
    history = oracle.fit(
        model,
        *(own, own, 2),
        validation_data=(TARGETS, TARGETS) if is_last else None,
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    )
    logs = {name: values[0] for name, values in history.history.items()}
    yield logs
    validated = {n[4:]: value for n, value in logs.items() if n.startswith("val_")}
    assert validated.pop("undeclared") == TARGETS.max()
    yield validated | {"undeclared": None}


def by_reduce_metrics():
    model, own = distributed_model(), oracle.shard(TARGETS)
    model.evaluate(own, own, verbose=0)
    yield reduce_metrics(model.metrics)


def by_training_fit():
    reports = []

    class Keeper:
        def on_progress(self, progress):
            reports.append(progress.metrics)

    result = training.fit(
        model_with_states,
        (TARGETS, TARGETS),
        global_batch_size=2 * hvd.size(),
        epochs=1,
        validation=(TARGETS, TARGETS),
        observers=[Keeper()],
        world=World(rank=hvd.rank(), size=hvd.size(), seed=1),
        seed=1,
    )
    yield {name: values[0] for name, values in result.history.items()}
    yield result.test_metrics
    # Sums are those of the steps since the report before.
    yield from ({**OF_ALL_RANKS, **pick(r, "largest", "smallest")} for r in reports)


def pick(values, *names):
    return {name: values[name] for name in names}


def by_keras_distribution():
    hvdtrain.distribution.enable()
    data = tf.data.Dataset.from_tensor_slices((TARGETS, TARGETS)).batch(2 * hvd.size())
    with keras.distribution.DataParallel().scope():
        model, own = model_with_states(), oracle.shard(TARGETS)
        history = model.fit(data, validation_data=data, verbose=0).history
        logs = {name: values[0] for name, values in history.items()}
        yield logs
        yield {n[4:]: value for n, value in logs.items() if n.startswith("val_")}
        yield model.evaluate(data, verbose=0, return_dict=True)
        yield model.train_on_batch(own, own, return_dict=True)
        yield model.test_on_batch(own, own, return_dict=True)
        # Of a graph.
        model.run_eagerly, model.test_function = False, None
        yield model.evaluate(data, verbose=0, return_dict=True)


@pytest.mark.parametrize(
    "path", [by_callback, by_reduce_metrics, by_training_fit, by_keras_distribution]
)
def test_each_way_to_a_metric_gives_the_one_of_all_samples(path):
    metrics_module._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = list(path())
    for found in results:
        for name, value in OF_ALL_RANKS.items():
            if value is not None:
                assert float(found[name]) == pytest.approx(value, rel=1e-6), name
    named = [str(w.message) for w in caught if "over the ranks" in str(w.message)]
    assert len([text for text in named if "'undeclared' (State)" in text]) == (
        hvd.rank() == 0
    )
    assert not [text for text in named if "'largest'" in text]


@pytest.mark.parametrize(
    ("metric", "axis"),
    [
        (keras.metrics.PearsonCorrelation(axis=0, name="r"), "axis=0"),
        (keras.metrics.MeanMetricWrapper(keras.losses.dice, "dice"), "axis=None"),
        (keras.metrics.CosineSimilarity(axis=1), None),
    ],
    ids=["axis_0", "all_axes", "axis_1"],
)
def test_a_metric_of_several_samples_is_named(metric, axis):
    metric.update_state(np.eye(2), np.ones((2, 2)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reduce_metrics([metric])
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (axis is not None and hvd.rank() == 0)
    for text in texts:
        assert f"the samples of a batch ({axis}), by each rank" in text


def test_an_unknown_aggregation_is_an_error():
    variable = keras.metrics.Mean().total
    with pytest.raises(ValueError, match="'product' for 'total'; expected one of sum"):
        set_aggregation(variable, "product")
