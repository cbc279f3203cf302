"""`keras.distribution.ModelParallel` on TensorFlow, against plain Keras.

The mesh is (batch, model). Each rank computes the oracle by itself, outside of the
distribution, with the global batch.
"""

import functools
import math
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import DenseEmbedding, assert_bitwise_equal_over_ranks, difference

import hvdtrain.distribution
import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.collectives.dtypes import local_shard
from hvdtrain.job.world import JobError, World

hvdtrain.distribution.enable()
keras.distribution.initialize()

BATCH, STEPS, WORDS, WIDTH, CLASSES = 24, 2, 12, 12, 3
SIZE = hvd.size()
# Ranks along the model axis: all, none, and two of four.
MODEL_RANKS = sorted({1, SIZE, math.gcd(SIZE, 2)})
# By the name of the layer: how its weights are laid out.
COLUMNS = {"up/kernel": (None, "model"), "up/bias": ("model",)}
LAYOUTS = {
    "columns": COLUMNS,
    "rows": {"down/kernel": ("model", None)},
    "pair": {**COLUMNS, "down/kernel": ("model", "batch")},
    "einsum": {
        "heads/kernel": (None, "model", None),
        "heads/bias": ("model", None),
        "merge/kernel": ("model", None, "batch"),
    },
    "table by column": {"table/embeddings": ("batch", "model")},
    "table by row": {"table/embeddings": ("model", None)},
    "no call with blocks": {
        "norm/.*": ("model",),
        "conv/kernel": (None, None, "model"),
    },
    "elements": {
        "(heads|merge|conv)/kernel": ("batch", None, None),
        "(up|down|head)/kernel": ("batch", None),
        "table/.*": (None, "batch"),
    },
    "all": {
        **COLUMNS,
        "table/.*": ("model", "batch"),
        "(heads|merge)/kernel": ("model", "batch", None),
        "conv/kernel": (None, "batch", "model"),
        "(down|head)/kernel": ("model", "batch"),
        ".*(gamma|beta)": ("batch",),
    },
}


def build(embedding=keras.layers.Embedding, dtype="float64"):
    keras.utils.set_random_seed(3)
    layers = functools.partial(getattr, keras.layers)
    options = {"dtype": dtype}
    inputs = keras.Input((4,), dtype="int32")
    x = embedding(WORDS, WIDTH, name="table", **options)(inputs)
    x = layers("Conv1D")(WIDTH, 3, padding="same", name="conv", **options)(x)
    y = layers("EinsumDense")(
        "...d,dnh->...nh",
        (12, 2),
        "gelu",
        bias_axes="nh",
        name="heads",
        **options,
    )(x)
    y = layers("EinsumDense")(
        "abnh,nhd->abd", (None, WIDTH), bias_axes="d", name="merge", **options
    )(y)
    x = layers("LayerNormalization")(name="norm", **options)(x + y)
    y = layers("Dense")(2 * WIDTH, "softmax", name="up", **options)(x)
    x = x + layers("Dense")(WIDTH, name="down", **options)(y)
    x = layers("BatchNormalization")(name="statistics", **options)(x)
    x = layers("Flatten")(**options)(x)
    x = layers("Dense")(CLASSES, "softmax", name="head", **options)(x)
    return keras.Model(inputs, x)


def batches(count=BATCH * STEPS):
    rng = np.random.default_rng(4)
    words = rng.integers(0, WORDS, (count, 4)).astype("int32")
    samples = words, rng.integers(0, CLASSES, count)
    return tf.data.Dataset.from_tensor_slices(samples).batch(BATCH)


def fit(model, optimizer, **compile_args):
    loss = keras.losses.SparseCategoricalCrossentropy(dtype="float64")
    model.compile(optimizer, loss, metrics=["accuracy"], **compile_args)
    return model.fit(batches(), verbose=0).history


def distribution(model_ranks, layouts):
    shape = SIZE // model_ranks, model_ranks
    mesh = keras.distribution.DeviceMesh(
        shape, ["batch", "model"], keras.distribution.list_devices()
    )
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, axes in layouts.items():
        layout_map[path] = axes
    return keras.distribution.ModelParallel(layout_map=layout_map)


