"""A pipeline of stages, against the dense model in one process."""

import gc
import weakref
from functools import partial

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import parallel
from hvdtrain.checkpoint.names import without_numbers
from hvdtrain.keras.replication import get_hook

ranks, four_ranks = pytest.mark.ranks, pytest.mark.four_ranks
RANK, SIZE = hvd.rank(), hvd.size()
INPUTS, HIDDEN, OUTPUTS, BATCH, STEPS, MICROBATCHES = 13, 17, 3, 7, 10, 3
STAGES = {2: ["third"], 3: [3, 4, 1]}


@pytest.fixture(scope="module")
def mesh():
    """Of four ranks, two pipelines of two."""
    made = parallel.Mesh(pipeline=2 if SIZE == 4 else SIZE)
    yield made
    made.remove()


class Penalty(keras.layers.Layer):
    """Adds a loss that is a mean over the samples."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.cast(x, "float32") ** 2))
        return x


def dense_model(**options):
    keras.utils.set_random_seed(3)
    layers = keras.layers
    x = inputs = keras.Input((INPUTS,))
    x = layers.Dense(HIDDEN, "tanh", name="first", kernel_regularizer="l2")(x)
    x = Penalty()(layers.Dense(HIDDEN, "relu", name="second", bias_regularizer="l1")(x))
    x = layers.Dropout(options.get("dropout", 0.0), seed=5)(x)
    x = layers.Dense(HIDDEN, "gelu", name="third", kernel_regularizer="l2")(x)
    x = x + layers.LayerNormalization(name="norm")(x)
    x = layers.Dense(OUTPUTS, "softmax", name="last")(x)
    return keras.Model(inputs, x)


def pipeline(mesh, schedule="1f1b", **options):
    return parallel.PipelineModel(
        partial(dense_model, **options),
        STAGES[mesh.pipeline.size],
        microbatches=MICROBATCHES,
        schedule=schedule,
        mesh=mesh,
    )


def samples(count):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(count, INPUTS)).astype("float32")
    weight = rng.uniform(size=count).astype("float32")
    return x, rng.integers(0, OUTPUTS, count), weight


def optimizer_of(schedule):
    if schedule == "adafactor":
        return keras.optimizers.Adafactor(0.02)
    if schedule == "gpipe":
        return keras.optimizers.Adam(0.02)
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.2)


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("gpipe", marks=pytest.mark.release),
        pytest.param("1f1b", marks=[ranks, four_ranks]),
    ],
)
def test_fit_equals_the_dense_model_with_the_big_batch(mesh, schedule):
    replicas = mesh.data.size
    # The last batch has fewer samples than there are micro-batches.
    x, y, weight = samples(((STEPS - 1) * BATCH + 2) * replicas)
    options = {"sample_weight": weight}
    if schedule == "1f1b":
        validation = {"validation_data": (x[:BATCH], y[:BATCH])}
        options = {"class_weight": {0: 1.0, 1: 0.5, 2: 2.0}, **validation}
    dense = dense_model()
    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    dense.compile(optimizer_of(schedule), oracle.LOSS, **metrics)
    history, weights = oracle.fit_on_one_process(
        lambda: dense, x, y, BATCH * replicas, **options
    )
    dense.set_weights(weights)
    model = pipeline(mesh, schedule)
    optimizer = hvd.DistributedOptimizer(optimizer_of(schedule), mesh=mesh)
    model.compile(optimizer, oracle.LOSS, **metrics)
    mine = slice(mesh.data.index, None, replicas)
    if "sample_weight" in options:
        options["sample_weight"] = weight[mine]
    found = oracle.fit(
        *(model, x[mine], y[mine], BATCH),
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ],
        **options,
    )
    assert found.history.keys() == history.keys()
    for key, values in history.items():
        np.testing.assert_allclose(found.history[key], values, rtol=1e-5, err_msg=key)
    oracle.assert_bitwise_equal_over_ranks(list(found.history.values()))
    assert_stage_of(model, dense)
    outputs = model.predict(x[:BATCH], verbose=0)
    np.testing.assert_allclose(outputs, dense(x[:BATCH]), atol=2e-6)


def transformer(attention=None, column=None, row=None):
    keras.utils.set_random_seed(3)
    layers = keras.layers
    attention = attention or layers.MultiHeadAttention
    column, row = column or layers.Dense, row or layers.Dense
    x = inputs = keras.Input((5, INPUTS))
    x = layers.LayerNormalization()(x + attention(3, 4)(x, x))
    x = layers.GlobalAveragePooling1D()(x)
    x = column(HIDDEN, "gelu", kernel_regularizer="l2")(x)
    x = row(OUTPUTS, name="logits")(x)
    return keras.Model(inputs, layers.Softmax()(x))


@pytest.mark.long
@four_ranks
def test_stages_of_divided_layers_equal_the_dense_model():
    x, y, _ = samples(5 * 2 * BATCH)
    x, y = x.reshape(-1, 5, INPUTS), y[::5]
    mesh = parallel.Mesh(model=2, pipeline=SIZE // 2)
    with mesh:
        layers = {
            "attention": parallel.ParallelMultiHeadAttention,
            "column": partial(parallel.ColumnParallelDense, gather_output=False),
            "row": partial(parallel.RowParallelDense, input_is_parallel=True),
        }
        # The stages pass on the parts between the column and the row parallel layer.
        stages = ["logits"] if mesh.pipeline.size == 2 else None
        model = parallel.PipelineModel(transformer(**layers), stages, microbatches=3)
    dense = transformer()
    dense.compile(optimizer_of("1f1b"), oracle.LOSS, metrics=["accuracy"])
    optimizer = hvd.DistributedOptimizer(optimizer_of("1f1b"), mesh=mesh)
    model.compile(optimizer, oracle.LOSS, metrics=["accuracy"])
    history, _ = oracle.fit_on_one_process(lambda: dense, x, y, BATCH)
    check = hvd.callbacks.ConsistencyCheckCallback()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    found = oracle.fit(model, x, y, BATCH, callbacks=[broadcast, check])
    for key, values in history.items():
        np.testing.assert_allclose(found.history[key], values, rtol=1e-5, err_msg=key)
    # Keras empties the config of a functional model that it makes.
    model.gather_full()
    saved = model.gather_full()
    if RANK == 0:
        oracle.assert_same_state(saved, dense, atol=2e-6)
    mesh.remove()


@four_ranks
def test_a_last_stage_of_divided_logits():
    x, y, _ = samples(2 * BATCH)
    mesh = parallel.Mesh(model=2, pipeline=SIZE // 2)

    def classifier(logits=keras.layers.Dense, **options):
        keras.utils.set_random_seed(3)
        hidden = keras.layers.Dense(HIDDEN, "tanh")
        return keras.Sequential(
            [keras.Input((INPUTS,)), hidden, logits(OUTPUTS, **options)]
        )

    dense = classifier()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    dense.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    with mesh:
        divided = classifier(parallel.ColumnParallelDense, gather_output=False)
        model = parallel.PipelineModel(divided, microbatches=2)
        with pytest.raises(ValueError, match="model returns this rank's shard"):
            model.compile(keras.optimizers.SGD(0.1), loss)
        model.compile(
            keras.optimizers.SGD(0.1),
            parallel.ParallelSparseCategoricalCrossentropy(from_logits=True),
            metrics=[parallel.ParallelSparseCategoricalAccuracy("accuracy")],
        )
    history, _ = oracle.fit_on_one_process(lambda: dense, x, y, BATCH)
    found = oracle.fit(model, x, y, BATCH).history
    for key, values in history.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-5, err_msg=key)
    mesh.remove()


def assert_stage_of(model, dense):
    described = model.full_variables(model.weights)
    for weight, wanted in zip(described, dense.weights, strict=True):
        assert (weight.path, weight.shape) == (wanted.path, wanted.shape)
        if weight.variable is not None:
            np.testing.assert_allclose(weight.variable, wanted, atol=2e-6)
    held = [weight.variable for weight in described if weight.variable is not None]
    assert list(map(id, held)) == list(map(id, model.weights))


@ranks
@pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=pytest.mark.release), "1f1b"]
)
def test_a_step_is_bitwise_that_over_the_same_microbatches(mesh, schedule):
    x, y, _ = samples(BATCH)
    dense = dense_model(dropout=0.3)
    wanted = train_over_microbatches(dense, tf.constant(x), tf.constant(y))
    model = pipeline(mesh, schedule, dropout=0.3)
    # Not in a graph, in which TensorFlow would change the order of sums.
    model.compile(keras.optimizers.SGD(1.0), oracle.LOSS, run_eagerly=True)
    model.train_on_batch(x, y)
    described = model.full_variables(model.weights)
    for weight, value in zip(described, wanted, strict=True):
        if weight.variable is not None:
            np.testing.assert_array_equal(weight.variable, value)


def train_over_microbatches(model, x, y):
    """The weights after a step of SGD on the sum of the micro-batches' gradients."""
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    sizes, totals = [3, 2, 2], None
    for part, labels in zip(tf.split(x, sizes), tf.split(y, sizes), strict=True):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(part, training=True)) + sum(model.losses)
            loss *= len(part) / BATCH
        found = tape.gradient(loss, [w.value for w in model.weights])
        totals = found if totals is None else list(map(tf.add, totals, found))
    return [w - g for w, g in zip(model.weights, totals, strict=True)]


