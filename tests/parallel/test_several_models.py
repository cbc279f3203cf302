"""Several models in one step: their tensors must not be taken for each other's."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd

RANK, SIZE = hvd.rank(), hvd.size()
SHAPE = (64, 64)
MEAN = (SIZE + 1) / 2


def filled(value):
    return keras.Variable(np.full(SHAPE, value, "float32"))


def late(value, factor):
    """`value`, after work that takes longer on rank 0 for 1, on the others for 100."""
    steps = 30 if (factor == 1) == (RANK == 0) else 1
    work = tf.while_loop(
        lambda i, x: i < steps, lambda i, x: (i + 1, x @ x), (0, tf.eye(64))
    )
    return value * work[1][0, 0]


def apply(optimizer, variable, factor):
    gradient = tf.fill(SHAPE, factor * (1.0 + RANK))
    optimizer.apply_gradients([(late(gradient, factor), variable)])


@pytest.mark.parametrize(
    ("wrap", "passes"),
    [
        pytest.param(lambda step: step, 1, marks=pytest.mark.long),
        (tf.function, 1),
        (tf.function, 2),
    ],
)
def test_two_optimizers_of_one_class(wrap, passes):
    first, second = filled(0.0), filled(0.0)
    optimizers = [
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0),
            backward_passes_per_step=passes,
            average_aggregated_gradients=True,
        )
        for _ in range(2)
    ]
    for optimizer, variable in zip(optimizers, (first, second), strict=True):
        optimizer.build([variable])
    apply_first = wrap(lambda: apply(optimizers[0], first, 1.0))
    apply_second = wrap(lambda: apply(optimizers[1], second, 100.0))

    @tf.function
    def step():
        apply_first()
        apply_second()

    for _ in range(passes):
        step()
    np.testing.assert_allclose(first, np.full(SHAPE, -MEAN), rtol=1e-6)
    np.testing.assert_allclose(second, np.full(SHAPE, -100 * MEAN), rtol=1e-6)


def test_two_functions_with_a_tape_each():
    def gradient_function(factor):
        @tf.function
        def gradient():
            x = tf.ones(SHAPE)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(x) * late(factor * (1.0 + RANK), factor)
            return hvd.DistributedGradientTape(tape).gradient(loss, x)

        return gradient

    of_first, of_second = gradient_function(1.0), gradient_function(100.0)

    @tf.function
    def step():
        return of_first(), of_second()

    first, second = step()
    np.testing.assert_allclose(first, np.full(SHAPE, MEAN), rtol=1e-6)
    np.testing.assert_allclose(second, np.full(SHAPE, 100 * MEAN), rtol=1e-6)


def test_two_broadcasts_of_variables_in_one_function():
    first, second = filled(1.0 + 10 * RANK), filled(2.0 + 10 * RANK)

    @tf.function
    def step():
        first.assign(late(first.value, 1))
        second.assign(late(second.value, 100))
        hvd.broadcast_variables([first], root_rank=0)
        hvd.broadcast_variables([second], root_rank=0)

    step()
    np.testing.assert_array_equal(first, np.full(SHAPE, 1.0))
    np.testing.assert_array_equal(second, np.full(SHAPE, 2.0))


def test_a_function_that_one_rank_traces_again():
    @tf.function
    def mean_of(batch):
        return hvd.allreduce(tf.reduce_sum(batch))

    @tf.function
    def step(first, second):
        return mean_of(first), mean_of(second)

    rows = 5 if RANK == 0 else 8  # of the last batch
    first, second = step(tf.ones([8]), tf.ones([rows]))
    assert float(first) == 8
    assert float(second) == pytest.approx(8 - 3 / SIZE)


@pytest.mark.ranks
def test_branches_that_ranks_do_not_share():
    @tf.function
    def step(x, is_first):
        if is_first:
            return hvd.allreduce(x, name="loss")
        return hvd.allreduce(x * 10, name="loss")

    factors = [1.0 if rank == 0 else 10.0 for rank in range(SIZE)]
    mean = float(step(tf.constant(1.0), tf.constant(RANK == 0)))
    assert mean == pytest.approx(np.mean(factors))


def test_one_function_twice_and_a_loop():
    @tf.function
    def total(x):
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def step(x):
        twice = total(late(x, 1.0)), total(late(x * 100, 100.0))
        squares = tf.TensorArray(tf.float32, size=5)
        for i in tf.range(5):
            square = tf.cast(i * i, tf.float32)
            squares = squares.write(i, hvd.allreduce(x * square, op=hvd.Sum))
        return *twice, squares.stack()

    small, large, squares = step(tf.constant(1.0))
    assert (float(small), float(large)) == (SIZE, 100 * SIZE)
    np.testing.assert_allclose(squares, SIZE * np.arange(5) ** 2)


@pytest.mark.ranks
@pytest.mark.skipif(SIZE < 2, reason="ranks that differ")
def test_ranks_with_different_local_variables():
    variables = [keras.Variable(np.zeros(3)) for _ in range(2 + min(RANK, 1) + 1)]
    shared, local = variables[-2:], variables[:-2]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for variable in local:
        optimizer.register_local_var(variable)
    gradient = tf.fill([3], 1.0 + RANK)
    optimizer.apply_gradients([(gradient, variable) for variable in variables])
    for variable in shared:
        np.testing.assert_allclose(variable, np.full(3, -MEAN), rtol=1e-6)
    for variable in local:
        expected = np.full(3, -(1.0 + RANK) / SIZE)
        np.testing.assert_allclose(variable, expected, rtol=1e-6)


@pytest.mark.skipif(SIZE < 2, reason="ranks that differ")
@pytest.mark.parametrize("clip", [None, 1.0])
def test_gradients_of_different_variables_are_not_mixed(clip):
    variables = [keras.Variable(np.zeros(3)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, clipnorm=clip))
    gradients = [None, None]
    gradients[min(RANK, 1)] = tf.ones(3)
    with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched"):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))


@pytest.mark.skipif(SIZE < 2, reason="ranks that differ")
@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_gradient_that_only_one_rank_lacks_is_an_error(grouped, wrap):
    variables = [keras.Variable(np.zeros(3, "float32")) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        groups=[variables[:1], variables[1:]] if grouped else None,
    )
    optimizer.build(variables)
    gradients = [None if RANK == 0 else tf.ones(3), tf.ones(3), tf.ones(3)]
    step = wrap(
        lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True))
    )
    with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched"):
        step()


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_a_gradient_that_all_ranks_lack_stays_none(compression):
    variables = [keras.Variable(np.zeros(3, "float32")) for _ in range(3)]
    with hvd.DistributedGradientTape(
        tf.GradientTape(), compression=getattr(hvd.Compression, compression)
    ) as tape:
        loss = tf.reduce_sum(variables[1].value * (1.0 + RANK))
    first, second, third = tape.gradient(loss, variables)
    assert first is None
    assert third is None
    np.testing.assert_allclose(second, np.full(3, MEAN), rtol=1e-2)


class Pair(keras.Model):
    """Two networks and two optimizers, and no call: how GANs are written."""

    def __init__(self, optimizers):
        super().__init__()
        self.networks = [oracle.build_model() for _ in range(2)]
        self.optimizers = optimizers

    def train_step(self, data):
        inputs, labels = data
        for network, optimizer in zip(self.networks, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                outputs = network(inputs)
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(labels, outputs)
                )
            gradients = tape.gradient(loss, network.trainable_variables)
            optimizer.apply(gradients, network.trainable_variables)
        return {"loss": loss}


def train_pair(optimizers, inputs, labels, batch_size, callbacks=()):
    pair = Pair(optimizers)
    pair.compile()
    oracle.fit(pair, inputs, labels, batch_size, callbacks=callbacks)
    return pair.get_weights()


@pytest.mark.long
def test_a_model_without_call_equals_the_big_batch():
    inputs, labels = oracle.samples(steps=5)

    def optimizers():
        return [keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)]

    expected = oracle.on_one_process(
        lambda: train_pair(optimizers(), inputs, labels, oracle.LOCAL_BATCH_SIZE * SIZE)
    )
    weights = train_pair(
        [hvd.DistributedOptimizer(optimizer) for optimizer in optimizers()],
        oracle.shard(inputs),
        oracle.shard(labels),
        oracle.LOCAL_BATCH_SIZE,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.ConsistencyCheckCallback(2),
        ],
    )
    assert oracle.difference(weights, expected) < 1e-6
    oracle.assert_bitwise_equal_over_ranks(weights)


def test_a_model_without_call_whose_layers_are_not_built():
    pair = Pair([keras.optimizers.SGD()])
    pair.networks = [keras.Sequential([keras.layers.Dense(2)], name="late")]
    pair.compile()
    inputs, labels = oracle.samples(steps=1)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(ValueError, match="Build its layers before fit: late"):
        pair.fit(inputs, labels, verbose=0, callbacks=[broadcast])
