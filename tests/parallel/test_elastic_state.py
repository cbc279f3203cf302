"""What an elastic job shares and takes back, without a launcher that changes it."""

import keras
import numpy as np
import oracle
import pytest
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


class Leave(keras.callbacks.Callback):
    """Ends `fit` at a batch, as a change of hosts does."""

    def __init__(self, at_batch):
        super().__init__()
        self.at_batch = at_batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.at_batch:
            raise HostsUpdatedInterrupt(False)


def test_a_change_while_batches_are_passed_over_leaves_nothing_behind():
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), oracle.LOSS)
    state = hvd.elastic.KerasState(model, batch=4)

    def fit(*callbacks, epochs):
        oracle.fit_shard(
            model,
            *oracle.samples(steps=6),
            epochs=epochs,
            callbacks=[*callbacks, hvd.elastic.UpdateBatchStateCallback(state)],
        )

    with pytest.raises(HostsUpdatedInterrupt):
        fit(Leave(1), epochs=1)
    assert state.batch == 4
    fit(epochs=2)
    # Two batches of the epoch that went on, and six of the next.
    assert int(model.optimizer.iterations) == 2 + 6