@pytest.mark.long
def test_mixed_precision_skips_a_step_on_all_stages(mesh):
    keras.config.set_dtype_policy("mixed_float16")
    x, y, _ = samples(BATCH)
    dense, model = dense_model(), pipeline(mesh)
    dense.compile("sgd", oracle.LOSS)
    model.compile(keras.optimizers.SGD(0.5, global_clipnorm=0.1), oracle.LOSS)
    # That of Keras is 2**15, at which these gradients overflow.
    model.optimizer.initial_scale = 128.0

    def norm_of_change(step):
        before = [weight.numpy() for weight in model.weights]
        step()
        changes = [w.numpy() - b for w, b in zip(model.weights, before, strict=True)]
        square = sum(float(np.sum(change**2)) for change in changes)
        return np.sqrt(sum(hvd.allgather_object(square, name="squares")))

    def train():
        loss = model.train_on_batch(x, y)
        np.testing.assert_allclose(loss, dense.test_on_batch(x, y), rtol=1e-3)

    def overflow_on_the_last_rank():
        value = np.inf if RANK == SIZE - 1 else 1.0
        model.optimizer.apply([tf.fill(w.shape, value) for w in model.weights])

    np.testing.assert_allclose(norm_of_change(train), 0.5 * 0.1, rtol=1e-3)
    assert norm_of_change(overflow_on_the_last_rank) == 0.0


