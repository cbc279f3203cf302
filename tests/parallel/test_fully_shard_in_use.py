"""Fully sharded models in loops, callbacks and files, and what is refused."""

import keras
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
    global_batches,
    loss,
    train_one_process,
    train_plainly,
    values,
)

import hvdtrain.keras as hvd
from benchmarks.sent_bytes import count_bytes
from hvdtrain import parallel
from hvdtrain.keras.replication import get_hook
from hvdtrain.parallel.gathering import find_sharded

RANK, SIZE = hvd.rank(), hvd.size()
FEW = {"min_size": 16}


@pytest.fixture
def _float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")


exact = pytest.mark.usefixtures("_float64")


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
@pytest.mark.parametrize("is_eager", [True, False])
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
    with pytest.raises(ValueError, match=r"build it after fully_shard"):
        fit(model)
    again = compile_with(build(zoo.dense), adam())
    oracle.build_optimizer(again)
    with pytest.raises(ValueError, match="fully_shard precedes the first step"):
        parallel.fully_shard(again, **FEW)


@exact
@pytest.mark.parametrize("reshard_after_forward", [True, False])
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
@pytest.mark.parametrize("backward_passes", [2, 3])
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
@pytest.mark.parametrize("gathers", [1, 2])
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
