"""The distributed tape and local layers, against one process with the big batch."""

import copy

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

import hvdtrain.keras as hvd

SIZE = hvd.size()
INPUTS, LABELS = oracle.samples(steps=1)
MEAN_LOSS = keras.losses.SparseCategoricalCrossentropy()


def gradients_of(model, tape, inputs, labels, **arguments):
    with tape:
        loss = MEAN_LOSS(labels, model(inputs))
    return tape.gradient(loss, model.trainable_variables, **arguments)


def assert_close(gradients, expected):
    assert len(gradients) == len(expected)
    for gradient, value in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, value, rtol=1e-5, atol=1e-6)


def big_batch_gradients(model):
    return gradients_of(model, tf.GradientTape(), INPUTS, LABELS)


def shard():
    return oracle.shard(INPUTS), oracle.shard(LABELS)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"sparse_as_dense": True},
    ],
)
def test_gradients_are_those_of_the_big_batch(arguments):
    model = oracle.build_model()
    tape = hvd.DistributedGradientTape(tf.GradientTape(), **arguments)
    factor = SIZE if arguments.get("op") == hvd.Sum else 1
    expected = [factor * gradient for gradient in big_batch_gradients(model)]
    assert_close(gradients_of(model, tape, *shard()), expected)


def test_a_tape_that_is_wrapped_after_its_block():
    model = oracle.build_model()
    inputs, labels = shard()
    with tf.GradientTape() as tape:
        loss = MEAN_LOSS(labels, model(inputs))
    gradients = hvd.DistributedGradientTape(tape).gradient(
        loss, model.trainable_variables
    )
    assert_close(gradients, big_batch_gradients(model))


def test_a_single_source_and_a_nest_of_sources():
    x = tf.constant(1.0 + hvd.rank())
    mean = (SIZE + 1) / 2
    tape = hvd.DistributedGradientTape(tf.GradientTape(persistent=True))
    with tape:
        tape.watch(x)
        square = x * x
    assert float(tape.gradient(square, x)) == pytest.approx(2 * mean)
    nest = tape.gradient(square, {"a": x, "b": [x]})
    assert float(nest["b"][0]) == pytest.approx(2 * mean)


def test_unconnected_sources_stay_none_or_become_zeros():
    x, other = tf.Variable(2.0), tf.Variable([1.0, 1.0])
    tape = hvd.DistributedGradientTape(tf.GradientTape(persistent=True))
    with tape:
        square = x * x
    assert tape.gradient(square, [x, other])[1] is None
    zeros = tape.gradient(square, [x, other], unconnected_gradients="zero")[1]
    np.testing.assert_array_equal(zeros, [0.0, 0.0])


def test_two_tapes_in_one_function():
    a, b = tf.Variable([1.0]), tf.Variable([2.0, 3.0])
    scale = 1.0 + hvd.rank()

    @tf.function
    def step():
        with tf.GradientTape() as first, tf.GradientTape() as second:
            loss_a, loss_b = tf.reduce_sum(a * scale), tf.reduce_sum(b * b * scale)
        with tf.name_scope("one"):
            first_gradient = hvd.DistributedGradientTape(first).gradient(loss_a, [a])
        with tf.name_scope("two"):
            second_gradient = hvd.DistributedGradientTape(second).gradient(loss_b, [b])
        return first_gradient + second_gradient

    mean = (SIZE + 1) / 2
    for _ in range(3):
        assert_close(step(), [[mean], [4 * mean, 6 * mean]])


def test_autograph_converts_only_the_call_of_the_optimizer(monkeypatch):
    converted = []
    convert = api._convert_actual

    def record(entity, context):
        converted.append(f"{entity.__module__}.{entity.__qualname__}")
        return convert(entity, context)

    # TensorFlow has no public way to see what AutoGraph converts.
    monkeypatch.setattr(api, "_convert_actual", record)
    model = oracle.build_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())

    @tf.function
    def step(inputs, labels):
        tape = hvd.DistributedGradientTape(tf.GradientTape())
        gradients = gradients_of(model, tape, inputs, labels)
        optimizer.apply(gradients, model.trainable_variables)
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=model.layers)
        return (
            hvd.allreduce(gradients[0]),
            hvd.grouped_allreduce(gradients),
            hvd.allgather(labels),
            hvd.grouped_allgather([labels]),
            hvd.broadcast(labels, 0),
            hvd.alltoall(inputs[: hvd.size()]),
            hvd.reducescatter(inputs),
            hvd.grouped_reducescatter([inputs]),
        )

    step(*shard())
    assert [name for name in converted if name.startswith(__name__)]
    found = [name for name in converted if name.startswith("hvdtrain")]
    # It calls the method of the optimizer, which may be a user's own.
    assert found == ["hvdtrain.keras.hook.ReductionHook.apply"]


class SkipsNaN(keras.optimizers.SGD):
    """Has a branch that AutoGraph has to convert."""

    def apply(self, grads, trainable_variables=None):
        if tf.reduce_any(tf.math.is_nan(grads[0])):
            grads = [tf.zeros_like(gradient) for gradient in grads]
        return super().apply(grads, trainable_variables)