def test_an_update_that_is_not_finite_is_left_out_on_all_stages(mesh):
    model = pipeline(mesh)
    model.compile(keras.optimizers.SGD(1.0), oracle.LOSS)
    count = get_hook(model.optimizer).skip_nonfinite()
    before = [weight.numpy() for weight in model.weights]
    value = np.inf if RANK == SIZE - 1 else 1.0
    gradients = [tf.fill(w.shape, value) for w in model.trainable_weights]
    model.optimizer.apply(gradients, model.trainable_variables)
    assert int(count) == 1
    for weight, wanted in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight, wanted)


def test_a_loss_that_is_no_mean_over_samples_is_refused(mesh):
    make = keras.losses.SparseCategoricalCrossentropy
    for loss, name in (
        (make(reduction="sum"), "reductions"),
        (make(ignore_class=-1), "ignore_class"),
    ):
        with pytest.raises(ValueError, match=name):
            pipeline(mesh).compile("sgd", loss)


def test_a_rank_has_the_variables_of_its_stage_alone(mesh):
    dense = dense_model()
    last = weakref.ref(dense.get_layer("last").kernel)
    count = len(dense.weights)
    model = parallel.PipelineModel(dense, STAGES[SIZE], mesh=mesh)
    model.compile("adam", oracle.LOSS)
    model.optimizer.build(model.trainable_variables)
    assert sum(hvd.allgather_object(len(model.weights), name="weights")) == count
    slots = 2 * len(model.weights)
    assert len(model.optimizer.variables) - slots < 5
    del dense
    gc.collect()
    assert last() is None


class Recorder(keras.layers.Layer):
    """Counts the micro-batches whose activations are kept when a step is executed."""

    events = []  # noqa: RUF012 - of the layer in the stage, which is made from a config

    def call(self, x):
        @tf.custom_gradient
        def recorded(x):
            def backward(upstream):
                return self._after(-1, upstream)

            return self._after(1, x), backward

        return recorded(x)

    def _after(self, change, tensor):
        def record(array):
            self.events.append(change)
            return array

        # TensorFlow would keep the order of stateful operations.
        same = tf.numpy_function(record, [tensor], tensor.dtype, stateful=False)
        return tf.ensure_shape(same, tensor.shape)


@ranks
@pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=pytest.mark.release), "1f1b"]
)
def test_a_stage_keeps_the_activations_of_few_microbatches(mesh, schedule):
    dense = keras.Sequential([keras.Input((1,))])
    for _ in range(SIZE):
        dense.add(keras.layers.Dense(1))
        dense.add(Recorder())
    model = parallel.PipelineModel(
        dense, [2] * SIZE, microbatches=6, schedule=schedule, mesh=mesh
    )
    model.compile("sgd", "mse")
    Recorder.events.clear()
    model.train_on_batch(np.ones((12, 1)), np.ones((12, 1)))
    assert len(Recorder.events) == 12
    kept = 6 if schedule == "gpipe" else SIZE - RANK
    assert max(np.cumsum(Recorder.events)) == kept


def test_different_samples_are_an_error_on_all_ranks(mesh):
    model = pipeline(mesh)
    model.compile("sgd", oracle.LOSS, run_eagerly=True)
    x, y, _ = samples(BATCH + RANK)
    with pytest.raises(tf.errors.InvalidArgumentError, match="different samples"):
        model.train_on_batch(x[-BATCH:], y[-BATCH:])