@functools.cache
def trained_in_one_process(make_optimizer):
    model = build(DenseEmbedding)
    history = fit(model, make_optimizer())
    evaluation = model.evaluate(batches(), verbose=0)
    return model.get_weights(), history, evaluation, model.predict(batches(), verbose=0)


def momentum():
    return keras.optimizers.SGD(0.3, momentum=0.9)


def adam():
    return keras.optimizers.Adam(
        0.01, global_clipnorm=0.1, gradient_accumulation_steps=2, use_ema=True
    )


def cases():
    """Each layout on each mesh that shards by it; a part of them in each test run."""
    for name, layouts in LAYOUTS.items():
        names = {axis for axes in layouts.values() for axis in axes}
        for model_ranks in MODEL_RANKS:
            shards = {"model": model_ranks > 1, "batch": model_ranks < SIZE}
            if not any(shards.get(axis) for axis in names):
                continue
            is_long = name not in ("einsum", "table by row", "elements")
            marks = [pytest.mark.long] if is_long or model_ranks < SIZE else []
            if name == "einsum" and model_ranks == SIZE:
                marks.append(pytest.mark.ranks)
            if name == "all" and model_ranks == math.gcd(SIZE, 2):
                marks.append(pytest.mark.four_ranks)
            yield pytest.param(name, model_ranks, marks=marks)


@pytest.mark.parametrize(("name", "model_ranks"), list(cases()))
def test_fit_equals_one_process(name, model_ranks):
    check(momentum, LAYOUTS[name], model_ranks, run_eagerly=True)


@pytest.mark.parametrize(
    "model_ranks",
    [pytest.param(1, marks=pytest.mark.long), *MODEL_RANKS[1:]],
)
def test_compiled_steps_and_options_of_an_optimizer_equal_one_process(model_ranks):
    check(adam, LAYOUTS["all"], model_ranks)


def check(make_optimizer, layouts, model_ranks, **compile_args):
    expected, history, evaluation, outputs = trained_in_one_process(make_optimizer)
    with distribution(model_ranks, layouts).scope():
        model = build()
        own_history = fit(model, make_optimizer(), **compile_args)
        own_evaluation = model.evaluate(batches(), verbose=0)
        predicted = model.predict(batches(), verbose=0)
    weights = model.get_weights()
    assert_bitwise_equal_over_ranks(weights)
    assert difference(weights, expected) < 1e-12
    # The states of Keras' metrics are float32.
    for key, values in history.items():
        np.testing.assert_allclose(own_history[key], values, rtol=1e-6)
    np.testing.assert_allclose(own_evaluation, evaluation, rtol=1e-6)
    assert difference([predicted], [outputs]) < 1e-12


def dense(units, name):
    """A layer with the same weights in every call."""
    initializer = keras.initializers.RandomNormal(seed=units)
    return keras.layers.Dense(units, name=name, kernel_initializer=initializer)


def small(*layers):
    inputs = x = keras.Input((6,))
    for layer in [*layers, dense(CLASSES, "out")]:
        x = layer(x)
    return keras.Model(inputs, x)


def fit_small(model, optimizer="sgd", wrap=lambda inputs: inputs, run_eagerly=True):
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(BATCH, 6)), rng.normal(size=(BATCH, CLASSES))
    model.compile(optimizer, "mse", run_eagerly=run_eagerly)
    data = tf.data.Dataset.from_tensor_slices((wrap(x), y)).batch(BATCH)
    model.fit(data, verbose=0)
    return model


