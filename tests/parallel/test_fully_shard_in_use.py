"""Fully sharded models in loops, callbacks and files, and what is refused."""

import importlib
import math
import pathlib
import shutil
import tempfile
import warnings

import keras
import meshes
import numpy as np
import oracle
import pytest
import tensorflow as tf
import zoo
from stepping import (
    assert_close,
    build,
    compile_with,
    dealt,
    end,
    global_batches,
    in_steps,
    loss,
    train_one_process,
    train_plainly,
    values,
)

import hvdtrain.keras as hvd
from benchmarks.sent_bytes import count_bytes
from hvdtrain import parallel
from hvdtrain.collectives.dtypes import local_shard
from hvdtrain.keras.replication import get_hook
from hvdtrain.parallel.gathering import FullyShardedVariable, find_sharded
from hvdtrain.sharding.shards import assign_shard

RANK, SIZE = hvd.rank(), hvd.size()
FEW = {"min_size": 16}
LONG = pytest.mark.release


exact = pytest.mark.usefixtures("float64")


def adam(**options):
    return keras.optimizers.Adam(0.01, **options)


def sharded(make_model=zoo.dense, optimizer=None, is_eager=True, **options):
    """A compiled fully sharded model."""
    model = parallel.fully_shard(build(make_model), **{**FEW, **options})
    optimizer = hvd.DistributedOptimizer(optimizer or adam())
    return compile_with(model, optimizer, is_eager)


def part(make_model=zoo.dense):
    """This rank's samples of all steps."""
    return map(dealt, zoo.samples(make_model))


LOCAL_BATCH_SIZE = zoo.GLOBAL_BATCH_SIZE // SIZE


def fit(model, make_model=zoo.dense, **options):
    return oracle.fit(model, *part(make_model), LOCAL_BATCH_SIZE, **options)


@exact
@pytest.mark.parametrize("is_eager", [pytest.param(True, marks=LONG), False])
def test_fit_with_callbacks(is_eager):
    expected = train_one_process(zoo.tied, adam())
    model = sharded(zoo.tied, is_eager=is_eager)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    oracle.build_optimizer(model)
    fit(model, zoo.tied, callbacks=callbacks)
    assert_close(model, expected)
    # Weights are equal: another fit compares them.
    fit(model, zoo.tied, callbacks=callbacks)


@exact
def test_several_steps_in_one_execution():
    expected = train_one_process(zoo.dense, adam())
    model = parallel.fully_shard(build(zoo.dense), **FEW)
    optimizer = hvd.DistributedOptimizer(adam())
    model.compile(optimizer, loss(), steps_per_execution=3)
    oracle.build_optimizer(model)
    fit(model)
    assert_close(model, expected)


class Custom(keras.Model):
    """A user's own `train_step`."""

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            value = self.compute_loss(y=targets, y_pred=self(inputs, training=True))
        gradients = tape.gradient(value, self.trainable_variables)
        pairs = zip(gradients, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"loss": value}


def custom():
    model = zoo.dense()
    return Custom(model.inputs, model.outputs)


@exact
def test_a_train_step_of_a_user():
    expected = train_one_process(zoo.dense, adam())
    model = sharded(custom)
    fit(model)
    assert_close(model, expected)


def take_step(model, optimizer, tape, inputs, targets):
    with tape:
        value = loss()(targets, model(inputs, training=True))
    gradients = tape.gradient(value, model.trainable_variables)
    pairs = zip(gradients, model.trainable_variables, strict=True)
    optimizer.apply_gradients(pairs)


@exact
@pytest.mark.parametrize("is_eager", [True, False])
def test_a_loop_of_a_user(is_eager):
    expected = train_one_process(zoo.tied, adam())
    model = parallel.fully_shard(build(zoo.tied), **FEW)
    optimizer = hvd.DistributedOptimizer(adam())
    optimizer.build(model.trainable_variables)

    def step(inputs, targets):
        take_step(model, optimizer, tf.GradientTape(), inputs, targets)

    step = step if is_eager else tf.function(step)
    for batch in global_batches(zoo.tied):
        step(*map(tf.constant, dealt(batch)))
    assert_close(model, expected)