@pytest.mark.release
def test_the_stages_have_one_learning_rate(mesh):
    model = pipeline(mesh)
    optimizer = keras.optimizers.Nadam(0.1 + RANK)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, oracle.LOSS)
    check = hvd.callbacks.ConsistencyCheckCallback()
    x, y, _ = samples(BATCH)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    # Of a mesh with one replica, it does not change the rate.
    warmup = hvd.callbacks.LearningRateWarmupCallback(steps_per_epoch=1)
    oracle.fit(model, x, y, callbacks=[broadcast, check, warmup])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    model.optimizer.learning_rate = 0.1 + RANK
    with pytest.raises(hvd.callbacks.DesynchronizedError, match="learning_rate"):
        check.on_train_end()


def test_a_rank_of_a_pipeline_cannot_wait_for_the_others(mesh):
    model = pipeline(mesh)
    model.compile("sgd", oracle.LOSS)
    x, y, _ = samples(BATCH)
    with pytest.raises(ValueError, match="JoinCallback cannot be used with a model"):
        model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.JoinCallback()])


def optimizer_classes():
    base, wrappers = (
        keras.optimizers.Optimizer,
        {"LossScaleOptimizer", "MultiOptimizer"},
    )
    found = [each for each in vars(keras.optimizers).values() if isinstance(each, type)]
    return [
        each
        for each in found
        if issubclass(each, base) and each is not base and each.__name__ not in wrappers
    ]


@pytest.mark.long
def test_the_state_of_any_optimizer_is_in_the_order_of_the_full_model(mesh):
    """Checkpoints number it: they can be read without a mesh."""
    more = {keras.optimizers.Adam: {"amsgrad": True}}
    more[keras.optimizers.RMSprop] = {"momentum": 0.9, "centered": True}
    dense, model = dense_model(), pipeline(mesh)
    for each in optimizer_classes():
        options = {"use_ema": True, "gradient_accumulation_steps": 2}
        optimizer = each(**options, **more.get(each, {}))
        optimizer.build(dense.trainable_variables)
        model.compile(each(**options, **more.get(each, {})), oracle.LOSS)
        model.optimizer.build(model.trainable_variables)
        described = model.full_variables(model.optimizer.variables)
        found, expected = (
            [(without_numbers(v.path), tuple(v.shape)) for v in variables]
            for variables in (described, optimizer.variables)
        )
        assert found == expected, each


@pytest.mark.release
def test_factored_slots_belong_to_their_stage(mesh):
    x, y, _ = samples(3 * BATCH)
    dense, model = dense_model(), pipeline(mesh)
    for each in (dense, model):
        each.compile(keras.optimizers.Adafactor(0.02), oracle.LOSS)
    oracle.fit(dense, x, y, BATCH)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    check = hvd.callbacks.ConsistencyCheckCallback(1)
    oracle.fit(model, x, y, BATCH, callbacks=[broadcast, check])
    saved = model.gather_full()
    if RANK == 0:
        oracle.assert_same_state(saved, dense, atol=2e-6)


def nested_block():
    """A model whose weights have the paths of all other ones."""
    inputs = keras.Input((HIDDEN,))
    return keras.Model(inputs, keras.layers.Dense(HIDDEN, "tanh", name="ffn")(inputs))


@pytest.mark.release
@pytest.mark.parametrize(
    "block", [partial(keras.layers.Dense, HIDDEN, "tanh"), nested_block]
)
def test_a_file_does_not_depend_on_names_of_layers(mesh, tmp_path, block):
    def automatic():
        keras.utils.set_random_seed(3)
        blocks = [block() for _ in range(SIZE + 1)]
        return keras.Sequential([keras.Input((HIDDEN,)), *blocks])

    def compiled(model):
        # With the default epsilon, it amplifies the rounding of small gradients.
        model.compile(keras.optimizers.Adam(0.02, epsilon=1e-3, use_ema=True), "mse")
        return model

    if RANK == 0:
        automatic()  # The automatic names differ by rank.
    x = np.random.default_rng(7).normal(size=(3 * BATCH, HIDDEN)).astype("float32")
    sizes = [1] * (SIZE - 1) + [2]
    models = [
        compiled(parallel.PipelineModel(automatic(), sizes, mesh=mesh))
        for _ in range(2)
    ]
    names = hvd.allgather_object(automatic().layers[0].name, name="names")
    assert len(set(names)) > 1
    dense = compiled(automatic())
    oracle.fit(dense, x, x, BATCH)
    oracle.fit(models[0], x, x, BATCH)
    path = hvd.broadcast_object(str(tmp_path / "model.keras"), name="path")
    models[0].save(path)
    models[1].optimizer.build(models[1].trainable_variables)
    models[1].load_weights(path)
    saved = models[1].gather_full()
    if RANK == 0:
        oracle.assert_same_state(saved, dense, atol=2e-6)
        oracle.assert_same_state(keras.models.load_model(path), dense, atol=2e-6)
