"""`keras.distribution` on TensorFlow, against plain Keras with the global batch.

Each rank computes the oracle by itself, outside of the distribution.
"""

import contextlib
import functools
import pathlib
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.distribution.distribution_lib import Distribution
from oracle import Centre, DenseEmbedding, assert_bitwise_equal_over_ranks, difference

import hvdtrain.distribution
import hvdtrain.keras as hvd
from hvdtrain.job.world import JobError
from hvdtrain.keras.variables import is_distributed

hvdtrain.distribution.enable()
keras.distribution.initialize(num_processes=hvd.size(), process_id=hvd.rank())

LOCAL, STEPS, WORDS, CLASSES = 4, 2, 11, 3
GLOBAL = LOCAL * hvd.size()
FLOAT64 = {"dtype": "float64"}


@functools.cache
def distribution():
    return keras.distribution.DataParallel()


def samples(count=GLOBAL * STEPS):
    """Some words are in the samples of several ranks."""
    rng = np.random.default_rng(3)
    words = rng.integers(0, WORDS, (count, 5)).astype("int32")
    return words, rng.integers(0, CLASSES, count)


def batches(count=GLOBAL * STEPS, **options):
    return tf.data.Dataset.from_tensor_slices(samples(count)).batch(GLOBAL, **options)


def build(*extra, is_oracle=False, seed=5, options=FLOAT64):
    keras.utils.set_random_seed(seed)
    table = DenseEmbedding if is_oracle else keras.layers.Embedding
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            table(WORDS, 6, **options),
            *(layer(**options) for layer in extra),
            keras.layers.Flatten(**options),
            keras.layers.Dense(CLASSES, "softmax", **options),
        ]
    )


def compile_model(model, optimizer, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(**FLOAT64)
    options = {"run_eagerly": True, "metrics": ["accuracy"]} | options
    model.compile(optimizer, loss, **options)
    return model


def fit(model, optimizer, data=None, *, compile_args=None, **options):
    compile_model(model, optimizer, **(compile_args or {}))
    options = {"shuffle": False, "verbose": 0} | options
    return model.fit(batches() if data is None else data, **options).history


def check(make_optimizer, *extra, tolerance=1e-12, options=FLOAT64, **fit_args):
    """Compare weights, history and evaluation with those of one process."""
    expected = build(*extra, is_oracle=True, options=options)
    history = fit(expected, make_optimizer(), **fit_args)
    evaluation = expected.evaluate(batches(), verbose=0)
    with distribution().scope():
        model = build(*extra, options=options)
        own_history = fit(model, make_optimizer(), **fit_args)
        own_evaluation = model.evaluate(batches(), verbose=0)
    assert_bitwise_equal_over_ranks(model.get_weights())
    assert difference(model.get_weights(), expected.get_weights()) < tolerance
    # The states of Keras' metrics are float32.
    metrics_tolerance = max(1e-6, tolerance)
    for name, values in history.items():
        np.testing.assert_allclose(own_history[name], values, rtol=metrics_tolerance)
    np.testing.assert_allclose(own_evaluation, evaluation, rtol=metrics_tolerance)


def test_the_script_of_the_page_equals_plain_keras():
    page = pathlib.Path(__file__).parents[2] / "docs" / "keras_distribution.md"
    script = re.search("```python\n(.*?)```", page.read_text(), re.DOTALL)[1]
    plain, distributed = {}, {}
    exec(re.sub(".*(distribution|== .tensorflow).*", "", script), plain)
    try:
        exec(script, distributed)
    finally:
        keras.distribution.set_distribution(None)
    weights = distributed["model"].get_weights()
    assert_bitwise_equal_over_ranks(weights)
    assert difference(weights, plain["model"].get_weights()) < 1e-5


def test_fit_equals_one_process_with_the_global_batch():
    check(
        lambda: keras.optimizers.SGD(0.3, momentum=0.9),
        compile_args={"run_eagerly": False, "steps_per_execution": 2},
        validation_data=batches(),
        epochs=2,
    )


def test_clipping_and_accumulation_equal_one_process():
    def make_optimizer():
        return keras.optimizers.Adam(
            0.03, global_clipnorm=0.1, gradient_accumulation_steps=2
        )

    check(make_optimizer)


def test_mixed_precision_equals_one_process_to_its_rounding():
    # bfloat16 has 8 bits; the losses of ranks are rounded in another order.
    policy = {"dtype": "mixed_bfloat16"}
    check(lambda: keras.optimizers.SGD(0.1), options=policy, tolerance=0.02)


@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.BatchNormalization,
        functools.partial(keras.layers.BatchNormalization, synchronized=True),
        keras.layers.LayerNormalization,
    ],
)
def test_normalization_equals_one_process(layer):
    check(lambda: keras.optimizers.SGD(0.1), layer)