def test_a_plain_optimizer_is_refused():
    model = parallel.fully_shard(build(zoo.dense), **FEW)
    batch = dealt(global_batches(zoo.dense)[0])
    match = (
        r"^The optimizer 'adam.*' takes .* for a full weight, .*DistributedOptimizer"
    )
    with pytest.raises(ValueError, match=match):
        adam().build(model.trainable_variables)
    for is_distributed in (True, False):
        tape = tf.GradientTape()
        if is_distributed:
            tape = hvd.DistributedGradientTape(tape)
        with pytest.raises(ValueError, match=match):
            take_step(model, adam(), tape, *batch)
    compile_with(model, adam())
    with pytest.raises(ValueError, match=match):
        model.train_on_batch(*batch)
    with pytest.raises(ValueError, match="compiled with a plain optimizer"):
        fit(model)


def test_an_optimizer_that_was_built_is_refused():
    model = build(zoo.dense)
    optimizer = hvd.DistributedOptimizer(adam())
    optimizer.build(model.trainable_variables)
    parallel.fully_shard(model, **FEW)
    compile_with(model, optimizer)
    with pytest.raises(ValueError, match=r"after the weights are sharded"):
        fit(model)
    again = compile_with(build(zoo.dense), adam())
    oracle.build_optimizer(again)
    with pytest.raises(ValueError, match="fully_shard precedes the first step"):
        parallel.fully_shard(again, **FEW)


@exact
@pytest.mark.parametrize(
    "reshard_after_forward", [True, pytest.param(False, marks=LONG)]
)
def test_remat_after(reshard_after_forward):
    expected = train_one_process(zoo.remat_before, adam())

    model = build(zoo.remat_before)
    parallel.fully_shard(model, reshard_after_forward=reshard_after_forward, **FEW)
    for layer in model.layers:
        if isinstance(layer, keras.Sequential):
            parallel.remat(layer)
    compile_with(model, hvd.DistributedOptimizer(adam()), is_eager=False)
    fit(model)
    assert_close(model, expected)


@exact
@pytest.mark.parametrize("backward_passes", [2, pytest.param(3, marks=LONG)])
def test_backward_passes_per_step(backward_passes):
    optimizer = keras.optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=backward_passes
    )
    expected = train_one_process(zoo.dense, optimizer)
    model = parallel.fully_shard(build(zoo.dense), **FEW)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        backward_passes_per_step=backward_passes,
        average_aggregated_gradients=True,
    )
    fit(compile_with(model, optimizer))
    assert_close(model, expected)


@exact
def test_sums_over_samples():
    """With Sum, for losses that are sums over samples."""

    def compiled(model, optimizer):
        reduction = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="sum"
        )
        model.compile(optimizer, reduction, run_eagerly=True)
        return model

    dense = compiled(build(zoo.dense), keras.optimizers.SGD(0.01))
    train_plainly(dense, global_batches(zoo.dense))
    model = parallel.fully_shard(build(zoo.dense), **FEW)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), op=hvd.Sum)
    fit(compiled(model, optimizer))
    assert_close(model, values(dense))


@exact
@pytest.mark.parametrize("is_eager", [True, False])
def test_steps_that_are_not_finite_are_skipped(is_eager):
    """The last rank has NaN in the second step: all skip it."""
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    dense = compile_with(build(zoo.dense), sgd)
    batches = global_batches(zoo.dense)
    train_plainly(dense, [batches[0], batches[2]])
    model = sharded(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9), is_eager=is_eager
    )
    count = get_hook(model.optimizer).skip_nonfinite()
    for step, batch in enumerate(batches):
        inputs, targets = dealt(batch)
        if step == 1 and RANK == SIZE - 1:
            inputs = inputs * np.nan
        model.train_on_batch(inputs, targets)
    assert int(count) == 1
    assert_close(model, values(dense))


def scaled_sgd():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8.0
    )