def test_each_rank_stores_the_block_of_its_layout():
    layouts = {"up/kernel": (None, "model"), "down/kernel": ("model", "batch")}
    with distribution(SIZE, layouts).scope():
        up, down = dense(12, "up"), dense(4, "down")
        model = small(up, down)
    assert up.kernel.shape == (6, 12)
    assert down.kernel.shape == (12, 4)
    assert local_shard(up.kernel).shape == (6, 12 // SIZE)
    assert local_shard(down.kernel).shape == (12 // SIZE, 4)
    columns = slice(hvd.rank() * 12 // SIZE, (hvd.rank() + 1) * 12 // SIZE)
    full = up.kernel.numpy()
    np.testing.assert_array_equal(local_shard(up.kernel).numpy(), full[:, columns])
    up.kernel.assign(full * 2)
    np.testing.assert_array_equal(local_shard(up.kernel).numpy(), 2 * full[:, columns])
    assert len(model.get_weights()) == 6


def test_ranks_of_one_replica_draw_the_same_masks():
    layers = [
        lambda: dense(12, "up"),
        lambda: keras.layers.Dropout(0.5),
    ]
    expected = small(*(make() for make in layers))
    with distribution(SIZE, COLUMNS).scope():
        model = small(*(make() for make in layers))
        model.layers[2].seed_generator.state.assign([7, hvd.rank()])
        expected.layers[2].seed_generator.state.assign([7, 0])
        fit_small(model)
    fit_small(expected)
    assert difference(model.get_weights(), expected.get_weights()) < 1e-6


RECORDED = []


@keras.saving.register_keras_serializable()
class Recorded(keras.layers.Layer):
    """Appends its input to the list, in an eager step."""

    def call(self, inputs):
        if tf.executing_eagerly():
            RECORDED.append(inputs.numpy().tobytes())
        return inputs


@keras.saving.register_keras_serializable()
class Noise(keras.layers.Layer):
    """Adds numbers of a generator, or of the one of `keras.random`."""

    def __init__(self, seed=None, **options):
        super().__init__(**options)
        self.seed = seed

    def get_config(self):
        return {**super().get_config(), "seed": self.seed}

    @classmethod
    def from_config(cls, config):
        return cls(**keras.saving.deserialize_keras_object(config))

    def call(self, inputs):
        shape = keras.ops.shape(inputs)
        return inputs + keras.random.uniform(shape, seed=self.seed)


def random_model():
    shared = keras.random.SeedGenerator(1337)
    layers = [
        keras.layers.Dropout(0.5),
        keras.layers.GaussianNoise(0.1),
        keras.layers.Dropout(0.5, seed=3),
        *(Noise(shared), Noise(shared), Noise()),
    ]
    recorded = [each for layer in layers for each in (layer, Recorded())]
    return small(dense(12, "up"), *recorded)


def draws_by_rank(model):
    """What each rank has drawn in each of two steps."""
    data = tf.data.Dataset.from_tensors((np.ones((BATCH, 6)), np.ones((BATCH, 3))))
    RECORDED.clear()
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    model.fit(data.repeat(2), verbose=0)
    return hvd.allgather_object(RECORDED, name="draws")


@pytest.mark.four_ranks
@pytest.mark.parametrize(
    ("model_ranks", "layouts"),
    [*((ranks, COLUMNS) for ranks in MODEL_RANKS), (SIZE, {"none": (None,)})],
)
def test_replicas_draw_different_numbers_and_their_ranks_the_same(
    model_ranks, layouts, tmp_path
):
    path = hvd.broadcast_object(str(tmp_path / "random.keras"), name="path")
    # Ranks of a replica must be seeded alike: these are not.
    keras.utils.set_random_seed(hvd.rank())
    with distribution(model_ranks, layouts).scope():
        model = random_model()
        by_rank = draws_by_rank(model)
        if model_ranks > 1 or hvd.rank() == 0:
            model.save(path)
        hvd.allgather_object(None, name="saved")
        loaded = draws_by_rank(keras.models.load_model(path))
    for found in (by_rank, loaded):
        for rank, draws in enumerate(found):
            # Those of six layers, in two steps.
            assert len(set(draws)) == len(draws) == 12
            assert draws == found[rank // model_ranks * model_ranks]
        replicas = found[::model_ranks]
        assert all(len(set(same)) == len(same) for same in zip(*replicas, strict=True))


@pytest.mark.parametrize("is_late", [True, False])
def test_a_model_that_is_built_late_or_outside_is_sharded_in_its_first_step(is_late):
    expected = fit_small(small(dense(12, "up")))
    outside = small(dense(12, "up"))
    with distribution(SIZE, {".*up/kernel": (None, "model")}).scope():
        late = keras.Sequential([dense(12, "up"), dense(CLASSES, "out")])
        model = fit_small(late if is_late else outside)
    assert local_shard(model.get_layer("up").kernel).shape == (6, 12 // SIZE)
    assert difference(model.get_weights(), expected.get_weights()) < 1e-6


class OfNames(keras.Model):
    """Keras builds its layers while it infers shapes, since it takes a dictionary."""

    def __init__(self):
        super().__init__()
        self.up, self.out = dense(12, "up"), dense(CLASSES, "out")

    def call(self, inputs):
        return self.out(self.up(inputs["x"]))


def test_layers_that_keras_builds_in_a_trace_are_sharded_in_the_first_step():
    expected = fit_small(small(dense(12, "up")))
    for run_eagerly in (True, False):
        with distribution(SIZE, {".*up/kernel": (None, "model")}).scope():
            model = fit_small(
                OfNames(), wrap=lambda x: {"x": x}, run_eagerly=run_eagerly
            )
        assert local_shard(model.up.kernel).shape == (6, 12 // SIZE)
        assert difference(model.get_weights(), expected.get_weights()) < 1e-6


def test_frozen_weights_and_lora_train_as_in_one_process():
    def build():
        model = small(dense(12, "up"), dense(8, "down"))
        model.get_layer("up").trainable = False
        model.get_layer("down").enable_lora(2)
        model.get_layer("down").lora_kernel_b.assign(np.ones((2, 8)))
        return model

    layouts = {"(up|down)/kernel": (None, "model"), "out/kernel": ("model", None)}
    keras.utils.set_random_seed(1)
    expected = fit_small(build())
    keras.utils.set_random_seed(1)
    with distribution(math.gcd(SIZE, 2), layouts).scope():
        model = fit_small(build())
    assert difference(model.get_weights(), expected.get_weights()) < 1e-6


@pytest.mark.parametrize("axes", [("model", None), (None, "model")])
def test_rows_of_a_table_are_those_of_keras(axes):
    ids = np.array([[0, -1, 5], [11, 3, -12]])
    table = keras.layers.Embedding(WORDS, 12, name="table")
    inputs = keras.Input((None,), dtype="int64")
    with distribution(SIZE, {"table/embeddings": axes}).scope():
        model = keras.Model(inputs, table(inputs))
        expected = np.take(table.embeddings.numpy(), ids, axis=0)
        model.compile()
        np.testing.assert_array_equal(model(ids), expected)
        ragged = tf.ragged.constant([[0, 3], [11]])
        rows = table(ragged).to_list()
        assert difference(rows[1], expected[1:, :1]) == 0
        # TensorFlow finds it on CPUs alone.
        with pytest.raises(tf.errors.InvalidArgumentError):
            model(ids + 1)


def test_functions_are_traced_again_under_another_distribution():
    data = tf.data.Dataset.from_tensor_slices(np.ones((BATCH, 6))).batch(BATCH)
    model = small(dense(12, "up"))
    expected = model.predict(data, verbose=0)
    for distribution_ in (keras.distribution.DataParallel(), None) * 2:
        keras.distribution.set_distribution(distribution_)
        found = model.predict(data, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_saved_model_is_a_plain_one(tmp_path):
    path = hvd.broadcast_object(str(tmp_path / "model.keras"), name="path")
    with distribution(SIZE, COLUMNS).scope():
        model = fit_small(small(dense(12, "up")), "adam")
        model.save(path)
        weights = model.get_weights()
        model.set_weights([0 * weight for weight in weights])
        model.load_weights(path)
        assert difference(model.get_weights(), weights) == 0
    loaded = keras.models.load_model(path)
    assert difference(loaded.get_weights(), weights) == 0
    assert type(loaded.layers[1]) is keras.layers.Dense


def test_the_table_says_what_layers_compute_with(capsys):
    layouts = COLUMNS | {"statistics/gamma": ("model",)}
    with distribution(SIZE, layouts).scope():
        model = small(
            dense(12, "up"),
            keras.layers.BatchNormalization(name="statistics"),
        )
        fit_small(fit_small(model))
    lines = capsys.readouterr().out.splitlines()
    if hvd.rank():
        assert lines == []
        return
    rows = [line.split("  ") for line in lines]
    found = {(row[0], row[-1]): line for row, line in zip(rows, lines, strict=True)}
    assert "72" in found["Dense", "blocks"]
    assert f" {72 // SIZE} " in found["Dense", "blocks"]
    assert "12" in found["BatchNormalization", "gathered"]
    assert ("BatchNormalization", "replicated") in found
    # Once for a model.
    assert lines.count(lines[0]) == 1


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: distribution(SIZE, {"up/kernel": ("model", "model")}),
            "Received the layout ('model', 'model') for up/kernel of the shape (6, 13)",
        ),
        (
            lambda: distribution(SIZE, {"up/kernel": ("model",)}),
            "expected one name or None for each axis, the model axis once at most",
        ),
        (
            lambda: distribution(SIZE, {"out/kernel": ("model", None)}),
            f"out/kernel of the shape (13, 3), on {SIZE} ranks along the model axis",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_errors_of_one_line(act, message):
    with act().scope(), pytest.raises(JobError) as raised:
        small(dense(13, "up"))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_layout_map_for_other_weights_is_a_warning():
    with distribution(SIZE, {"sequential/up/kernel": (None, "model")}).scope():
        model = small(dense(12, "up"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.compile("sgd", "mse")
    texts = [str(warning.message) for warning in caught]
    is_warned = any("paths such as 'up/kernel'" in text for text in texts)
    assert is_warned == (hvd.rank() == 0)


def test_meshes_and_optimizers_that_do_not_fit_are_errors_of_one_line():
    devices = keras.distribution.list_devices()
    for shape, names, options in (
        ((1, SIZE), ["model", "batch"], {"batch_dim_name": "batch"}),
        ((SIZE, 1, 1), ["batch", "model", "other"], {}),
    ):
        mesh = keras.distribution.DeviceMesh(shape, names, devices)
        layout_map = keras.distribution.LayoutMap(mesh)
        with pytest.raises(JobError, match="expected the axis of the batch first"):
            keras.distribution.ModelParallel(layout_map=layout_map, **options)
    with distribution(SIZE, COLUMNS).scope():
        model = small(dense(12, "up"))
        with pytest.raises(JobError, match="expected a new Keras optimizer"):
            model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
        with pytest.raises(ValueError, match="Use an elementwise optimizer"):
            fit_small(model, keras.optimizers.Lamb())


def test_training_refuses_a_distribution_and_models_of_one():
    world = World(rank=hvd.rank(), size=SIZE)
    x, y = np.ones((SIZE, 6)), np.ones((SIZE, CLASSES))
    parallel_model = distribution(SIZE, COLUMNS)

    def make_model():
        model = small(dense(12, "up"))
        model.compile("sgd", "mse")
        return model

    def make_in_scope():
        with parallel_model.scope():
            return make_model()

    def fit_source(make):
        training.fit(make, (x, y), global_batch_size=SIZE, epochs=1, world=world)

    data_parallel = keras.distribution.DataParallel()
    batches = tf.data.Dataset.from_tensors((x, y))
    for active in (parallel_model, data_parallel):
        with active.scope():
            model = make_model()
            for call in (
                lambda: fit_source(make_model),
                lambda: training.predict(model, x, world=world),  # noqa: B023
                lambda: training.evaluate(model, batches),  # noqa: B023
            ):
                with pytest.raises(JobError, match="Received the active distribution"):
                    call()
    with pytest.raises(JobError, match=f"mesh=None, .*MeshShape.model={SIZE}"):
        fit_source(make_in_scope)


class WithoutMask(keras.Model):
    """Takes a dict, one of whose inputs may be None; built by its first batch."""

    def __init__(self):
        super().__init__()
        self.up = keras.layers.Dense(WIDTH, "tanh", dtype="float64", name="up")
        self.head = keras.layers.Dense(CLASSES, "softmax", dtype="float64")

    def call(self, inputs):
        x = self.up(inputs["x"])
        mask = inputs.get("mask")
        return self.head(x if mask is None else x * mask)


def call_all_methods(rows, *, run_eagerly):
    """Return logs and outputs; `rows` of a batch are passed where a rank passes its."""
    keras.utils.set_random_seed(4)
    model = WithoutMask()
    loss = keras.losses.SparseCategoricalCrossentropy(dtype="float64")
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        loss,
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(name="weighted")],
        run_eagerly=run_eagerly,
    )
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(BATCH, 6)), rng.integers(0, CLASSES, BATCH)
    batch = {"x": x[rows], "mask": None}, y[rows]
    weights = {"sample_weight": rng.uniform(0.5, 2, BATCH)[rows]}
    by_class = {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}
    logs = [
        method(*batch, **options, return_dict=True)
        for method, options in (
            *((model.train_on_batch, options) for options in ({}, weights, by_class)),
            *((model.test_on_batch, options) for options in ({}, weights)),
        )
    ]
    data = tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(BATCH // 2)
    options = {"epochs": 4, "initial_epoch": 1, "steps_per_epoch": 2, "verbose": 0}
    history = model.fit(
        data.repeat(), validation_data=data, validation_freq=2, **by_class, **options
    )
    assert (len(history.history["loss"]), len(history.history["val_loss"])) == (3, 2)
    with pytest.raises(ValueError, match="validation_split") as error:
        model.fit(data, validation_split=0.5, verbose=0)
    assert "\n" not in str(error.value)
    outputs = model.predict_on_batch(batch[0])
    return [*logs, history.history], [outputs, *model.get_weights()]


@pytest.mark.parametrize(
    ("make", "is_dealt", "run_eagerly"),
    [
        (keras.distribution.DataParallel, True, False),
        (lambda: distribution(1, {".*up/kernel": (None, "batch")}), True, True),
        (lambda: distribution(SIZE, {".*up/kernel": (None, "model")}), False, True),
    ],
    ids=["data", "batch", "model"],
)
def test_methods_of_single_batches_and_arguments_of_fit(make, is_dealt, run_eagerly):
    everything = slice(None)
    expected_logs, expected = call_all_methods(everything, run_eagerly=True)
    part = BATCH // SIZE
    own = slice(hvd.rank() * part, (hvd.rank() + 1) * part)
    with make().scope():
        logs, found = call_all_methods(
            own if is_dealt else everything, run_eagerly=run_eagerly
        )
    for one, other in zip(logs, expected_logs, strict=True):
        assert set(one) == set(other)
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=1e-5, err_msg=name)
    assert difference(found, expected) < 1e-12


class Relayout(keras.layers.Layer):
    """A layer of a script for JAX."""

    def __init__(self, layout, **options):
        super().__init__(**options)
        self.layout = layout

    def call(self, inputs):
        return keras.distribution.distribute_tensor(inputs, self.layout)


def test_layouts_of_activations_are_named_once(recwarn):
    parallel = distribution(SIZE, {".*up/output": (None, "model")})
    layout = keras.distribution.TensorLayout((None, "model"), parallel.device_mesh)
    with parallel.scope():
        up = keras.layers.Dense(4, name="up")
        model = keras.Sequential([up, Relayout(layout, name="relayout")])
        for _ in range(2):
            model(np.ones((2, 3), "float32"))
    texts = [str(w.message) for w in recwarn if "no effect" in str(w.message)]
    assert len(texts) == (2 if hvd.rank() == 0 and SIZE > 1 else 0)
    for text in texts:
        by_rule = "by the layout map for " in text and "up/output'" in text
        assert by_rule or "distribute_tensor in 'sequential" in text