def test_the_oracle_sees_one_rank_alone():
    expected, local = build(), build()
    fit(expected, keras.optimizers.SGD(0.3))
    fit(local, keras.optimizers.SGD(0.3), batches().map(lambda *b: [x[:4] for x in b]))
    assert difference(local.get_weights(), expected.get_weights()) > 1e-3


def test_a_last_batch_that_the_ranks_divide_is_trained_on():
    count = GLOBAL + hvd.size()
    expected = build()
    fit(expected, keras.optimizers.SGD(0.3), batches(count))
    with distribution().scope():
        model = build()
        fit(model, keras.optimizers.SGD(0.3), batches(count))
    assert difference(model.get_weights(), expected.get_weights()) < 1e-12


def test_a_last_batch_that_the_ranks_do_not_divide_is_an_error_on_each():
    with distribution().scope():
        model = compile_model(build(), "sgd")
        with pytest.raises(tf.errors.InvalidArgumentError, match="drop_remainder=True"):
            model.evaluate(batches(GLOBAL + 1), verbose=0)
        # No rank is left in a collective of another one.
        model.evaluate(batches(GLOBAL + 1, drop_remainder=True), verbose=0)


def test_ranks_take_equally_many_steps_where_their_number_is_not_known():
    data = batches(GLOBAL * 2).filter(lambda words, labels: True)
    assert data.cardinality() == tf.data.UNKNOWN_CARDINALITY
    expected = build()
    fit(expected, keras.optimizers.SGD(0.3), data)
    with distribution().scope():
        model = build()
        fit(model, keras.optimizers.SGD(0.3), data)
    assert difference(model.get_weights(), expected.get_weights()) < 1e-12


def test_predict_returns_the_outputs_of_the_global_batches():
    data = batches(GLOBAL + hvd.size()).map(lambda words, labels: {"words": words})
    inputs = {"words": keras.Input((5,), dtype="int32", name="words")}
    table = keras.layers.Embedding(WORDS, 2)(inputs["words"])
    model = keras.Model(inputs, [table, {"sum": keras.ops.sum(table, 1)}])
    weights = [np.arange(WORDS * 2).reshape(WORDS, 2)]
    model.set_weights(weights)
    expected = model.predict(data, verbose=0)
    with distribution().scope():
        other = keras.models.clone_model(model)
        other.set_weights(weights)
        found = other.predict(data, verbose=0)
    assert len(found[0]) == GLOBAL + hvd.size()
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)


def test_the_weights_of_rank_0_are_those_of_all():
    with distribution().scope():
        model = build(seed=hvd.rank())
        fit(model, keras.optimizers.SGD(0.3))
    expected = build(seed=0)
    fit(expected, keras.optimizers.SGD(0.3))
    assert difference(model.get_weights(), expected.get_weights()) < 1e-12


@pytest.mark.parametrize("is_built", [True, False])
def test_train_on_batch_takes_the_batch_of_its_process(is_built):
    words, labels = samples()
    mine = slice(hvd.rank() * LOCAL, (hvd.rank() + 1) * LOCAL)
    expected = compile_model(build(seed=0), keras.optimizers.SGD(0.3))
    losses = [expected.train_on_batch(words[:GLOBAL], labels[:GLOBAL])]
    losses.append(expected.train_on_batch(words[:GLOBAL], labels[:GLOBAL]))
    with distribution().scope():
        model = build(seed=hvd.rank())
        if not is_built:
            # Built on rank 0 alone.
            weights = model.get_weights()
            model = keras.Sequential(
                [type(layer).from_config(layer.get_config()) for layer in model.layers]
            )
            if hvd.rank() == 0:
                model.build((None, 5))
                model.set_weights(weights)
        compile_model(model, keras.optimizers.SGD(0.3))
        found = [model.train_on_batch(words[mine], labels[mine]) for _ in losses]
    assert_bitwise_equal_over_ranks(model.get_weights())
    assert difference(model.get_weights(), expected.get_weights()) < 1e-12
    np.testing.assert_allclose(found, losses, rtol=1e-6)