def train_and_count_bytes(policy, **options):
    """Return a model after the steps, and the bytes that the last one has sent."""
    keras.config.set_dtype_policy(policy)
    model = sharded(optimizer=scaled_sgd(), **options)
    oracle.build_optimizer(model)
    *batches, last = map(dealt, global_batches(zoo.dense))
    for batch in batches:
        model.train_on_batch(*batch)
    with count_bytes() as counter:
        model.train_on_batch(*last)
    return model, counter.bytes


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("gathers", [pytest.param(1, marks=LONG), 2])
def test_mixed_precision(policy, gathers):
    """Weights are sent in the dtype of the computation, gradients in their own."""
    options = {"reshard_after_forward": gathers == 2}
    keras.config.set_dtype_policy(policy)
    expected = train_one_process(zoo.dense, scaled_sgd())
    model, sent = train_and_count_bytes(policy, **options)
    # Gradients are rounded to 8 or 11 bits.
    assert_close(model, expected, 4e-3 if policy == "mixed_bfloat16" else 5e-4)
    _, sent_in_float32 = train_and_count_bytes("float32", **options)
    stored = sum(v.sharding.sizes[RANK] for v in find_sharded(model.weights))
    assert sent_in_float32 - sent == gathers * (SIZE - 1) * stored * 2


@pytest.fixture(scope="module")
def directory():
    """A directory of all ranks."""
    path = tempfile.mkdtemp() if RANK == 0 else None
    path = hvd.broadcast_object(path, name="directory")
    yield pathlib.Path(path)
    if RANK == 0:
        shutil.rmtree(path)


def wait():
    hvd.allgather_object(None, name="wait")


def trained(make_model=zoo.tied, **options):
    model = sharded(make_model, **options)
    fit(model, make_model)
    return model


# Keras writes and reads classes by name.
CUSTOM = {cls.__name__: cls for cls in (zoo.ReversibleEmbedding, zoo.Residual)}


SAVED = [
    zoo.tied,
    *(pytest.param(m, marks=LONG) for m in (zoo.shared, zoo.residual, zoo.masked)),
]


@exact
@pytest.mark.parametrize("make_model", SAVED)
def test_a_saved_model_is_a_plain_one(make_model, directory):
    model = trained(make_model)
    inputs, _ = in_steps(zoo.samples(make_model), 0)
    path = directory / f"{make_model.__name__}.keras"
    model.save(path)
    wait()
    plain = keras.models.load_model(path, custom_objects=CUSTOM)
    assert_close(model, values(plain), 0)
    assert_close(plain, values(model), 0)
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0), plain.predict(inputs, verbose=0), atol=1e-14
    )
    # The plain model continues with the state of the optimizer.
    train_plainly(plain, global_batches(make_model))
    end(plain)
    fit(model, make_model)
    assert_close(model, values(plain))


@exact
def test_weights_are_saved_and_loaded(directory):
    model, again = trained(), sharded(zoo.tied)
    path = directory / "all.weights.h5"
    model.save_weights(path)
    wait()
    for loaded in (again, build(zoo.tied)):
        loaded.load_weights(path)
        assert_close(loaded, values(model), 0)
    assert_stores_shards(again)
    dense = build(zoo.tied)
    path = directory / f"{RANK}.weights.h5"
    dense.save_weights(path)
    again.load_weights(path)
    assert_close(again, values(dense), 0)


def assert_stores_shards(model):
    for variable in find_sharded(model.weights):
        assert tuple(variable._value.shape) == (variable.sharding.sizes[RANK],)


@exact
def test_the_state_of_the_optimizer_is_saved_and_loaded(directory):
    """Two steps, a file, and a third one, against three steps."""
    expected = train_one_process(zoo.tied, adam(use_ema=True, global_clipnorm=0.1))
    batches = list(map(dealt, global_batches(zoo.tied)))
    path = directory / "state.keras"
    model = sharded(zoo.tied, adam(use_ema=True, global_clipnorm=0.1))
    for batch in batches[:2]:
        model.train_on_batch(*batch)
    model.save(path)
    wait()
    again = sharded(zoo.tied, adam(use_ema=True, global_clipnorm=0.1))
    again.optimizer.build(again.trainable_variables)
    again.load_weights(path)
    again.train_on_batch(*batches[2])
    end(again)
    assert_close(again, expected)


