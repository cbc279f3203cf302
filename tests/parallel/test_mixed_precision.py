"""Under mixed_float16 all ranks skip a step together, or none does."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd

OVERFLOWING_STEP = 5


def fit(optimizer, callbacks=(), *, overflows=True, **compile_args):
    model = oracle.build_model()
    model.compile(optimizer, oracle.LOSS, **compile_args)
    train(model, callbacks, overflows=overflows)
    return model


def train(model, callbacks, *, overflows):
    inputs, labels = (oracle.shard(array) for array in oracle.samples())
    # Small enough that nothing overflows by itself at Keras' first scale, 2**15.
    inputs = 0.1 * inputs
    if overflows and hvd.rank() == hvd.size() - 1:
        inputs[OVERFLOWING_STEP * oracle.LOCAL_BATCH_SIZE] = 1e30
    oracle.fit(model, inputs, labels, callbacks=list(callbacks))


def check_one_more_step_was_skipped_by_all(model, smooth_model):
    """Compared with a training without overflow."""
    scale, smooth = model.optimizer, smooth_model.optimizer
    assert float(smooth.dynamic_scale) == 2.0**15
    assert float(scale.dynamic_scale) == 2.0**14
    steps, smooth_steps = (
        int(optimizer.inner_optimizer._iterations) for optimizer in (scale, smooth)
    )
    assert steps == smooth_steps - 1
    check_ranks_agree(model)


def check_ranks_agree(model):
    # Not the optimizer's accumulated gradients: they are each rank's own.
    scale = model.optimizer
    state = [v.numpy() for v in (*model.weights, scale.dynamic_scale)]
    assert all(np.isfinite(array).all() for array in state)
    oracle.assert_bitwise_equal_over_ranks(state)


@pytest.mark.parametrize(
    ("accumulation", "steps_per_execution"),
    [pytest.param(None, 1, marks=pytest.mark.release), (2, 4)],
)
def test_scale_made_by_compile(accumulation, steps_per_execution):
    keras.config.set_dtype_policy("mixed_float16")
    models = [
        fit(
            hvd.DistributedOptimizer(
                keras.optimizers.Adam(0.01, gradient_accumulation_steps=accumulation)
            ),
            [hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
            overflows=overflows,
            steps_per_execution=steps_per_execution,
        )
        for overflows in (True, False)
    ]
    check_one_more_step_was_skipped_by_all(*models)


@pytest.mark.release
def test_scale_made_by_the_user():
    keras.config.set_dtype_policy("mixed_float16")

    def optimizer():
        inner = keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0)
        return hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner))

    models = [fit(optimizer(), overflows=overflows) for overflows in (True, False)]
    check_one_more_step_was_skipped_by_all(*models)


def test_an_elastic_state_settles_the_scale():
    keras.config.set_dtype_policy("mixed_float16")
    models = []
    for overflows in (True, False):
        model = oracle.build_model()
        optimizer = keras.optimizers.SGD(0.01)
        model.compile(hvd.DistributedOptimizer(optimizer), oracle.LOSS)
        hvd.elastic.KerasState(model)
        train(model, [], overflows=overflows)
        models.append(model)
    check_one_more_step_was_skipped_by_all(*models)


def test_a_local_finite_check_is_refused_with_a_remedy():
    keras.config.set_dtype_policy("mixed_float16")
    with pytest.raises(ValueError, match="BroadcastGlobalVariablesCallback"):
        fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))


def test_a_model_that_is_compiled_again():
    """compile() then puts a new scale around the same optimizer."""
    keras.config.set_dtype_policy("mixed_float16")
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model = fit(optimizer, [start], overflows=False)
    model.compile(optimizer, oracle.LOSS)
    train(model, [start], overflows=True)
    assert model.optimizer.inner_optimizer is optimizer
    check_ranks_agree(model)


def test_a_scale_that_another_compile_made_is_refused_too():
    keras.config.set_dtype_policy("mixed_float16")
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model = fit(optimizer, [start], overflows=False)
    model.compile(optimizer, oracle.LOSS)
    with pytest.raises(ValueError, match="BroadcastGlobalVariablesCallback"):
        train(model, [], overflows=False)


def test_an_eager_local_finite_check_is_refused_too():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    scale = keras.optimizers.LossScaleOptimizer(optimizer)
    variable = keras.Variable([0.0])
    with pytest.raises(ValueError, match="LossScaleOptimizer that checks"):
        scale.apply([tf.constant([1.0])], [variable])