def test_arrays_are_those_of_the_process():
    words, labels = samples()
    with distribution().scope():
        model = compile_model(build(), keras.optimizers.SGD(0.3))
        # Keras' error.
        with pytest.raises(ValueError, match=r"must be provided as a `tf\.data\.Data"):
            model.fit(words, labels, verbose=0)
    own = keras.distribution.DataParallel(auto_shard_dataset=False)
    mine = [
        array.reshape(STEPS, hvd.size(), LOCAL, -1)[:, hvd.rank()].reshape(
            STEPS * LOCAL, -1
        )
        for array in (words, labels)
    ]
    with own.scope():
        model.fit(*mine, batch_size=LOCAL, shuffle=False, verbose=0)
        evaluation = model.evaluate(*mine, batch_size=LOCAL, verbose=0)
    expected = build()
    fit(expected, keras.optimizers.SGD(0.3))
    assert difference(model.get_weights(), expected.get_weights()) < 1e-12
    expected = expected.evaluate(batches(), verbose=0)
    np.testing.assert_allclose(evaluation, expected, rtol=1e-6)


def test_ranks_drop_different_units():
    with distribution().scope():
        model = build()
        model.add(keras.layers.Dropout(0.5, **FLOAT64))
        fit(model, "sgd")
    (seed,) = (v for v in model.variables if "seed" in v.path)
    seeds = hvd.allgather_object(int(seed.numpy()[0]))
    assert len(set(seeds)) == hvd.size()


def test_an_optimizer_of_the_user_is_distributed_once():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.3))
    hook = optimizer.reduction_hook
    with distribution().scope():
        model = compile_model(build(), optimizer)
        assert model.optimizer.reduction_hook is hook
        # Of Keras' names.
        model = compile_model(build(), "adam")
        assert hasattr(model.optimizer, "reduction_hook")
    assert not hasattr(compile_model(build(), "adam").optimizer, "reduction_hook")


def test_devices_and_layouts_are_those_of_the_ranks():
    size = hvd.size()
    devices = keras.distribution.list_devices()
    assert devices == [f"cpu:{rank}" for rank in range(size)]
    # Keras 3.13 and later.
    if hasattr(keras.distribution, "get_device_count"):
        assert keras.distribution.get_device_count("CPU") == size
    assert keras.distribution.list_devices("tpu") == []
    mesh = keras.distribution.DeviceMesh((size,), ["batch"], devices[::-1])
    np.testing.assert_array_equal(mesh.backend_mesh, range(size)[::-1])
    layout = keras.distribution.TensorLayout([None, "batch"], mesh)
    assert layout.backend_layout[1] == (None, "batch")
    value = keras.distribution.distribute_tensor(tf.ones([2, 2]), layout)
    np.testing.assert_array_equal(value, np.ones([2, 2]))
    variable = keras.Variable([[1.0]])
    assert hvdtrain.distribution.layout_of(variable) is None
    with keras.distribution.DataParallel(device_mesh=mesh).scope():
        assert hvdtrain.distribution.layout_of(variable).axes == (None, None)
    with pytest.raises(ValueError, match="Pass device_mesh"):
        _ = keras.distribution.TensorLayout([None]).backend_layout


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: keras.distribution.initialize(num_processes=hvd.size() + 1),
            r"Received num_processes=\d+ in keras\.distribution",
        ),
        (
            lambda: keras.distribution.initialize("a,b,c,d,e,f"),
            "Received the number of job_addresses=6 in",
        ),
        (lambda: keras.distribution.initialize(process_id=9), "rank 0|process_id=9"),
        (
            lambda: keras.distribution.DataParallel(devices=["cpu:0"]),
            r"Received a mesh of 1 devices, cpu:0, in a job of \d ranks",
        ),
        (
            lambda: keras.distribution.DataParallel(devices=["cpu:0"] * hvd.size()),
            "expected one device of one kind for each rank: cpu:0, cpu:1",
        ),
        (
            lambda: Distribution(distribution().device_mesh),
            "Received Distribution; expected DataParallel or ModelParallel",
        ),
    ],
)
def test_what_does_not_fit_the_job_is_an_error_of_one_line(make, message):
    with pytest.raises(JobError, match=message) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_a_loaded_model_is_compiled_and_distributed(tmp_path):
    compile_model(build(), "sgd").save(tmp_path / "model.keras")
    with distribution().scope():
        model = keras.models.load_model(tmp_path / "model.keras")
    assert is_distributed(model.optimizer)


