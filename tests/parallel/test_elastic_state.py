"""What an elastic job shares and takes back, without a launcher that changes it."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
from horovod.common.exceptions import HostsUpdatedInterrupt

import hvdtrain.keras as hvd


def train(model, steps=1):
    inputs, labels = oracle.samples(steps)
    for _ in range(steps):
        model.train_on_batch(inputs, labels)


def model_and_state(**objects):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [
            keras.Input((oracle.FEATURES,)),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(oracle.CLASSES, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.1), oracle.LOSS)
    return model, hvd.elastic.KerasState(model, **objects)


def values(variables):
    return [np.array(variable) for variable in variables]


def assert_equal(arrays, others):
    for mine, theirs in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_worker_that_has_not_trained_takes_rank_0s_state():
    model, state = model_and_state(epoch=10 * hvd.rank())
    if hvd.rank() == 0:
        train(model, steps=3)
    seeds = model.layers[0].seed_generator.state.numpy()
    shared = [*model.weights, *model.optimizer.variables]
    expected = hvd.broadcast_object(values(shared), name="expected")
    state.sync()
    assert_equal(values(shared), expected)
    assert int(model.optimizer.iterations) == 3
    assert state.epoch == 0
    # Ranks that shared the seed as well would drop the same units.
    np.testing.assert_array_equal(model.layers[0].seed_generator.state, seeds)


def test_restore_goes_back_to_the_last_commit():
    model, state = model_and_state(batch=0)
    train(model)
    state.batch = 1
    state.save()
    committed = values([*model.variables, *model.optimizer.variables])
    train(model, steps=2)
    state.batch = 3
    state.restore()
    assert state.batch == 1
    assert_equal(values([*model.variables, *model.optimizer.variables]), committed)


def test_a_new_rate_carries_the_momentum_along():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    state = hvd.elastic.KerasState(model)
    # The loss of x = 1, y = 1 is (w - 1)^2. Step 1: u = 2 * (0 - 1) = -2, w = 0.2.
    one = np.ones((1, 1), "float32")
    model.train_on_batch(one, one)
    (velocity,) = model.optimizer.momentums
    assert float(velocity[0, 0]) == pytest.approx(0.2)
    # As if half as many ranks had trained until now: the rate is 0.2 from here on.
    state._size = hvd.size() / 2
    state.reset()
    assert float(model.optimizer.learning_rate) == pytest.approx(0.2)
    # Step 2: u = 0.5 * -2 + 2 * (0.2 - 1) = -2.6, w = 0.2 + 0.2 * 2.6.
    model.train_on_batch(one, one)
    assert float(model.layers[0].kernel[0, 0]) == pytest.approx(0.72)
    # What was kept is of the new rate, too.
    state.restore()
    assert float(velocity[0, 0]) == pytest.approx(0.4)


def test_each_rank_keeps_what_is_its_own():
    keras.utils.set_random_seed(hvd.rank())
    model = oracle.build_model()
    local, shared = model.layers
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    model.compile(
        hvd.PartialDistributedOptimizer(optimizer, local_layers=local), oracle.LOSS
    )
    state = hvd.elastic.KerasState(model)
    local.kernel.assign(local.kernel + float(hvd.rank()))
    hvd.broadcast_variables(shared.variables, root_rank=0)
    inputs, labels = oracle.samples(steps=1)
    model.train_on_batch(oracle.shard(inputs), oracle.shard(labels))
    shared.kernel.assign(shared.kernel + float(hvd.rank()))
    own = [local.kernel, local.bias, *optimizer._accumulated_gradients]
    before = values(own)
    state.sync()
    assert_equal(values(own), before)
    oracle.assert_bitwise_equal_over_ranks(shared.get_weights())


def test_normalization_follows_its_variables():
    layer = keras.layers.Normalization()
    layer.adapt(10.0 * hvd.rank() + np.array([[2.0], [4.0]]))
    model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    state = hvd.elastic.KerasState(model)

    def normalized(x):
        return float(layer(np.array([[x]]))[0, 0])

    state.sync()
    # Of rank 0: mean 3, variance 1.
    assert normalized(5.0) == 2.0
    layer.adapt(np.array([[40.0], [60.0]]))
    assert normalized(60.0) == 1.0
    state.restore()
    assert normalized(5.0) == 2.0


class Leave(keras.callbacks.Callback):
    """Ends `fit` at a batch, as a change of hosts does."""

    def __init__(self, at_batch):
        super().__init__()
        self.at_batch = at_batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.at_batch:
            raise HostsUpdatedInterrupt(False)


def build_and_fit(**objects):
    """A model that has taken one step, its state, and a function that fits it."""
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), oracle.LOSS)
    state = hvd.elastic.KerasState(model, **objects)

    def fit(*callbacks, batches, **options):
        oracle.fit_shard(
            model, *oracle.samples(steps=batches), callbacks=callbacks, **options
        )

    fit(batches=1)
    return model, state, fit


def test_a_change_while_batches_are_passed_over_leaves_nothing_behind():
    model, state, fit = build_and_fit(batch=4)
    update = hvd.elastic.UpdateBatchStateCallback(state)
    with pytest.raises(HostsUpdatedInterrupt):
        fit(Leave(1), update, batches=6)
    assert state.batch == 4
    fit(update, batches=6, epochs=2)
    # Two batches of the epoch that continues, and six of the next.
    assert int(model.optimizer.iterations) == 1 + 2 + 6


def test_a_fit_without_the_callback_trains_after_a_change_while_passing_over():
    model, state, fit = build_and_fit(batch=4)
    with pytest.raises(HostsUpdatedInterrupt):
        fit(Leave(1), hvd.elastic.UpdateBatchStateCallback(state), batches=6)
    fit(batches=6)
    assert int(model.optimizer.iterations) == 1 + 6


@pytest.mark.parametrize(
    ("done", "batches", "remaining"),
    [
        # As when one rank becomes two: 5 of 6 batches are 2.5 of 3, rounded down.
        (5, 3, 1),
        pytest.param(3, 12, 6, marks=pytest.mark.release),
        # All are done: the last one is repeated, since an epoch needs a step.
        pytest.param(6, 3, 1, marks=pytest.mark.release),
    ],
)
def test_the_position_in_an_epoch_is_in_proportion_to_its_steps(
    done, batches, remaining
):
    model, state, fit = build_and_fit(batch=0)
    update = hvd.elastic.UpdateBatchStateCallback(state)
    with pytest.raises(HostsUpdatedInterrupt):
        fit(update, Leave(done - 1), batches=6)
    assert state.batch == done
    # As a worker that has arrived: its metrics have not been built.
    model.compile(model.optimizer, oracle.LOSS, metrics=["accuracy"])
    fit(hvd.elastic.UpdateBatchStateCallback(state), batches=batches)
    assert int(model.optimizer.iterations) == 1 + done + remaining


def test_a_position_inside_of_an_execution_repeats_its_first_batches():
    model, state, fit = build_and_fit(batch=0)
    model.compile(model.optimizer, oracle.LOSS, steps_per_execution=2)
    state.batch = 3
    fit(hvd.elastic.UpdateBatchStateCallback(state), batches=6)
    assert int(model.optimizer.iterations) == 1 + 4


def test_no_batch_is_done_before_the_first_step():
    # As in Horovod's documentation.
    model, state, fit = build_and_fit(batch=100)
    model.optimizer.variables[0].assign(0)
    with pytest.warns(UserWarning, match="Received: 100.*Pass batch=0"):
        fit(hvd.elastic.UpdateBatchStateCallback(state), batches=6)
    assert int(model.optimizer.iterations) == 6


def test_the_loss_scale_is_part_of_the_state():
    keras.config.set_dtype_policy("mixed_float16")
    model = oracle.build_model()
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(inner, oracle.LOSS)
    state = hvd.elastic.KerasState(model, inner)
    model.optimizer.dynamic_scale.assign(2.0)
    model.optimizer.step_counter.assign(5)
    state.save()
    model.optimizer.dynamic_scale.assign(4.0 + hvd.rank())
    model.optimizer.step_counter.assign(6)
    state.restore()
    assert float(model.optimizer.dynamic_scale) == 2.0
    assert int(model.optimizer.step_counter) == 5
    model.optimizer.dynamic_scale.assign(8.0 + hvd.rank())
    state.sync()
    assert float(model.optimizer.dynamic_scale) == 8.0


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_reset_callbacks_may_set_lr_as_horovods_examples_do(policy):
    keras.config.set_dtype_policy(policy)
    model, state = model_and_state()
    optimizer, count = model.optimizer, len(model.optimizer.variables)
    state.register_reset_callbacks([lambda: optimizer.lr.assign(0.25)])
    state.on_reset()
    assert float(optimizer.learning_rate) == 0.25
    tf.keras.backend.set_value(optimizer.lr, 0.5)
    assert float(optimizer.learning_rate) == 0.5
    assert len(optimizer.variables) == count


def test_the_state_by_horovods_other_name():
    model, _ = model_and_state()
    state = hvd.elastic.TensorFlowKerasState(model, model.optimizer, None, epoch=2)
    assert isinstance(state, hvd.elastic.KerasState)
    assert state.epoch == 2


def test_collectives_before_an_elastic_run_are_refused(monkeypatch):
    _, state = model_and_state()
    hvd.allreduce(1.0)
    run = hvd.elastic.run(lambda state: "done")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(RuntimeError, match="collectives were run before"):
        run(state)
    # One that a reset callback repeats is in step with a worker that joins.
    state.register_reset_callbacks([lambda: hvd.allreduce(1.0)])
    with pytest.warns(UserWarning, match="repeat them in a reset callback"):
        assert run(state) == "done"