@exact
def test_weights_are_read_and_assigned():
    model, dense = sharded(zoo.tied), build(zoo.tied)
    found = [2.0 * value for value in dense.get_weights()]
    model.set_weights(found)
    for value, wanted in zip(model.get_weights(), found, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert_stores_shards(model)
    inputs, targets = in_steps(zoo.samples(zoo.tied), 0)
    dense.set_weights(found)
    compile_with(dense, adam())
    np.testing.assert_allclose(
        model.evaluate(inputs, targets, verbose=0),
        dense.evaluate(inputs, targets, verbose=0),
        rtol=1e-12,
    )
    np.testing.assert_allclose(model(inputs), dense(inputs), atol=1e-14)


def test_each_rank_stores_its_share():
    inputs = keras.Input((32,))
    hidden = keras.layers.Dense(96, "relu")(inputs)
    model = parallel.fully_shard(keras.Model(inputs, keras.layers.Dense(64)(hidden)))
    optimizer = hvd.DistributedOptimizer(adam(use_ema=True))
    optimizer.build(model.trainable_variables)
    kernels, biases = 32 * 96 + 96 * 64, 96 + 64
    stored = sum(math.prod(local_shard(v).value.shape) for v in model.weights)
    # Cuts are at multiples of 16 elements.
    assert abs(stored - kernels / SIZE - biases) <= 32
    slots = sum(math.prod(v.shape) for v in optimizer.variables if v.shape.rank)
    assert abs(slots - 3 * (kernels / SIZE + biases)) <= 96
    assert model.count_params() == kernels + biases


def test_sharded_before_compile_or_after():
    for is_compiled in (True, False):
        model = build(zoo.dense)
        if is_compiled:
            compile_with(model, hvd.DistributedOptimizer(adam()))
            model.predict(zoo.VECTORS[:2], verbose=0)
        assert parallel.fully_shard(model, **FEW) is model
        if not is_compiled:
            compile_with(model, hvd.DistributedOptimizer(adam()))
        fit(model)
        assert model.predict(zoo.VECTORS[:2], verbose=0).shape == (2, zoo.CLASSES)


class Halving(keras.layers.Dense):
    """Assigns its kernel, and reads it afterwards."""

    def call(self, inputs):
        self.kernel.assign(0.5 * self.kernel)
        return super().call(inputs)


def halving():
    layer = Halving(zoo.CLASSES, kernel_initializer="ones")
    return keras.Sequential([keras.Input((zoo.FEATURES,)), layer])


def test_a_repeated_layer_reads_the_weight_that_it_has_assigned():
    model = parallel.fully_shard(halving(), min_size=1)
    outputs = model(np.ones([2, zoo.FEATURES], "float32"))
    np.testing.assert_array_equal(
        outputs, np.full([2, zoo.CLASSES], 0.5 * zoo.FEATURES)
    )
    np.testing.assert_array_equal(model.get_weights()[0], 0.5)


def test_a_layer_of_remat_with_the_weight_of_another_layer_is_refused():
    other = keras.layers.Dense(zoo.FEATURES)
    other.build([None, zoo.FEATURES])
    reading = keras.layers.Lambda(lambda x: x @ other.kernel)
    inputs = keras.Input((zoo.FEATURES,))
    model = keras.Model(inputs, parallel.remat(reading)(other(inputs)))
    parallel.fully_shard(model, min_size=1)
    with (
        pytest.raises(ValueError, match="cannot repeat the call of the Lambda"),
        tf.GradientTape(),
    ):
        model(np.ones([2, zoo.FEATURES], "float32"))


class Block(keras.layers.Layer):
    """A residual block, whose layers are built in the first call."""

    def __init__(self):
        super().__init__()
        self.up = keras.layers.Dense(9, "gelu")
        self.down = keras.layers.Dense(4, trainable=False)

    def build(self, _):
        self.scale = self.add_weight(shape=(1,))

    def call(self, x):
        return x + self.scale * self.down(self.up(x))


def make_by_call(inputs):
    """Build layers by a call, with seeds that differ by rank."""

    def make():
        keras.utils.set_random_seed(3 + RANK)
        model = keras.Sequential(
            [
                keras.layers.Embedding(23, 4),
                Block(),
                keras.layers.Dense(5, kernel_constraint="max_norm"),
            ]
        )
        model(inputs())
        return model

    return make


@pytest.mark.ranks
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize(
    "inputs",
    [lambda: np.zeros([2, 3], int), lambda: keras.Input([3], dtype="int32")],
    ids=["values", "symbolic"],
)
def test_weights_are_created_as_shards(monkeypatch, policy, inputs):
    keras.config.set_dtype_policy(policy)
    make = make_by_call(inputs)
    expected = parallel.fully_shard(make(), **FEW)
    held = []
    # The package has a function of this name.
    module = importlib.import_module("hvdtrain.parallel.fully_shard")
    shard = module.shard_variable

    def record(variable, *arguments, **options):
        shard(variable, *arguments, **options)
        held.append(variable.path)

    monkeypatch.setattr(module, "shard_variable", record)
    model = parallel.fully_shard(make, **FEW)
    assert len(held) == len(find_sharded(model.variables)) == 3
    for found, wanted in zip(model.variables, expected.variables, strict=True):
        assert type(found) is type(wanted)
        if isinstance(found, FullyShardedVariable):
            assert found.gathered_dtype == wanted.gathered_dtype
            assert local_shard(found).dtype == "float32"
            np.testing.assert_array_equal(local_shard(found), local_shard(wanted))
    for wrong in (lambda: "model", lambda: keras.Sequential(), "model", Block()):
        with pytest.raises(ValueError, match=r"^fully_shard takes a "):
            parallel.fully_shard(wrong)
    with pytest.raises(ValueError, match=r"same model and options. Received: .*rank 1"):
        parallel.fully_shard(make, min_size=RANK)


def test_ranks_get_the_weights_of_the_first():
    keras.utils.set_random_seed(RANK)
    model = zoo.dense()
    expected = hvd.broadcast_object(model.get_weights(), name="expected")
    parallel.fully_shard(model, min_size=1)
    assert_close(model, expected, 0)


def test_models_that_are_refused():
    sequential = keras.Sequential([keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"^fully_shard takes a model that is built"):
        parallel.fully_shard(sequential)
    model = sharded()
    with pytest.raises(ValueError, match=r"is fully sharded already"):
        parallel.fully_shard(model)
    inputs = keras.Input((4,), dtype="int32")
    table = parallel.ShardedEmbedding(32, 8)
    outputs = keras.layers.Flatten()(table(inputs))
    with pytest.raises(ValueError, match=r"Use keras.layers.Embedding in place"):
        parallel.fully_shard(keras.Model(inputs, outputs))


@pytest.mark.parametrize("name", ["Adafactor", "Lamb", "Muon"])
def test_optimizers_that_are_not_elementwise_are_refused(name):
    model = sharded(optimizer=getattr(keras.optimizers, name)(0.01))
    with pytest.raises(ValueError, match=f"^{name} computes the update of an element"):
        fit(model)


def test_callbacks_and_exports_are_refused(directory):
    model = sharded(optimizer=adam(use_ema=True))
    with pytest.raises(ValueError, match=r"^SwapEMAWeights exchanges weights"):
        fit(model, callbacks=[keras.callbacks.SwapEMAWeights()])
    with pytest.raises(ValueError, match=r"BackupAndRestore would delete"):
        fit(model, callbacks=[keras.callbacks.BackupAndRestore(directory / "backup")])
    with pytest.raises(ValueError, match=r"an export of it could only run"):
        model.export(directory / "export")
    with pytest.raises(ValueError, match=r"from its config, which makes full layers"):
        keras.models.clone_model(keras.Sequential([model]))


def test_a_call_on_one_rank_alone_is_refused():
    model = sharded()
    method = model.evaluate if RANK == 0 else model.predict
    with pytest.raises(RuntimeError, match=r"evaluate on rank 0 and model.predict"):
        method(zoo.VECTORS[:2], verbose=0)


class Noisy(keras.layers.Dense):
    """Adds random numbers without a seed of the layer."""

    def call(self, inputs):
        return super().call(inputs) + tf.random.normal(())


def test_a_call_that_cannot_be_repeated():
    """Its layer keeps its weights gathered."""

    def noisy():
        return keras.Sequential([keras.Input((zoo.FEATURES,)), Noisy(zoo.CLASSES)])

    match = r"cannot repeat .* Noisy .* Pass reshard_after_forward=False to fully_shard"
    with pytest.raises(ValueError, match=match):
        fit(sharded(noisy, is_eager=False, min_size=1))
    fit(sharded(noisy, is_eager=False, min_size=1, reshard_after_forward=False))


class Peeking(keras.Model):
    """A loss reads a weight outside of the call of its layer."""

    def compute_loss(self, *args, **kwargs):
        kernel = self.get_layer("first").kernel
        return super().compute_loss(*args, **kwargs) + keras.ops.mean(kernel**2)


def peeking():
    model = zoo.dense()
    return Peeking(model.inputs, model.outputs)


@exact
def test_a_weight_that_is_read_outside_of_calls_is_gathered():
    expected = train_one_process(peeking, adam())
    model = sharded(peeking)
    with warnings.catch_warnings(record=True) as found:
        # Pytest would show each repetition; Python shows the first one.
        warnings.simplefilter("default")
        fit(model)
    texts = [str(warning.message) for warning in found]
    texts = [text for text in texts if "outside of the call" in text]
    assert len(texts) == (RANK == 0)
    start = "first/kernel is read outside of the call of its layer"
    assert all(text.startswith(start) for text in texts)
    assert_close(model, expected)


@exact
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_layer_that_reads_a_weight_of_another_layer(reshard_after_forward):
    expected = train_one_process(zoo.tied_by_reference, adam())
    model = sharded(zoo.tied_by_reference, reshard_after_forward=reshard_after_forward)
    fit(model, zoo.tied_by_reference)
    assert_close(model, expected)


@exact
def test_lora_after_sharding():
    """The factors that are made then stay replicated."""

    def enable(model):
        for layer in model.layers:
            if isinstance(layer, keras.layers.Dense | keras.layers.Embedding):
                layer.enable_lora(2, a_initializer="ones", b_initializer="ones")
        return model

    dense = compile_with(enable(build(zoo.embedding)), keras.optimizers.SGD(0.1))
    train_plainly(dense, global_batches(zoo.embedding))
    model = enable(parallel.fully_shard(build(zoo.embedding), **FEW))
    compile_with(model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    fit(model, zoo.embedding)
    assert_close(model, values(dense), 5e-6)


@pytest.mark.four_ranks
@pytest.mark.skipif(SIZE != 4, reason="two groups of two ranks")
@exact
def test_beside_layers_on_a_mesh():
    """The axis data shards weights of Keras layers and of layers on the axis model."""

    def make(mesh=None):
        inputs = keras.Input((zoo.FEATURES,))
        if mesh:
            first = parallel.ColumnParallelDense(16, "tanh", gather_output=False)
            second = parallel.RowParallelDense(8, input_is_parallel=True)
        else:
            first, second = keras.layers.Dense(16, "tanh"), keras.layers.Dense(8)
        hidden = keras.layers.Dense(9, "tanh")(inputs)
        return zoo.classify(inputs, second(first(hidden)))

    mesh = parallel.Mesh(model=2)
    expected = train_one_process(make, adam())
    with mesh:
        model = build(lambda: make(mesh))
        for variable, full in zip(
            model.weights, build(make).get_weights(), strict=True
        ):
            assign_shard(variable, full)
        parallel.fully_shard(model, mesh=mesh, **FEW)
    compile_with(model, hvd.DistributedOptimizer(adam()))
    with pytest.raises(ValueError, match="Pass the mesh of the layers"):
        model.train_on_batch(*dealt(global_batches(zoo.dense)[0]))
    compile_with(model, hvd.DistributedOptimizer(adam(), mesh=mesh))
    for inputs, targets in global_batches(zoo.dense):
        mine = slice(mesh.data.index, None, mesh.data.size)
        model.train_on_batch(inputs[mine], targets[mine])
    for variable, wanted in zip(model.weights, expected, strict=True):
        is_full = local_shard(variable) is not variable
        wanted = wanted if is_full else meshes.slice_of(variable, wanted)
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=0, atol=1e-10)
    assert len(find_sharded(model.weights)) == 2
    mesh.remove()
