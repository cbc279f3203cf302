"""Optimizers with local variables, against one process that holds all ranks' copies."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import parallel

RANK, SIZE = hvd.rank(), hvd.size()
STEPS = 4


def gradients_of(rank, step):
    """The gradients of the shared and of the local variable."""
    return [np.float32([1.0 + rank, step]), np.float32([3.0 * rank - 1.0])]


def step_on_ranks(options):
    shared, local = keras.Variable([1.0, 2.0]), keras.Variable([float(RANK)])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9, **options), scale_local_gradients=False
    )
    optimizer.register_local_var(local)
    optimizer.build([shared, local])
    for step in range(STEPS):
        optimizer.apply(map(tf.constant, gradients_of(RANK, step)), [shared, local])
    return shared.numpy(), local.numpy()


def step_on_one_process(options):
    """One optimizer of the shared variable and of every rank's local one."""
    shared = keras.Variable([1.0, 2.0])
    locals_ = [keras.Variable([float(rank)]) for rank in range(SIZE)]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **options)
    optimizer.build([shared, *locals_])
    for step in range(STEPS):
        pairs = [gradients_of(rank, step) for rank in range(SIZE)]
        mean = np.mean([pair[0] for pair in pairs], axis=0)
        optimizer.apply([mean, *(pair[1] for pair in pairs)], [shared, *locals_])
    return shared.numpy(), locals_[RANK].numpy()


@pytest.mark.parametrize(
    "options",
    [
        {"global_clipnorm": 0.01},
        {"clipnorm": 0.01},
        {"clipvalue": 0.01},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"gradient_accumulation_steps": 2, "global_clipnorm": 0.01},
    ],
    ids=lambda options: "_".join(options),
)
def test_local_variables_are_those_of_one_large_optimizer(options):
    shared, local = step_on_ranks(options)
    expected_shared, expected_local = step_on_one_process(options)
    np.testing.assert_allclose(shared, expected_shared, rtol=1e-6)
    np.testing.assert_allclose(local, expected_local, rtol=1e-6)
    oracle.assert_bitwise_equal_over_ranks([shared])


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
@pytest.mark.parametrize("missing", ["gradient", "variable"])
def test_a_rank_without_local_gradients_takes_part_in_the_norm(wrap, missing):
    shared, local = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, global_clipnorm=0.1), scale_local_gradients=False
    )
    has_local = RANK == 0 or missing == "gradient"
    if has_local:
        optimizer.register_local_var(local)
    variables = [shared, local] if has_local else [shared]
    optimizer.build(variables)
    gradients = [tf.constant([3.0]), tf.constant([4.0]) if RANK == 0 else None]

    @wrap
    def step():
        optimizer.apply(gradients[: len(variables)], variables)

    step()
    # The norm of (3, 4) is 5; it is clipped to 0.1.
    assert float(shared[0]) == pytest.approx(1.0 - 3.0 * 0.1 / 5.0)
    assert float(local[0]) == pytest.approx(1.0 - (RANK == 0) * 4.0 * 0.1 / 5.0)


def test_a_global_norm_counts_sharded_tables_and_local_variables():
    table = parallel.ShardedEmbedding(SIZE, 1)
    table.build()
    # What its ranks add up; their mean is 3.
    slice_ = tf.constant([[3.0 * SIZE]])
    shared, local = keras.Variable([0.0]), keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, global_clipnorm=0.1), scale_local_gradients=False
    )
    optimizer.register_local_var(local)
    gradients = [slice_, tf.constant([4.0]), tf.constant([10.0 * RANK])]
    optimizer.apply(gradients, [table.embeddings, shared, local])
    norm = np.sqrt(4.0**2 + sum(3.0**2 + (10.0 * rank) ** 2 for rank in range(SIZE)))
    np.testing.assert_allclose(shared, [-4.0 * 0.1 / norm], rtol=1e-6)
    np.testing.assert_allclose(local, [-10.0 * RANK * 0.1 / norm], rtol=1e-6)
    oracle.assert_bitwise_equal_over_ranks([shared])


def test_a_global_norm_of_local_variables_and_a_sharded_model_is_refused():
    mesh = parallel.Mesh(model=SIZE)
    optimizer = keras.optimizers.SGD(1.0, global_clipnorm=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, mesh=mesh)
    local = keras.Variable([0.0])
    optimizer.register_local_var(local)
    with pytest.raises(ValueError, match="Use clipnorm or clipvalue"):
        optimizer.apply([tf.constant([1.0])], [local])
    mesh.remove()