def test_xla_is_disabled(recwarn):
    with distribution().scope():
        model = build()
        model.compile("sgd", "mse", jit_compile=True)
    assert not model.jit_compile
    assert any("XLA is disabled" in str(w.message) for w in recwarn) == (not hvd.rank())


def distributed_sgd(rate=0.3, **options):
    return hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options)


@pytest.mark.ranks
def test_compile_checks_losses_for_any_optimizer():
    """tests/unit/test_loss_reductions.py has the table."""
    squares = keras.losses.MeanSquaredError(reduction="sum", name="squares")
    added = distributed_sgd(op=hvd.Sum)
    with distribution().scope():
        model = build()
        for optimizer in ("sgd", distributed_sgd()):
            text = "the loss squares with reduction='sum'; expected a mean over"
            with pytest.raises(JobError, match=text) as error:
                model.compile(optimizer, [squares])
            assert "\n" not in str(error.value)
        with pytest.raises(JobError, match=r"the loss mse .* expected a sum"):
            model.compile(added, "mse")
        model.compile(added, squares)
        model.compile(distributed_sgd(), squares, loss_weights=[float(hvd.size())])
        with pytest.raises(JobError, match="expected a mean"):
            model.compile(distributed_sgd(), [squares, "mse"], loss_weights=[0.5, 1])


def test_the_optimizer_of_the_user_is_over_the_ranks_of_the_data():
    alone = hvd.add_process_set([0])
    with (
        distribution().scope(),
        pytest.raises(JobError, match=r"over the ranks \[0\];"),
    ):
        build().compile(distributed_sgd(process_set=alone), "mse")
    hvd.remove_process_set(alone)


@pytest.mark.parametrize("reduction", ["sum", None])
@pytest.mark.parametrize("is_distribution", [True, False])
def test_losses_that_are_sums_with_op_sum(reduction, is_distribution):
    """Weights and logs are those of one process: reduction=None logs the mean."""
    y = np.arange(1.0, GLOBAL + 1).reshape(-1, 1)
    x, losses = np.ones_like(y), y**2
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    scope = distribution().scope() if is_distribution else contextlib.nullcontext()
    with scope:
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), dense])
        optimizer = distributed_sgd(0.1, op=hvd.Sum)
        model.compile(optimizer, loss, run_eagerly=True)
        own = slice(hvd.rank(), None, hvd.size())
        data = tf.data.Dataset.from_tensor_slices(
            (x, y) if is_distribution else (x[own], y[own])
        )
        callbacks = [] if is_distribution else [hvd.callbacks.MetricAverageCallback()]
        options = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
        logs = model.fit(data.batch(GLOBAL), **options).history
    # The gradient of (w - y)^2 at 0 is -2 y.
    np.testing.assert_allclose(dense.kernel, [[0.2 * y.sum()]], rtol=1e-6)
    logged = losses.sum() if reduction == "sum" else losses.mean()
    np.testing.assert_allclose(logs["loss"], [logged], rtol=1e-6)


def test_gradients_of_tables_are_dense_for_an_optimizer_of_the_user():
    expected = build(is_oracle=True)
    fit(expected, keras.optimizers.Adam(0.05))
    with distribution().scope():
        model = build()
        fit(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)))
    assert difference(model.get_weights(), expected.get_weights()) < 1e-12


@pytest.mark.parametrize(("aggregation", "is_named"), [("mean", False), ("none", True)])
def test_weights_that_a_layer_updates_in_its_call(aggregation, is_named):
    x = np.arange(GLOBAL * STEPS, dtype="float32")[:, None] / GLOBAL
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(GLOBAL)

    def train():
        layer = Centre(aggregation)
        model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(data, verbose=0)
        return layer.centre.numpy()

    expected = train()
    with distribution().scope(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train()
    assert_bitwise_equal_over_ranks([found])
    if not is_named:
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    named = [str(w.message) for w in caught if "/centre, which a layer" in str(w)]
    assert len(named) == (is_named and hvd.rank() == 0)


def test_data_that_cannot_be_dealt_are_errors():
    with distribution().scope():
        model = compile_model(build(), "sgd")
        with pytest.raises(JobError, match="expected global batches"):
            model.fit(batches().unbatch(), verbose=0)
        with pytest.raises(JobError, match="outputs in predict; expected dense"):
            Ragged().predict(batches(), verbose=0)


class Ragged(keras.Model):
    def call(self, inputs):
        return tf.RaggedTensor.from_tensor(inputs)