def test_autograph_converts_the_step_of_a_users_own_optimizer():
    optimizer = hvd.DistributedOptimizer(SkipsNaN(1.0))
    variable = keras.Variable(1.0)

    @tf.function
    def step(gradient):
        optimizer.apply([gradient], [variable])

    step(tf.constant(2.0))
    step(tf.constant(float("nan")))
    assert float(variable.value) == -1.0


@pytest.mark.ranks
def test_sparse_gradients():
    table = keras.Variable(np.ones((4, 2), "float32"))
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with tape:
        rows = tf.gather(table.value, [hvd.rank() % 4, 0])
        loss = tf.reduce_sum(rows)
    (gradient,) = tape.gradient(loss, [table.value])
    assert isinstance(gradient, tf.IndexedSlices)
    expected = np.zeros((4, 2))
    for rank in range(SIZE):
        expected[rank % 4] += 1 / SIZE
        expected[0] += 1 / SIZE
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-6)


@pytest.mark.skipif(SIZE < 2, reason="nothing is reduced")
@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
def test_a_sum_of_sums_is_an_error(wrap):
    model = oracle.build_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)

    @wrap
    def step(inputs, labels):
        tape = hvd.DistributedGradientTape(tf.GradientTape())
        gradients = gradients_of(model, tape, inputs, labels)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    with pytest.raises(ValueError, match="reduced over the ranks already"):
        step(*shard())


def test_jacobian_and_watched_variables_are_the_tapes_own():
    x = tf.Variable([1.0, 2.0])
    tape = hvd.DistributedGradientTape(tf.GradientTape(persistent=True))
    with tape:
        y = x * x * (1.0 + hvd.rank())
    assert tape.watched_variables()[0] is x
    expected = np.diag([2.0, 4.0]) * (1 + hvd.rank())
    np.testing.assert_allclose(tape.jacobian(y, x), expected)


@pytest.mark.parametrize("scale_local_gradients", [True, False])
def test_local_layers_keep_their_own_gradients(scale_local_gradients):
    model = oracle.build_model()
    local = gradients_of(model, tf.GradientTape(), *shard())
    tape = hvd.PartialDistributedGradientTape(
        tf.GradientTape(),
        local_layers=model.layers[0],
        scale_local_gradients=scale_local_gradients,
    )
    gradients = gradients_of(model, tape, *shard())
    divisor = SIZE if scale_local_gradients else 1
    assert_close(gradients[:2], [gradient / divisor for gradient in local[:2]])
    assert_close(gradients[2:], big_batch_gradients(model)[2:])


def test_local_and_global_gradients_apart():
    x, shared = tf.Variable(1.0), tf.Variable(2.0)
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    tape.register_local_source(x)
    with tape:
        loss = (x + shared) * (1.0 + hvd.rank())
    local, combined = tape.get_local_and_global_gradients(loss, [shared, x])
    assert [source is x for source, _ in local] == [True]
    assert float(local[0][1]) == pytest.approx((1 + hvd.rank()) / SIZE)
    assert combined[0][0] is shared
    assert float(combined[0][1]) == pytest.approx((SIZE + 1) / 2)


def test_partial_optimizer_under_fit():
    # SGD, one step: the new weights show the gradient that was applied.
    model = oracle.build_model()
    before = model.get_weights()
    local = gradients_of(model, tf.GradientTape(), *shard())
    shared = big_batch_gradients(model)
    model.compile(
        hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(1.0), local_layers=[model.layers[0]]
        ),
        oracle.LOSS,
    )
    oracle.fit_shard(model, INPUTS, LABELS)
    applied = [a - b for a, b in zip(before, model.get_weights(), strict=True)]
    assert_close(applied[:2], [gradient / SIZE for gradient in local[:2]])
    assert_close(applied[2:], shared[2:])


def test_local_layers_must_be_built_keras_layers():
    with pytest.raises(ValueError, match="has not been built"):
        hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(), local_layers=keras.layers.Dense(1)
        )
    with pytest.raises(ValueError, match="must be of type"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=["dense"])


def test_a_tape_is_wanted():
    with pytest.raises(TypeError, match="DistributedGradientTape takes"):
        hvd.DistributedGradientTape(None)


def test_a_copy_of_a_tape_is_a_tape():
    x = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        loss = x * (hvd.rank() + 1)
    copied = copy.copy(hvd.DistributedGradientTape(tape))
    assert float(copied.gradient(loss, x)) == (SIZE + 1) / 2
    with pytest.raises(AttributeError, match="_no_such"):
        _ = copied._no_such


@pytest.mark.four_ranks
@pytest.mark.skipif(
    not hvd.mpi_enabled() or SIZE not in (2, 4), reason="Adasum: MPI and 2^n ranks"
)
def test_adasum():
    # Orthogonal gradients add up, parallel ones are averaged (Maleki et al. 2020).
    direction = tf.one_hot(hvd.rank(), SIZE)
    x, y = tf.Variable(tf.zeros(SIZE)), tf.Variable([0.0, 0.0])
    tape = hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum)
    with tape:
        loss = tf.reduce_sum(x * direction) + tf.reduce_sum(y * [3.0, 4.0])
    assert_close(tape.gradient(loss, [x, y]), [np.ones(SIZE), [3.0, 4.0]])
