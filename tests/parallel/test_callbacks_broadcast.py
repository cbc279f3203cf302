"""All ranks start from one state, before the first step."""

import copy
import functools
import gc
import pickle
import warnings

import horovod.tensorflow.keras as horovod_keras
import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.keras.callbacks import broadcast
from hvdtrain.keras.replication import non_local_variables
from hvdtrain.keras.seeds import seed_states, separate_seeds
from hvdtrain.keras.variables import variable_key
from hvdtrain.output import name_ranks


def randomize(model):
    """Makes the weights and the optimizer state those of this rank alone."""
    rng = np.random.default_rng(100 + hvd.rank())
    for variable in model.weights + model.optimizer.variables[2:]:
        variable.assign(rng.normal(size=variable.shape))


def momentum_sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def weights_and_state(model):
    return [v.numpy() for v in model.weights + model.optimizer.variables]


def fit_shard(model, *extra_callbacks):
    inputs, labels = oracle.samples(steps=3)
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    oracle.fit_shard(model, inputs, labels, callbacks=[first, *extra_callbacks])


@pytest.mark.ranks
def test_training_continues_from_the_state_of_rank_0():
    model = oracle.build_model()
    optimizer = momentum_sgd()
    optimizer.build(model.trainable_variables)
    model.compile(hvd.DistributedOptimizer(optimizer), oracle.LOSS)
    randomize(model)
    start = hvd.broadcast_object(weights_and_state(model), 0, name="start")

    single = oracle.build_model()
    single_optimizer = momentum_sgd()
    single_optimizer.build(single.trainable_variables)
    single.compile(single_optimizer, oracle.LOSS)
    for variable, value in zip(
        single.weights + single_optimizer.variables, start, strict=True
    ):
        variable.assign(value)
    oracle.fit_big_batch(single, *oracle.samples(steps=3))

    fit_shard(model)
    oracle.assert_bitwise_equal_over_ranks(weights_and_state(model))
    assert oracle.difference(weights_and_state(model), weights_and_state(single)) < 1e-6


@pytest.mark.parametrize(("root_rank", "most"), [(0, 1 << 28), (1, 1 << 28), (1, 100)])
def test_every_rank_gets_the_root_s_weights(root_rank, most, monkeypatch):
    # At most so many bytes in one broadcast: with 100, some have one variable.
    monkeypatch.setattr(broadcast, "_BROADCAST_BYTES", most)
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(momentum_sgd()), oracle.LOSS)
    model.optimizer.build(model.trainable_variables)
    randomize(model)
    expected = hvd.broadcast_object(weights_and_state(model), root_rank, name="root")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank)
    callback.set_model(model)
    callback.on_train_begin()
    for value, wanted in zip(weights_and_state(model), expected, strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_a_loss_scale_optimizer_is_broadcast_with_its_inner_optimizer():
    model = oracle.build_model()
    optimizer = keras.optimizers.LossScaleOptimizer(momentum_sgd())
    model.compile(hvd.DistributedOptimizer(optimizer), oracle.LOSS)
    optimizer.build(model.trainable_variables)
    optimizer.dynamic_scale.assign(2.0 ** (5 + hvd.rank()))
    optimizer.inner_optimizer.momentums[0].assign_add(
        np.full((6, 8), hvd.rank(), "float32")
    )
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1)
    callback.set_model(model)
    callback.on_train_begin()
    assert optimizer.dynamic_scale.numpy() == 64.0
    assert (optimizer.inner_optimizer.momentums[0].numpy() == 1.0).all()


def test_a_model_that_is_not_built_is_built_before_the_first_step():
    def layers():
        keras.utils.set_random_seed(hvd.rank())
        return [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Sequential(layers())
    model.compile(hvd.DistributedOptimizer(momentum_sgd()), loss)
    fit_shard(model)

    keras.utils.set_random_seed(0)
    single = keras.Sequential(
        [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    single.compile(momentum_sgd(), loss)
    oracle.fit_big_batch(single, *oracle.samples(steps=3))

    oracle.assert_bitwise_equal_over_ranks(weights_and_state(model))
    assert model.optimizer.iterations.numpy() == 3
    if hvd.rank() == 0:
        difference = oracle.difference(
            weights_and_state(model), weights_and_state(single)
        )
        assert difference < 1e-6


class Subclassed(keras.Model):
    """A model that its first call builds."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(oracle.CLASSES, activation="softmax")

    def call(self, inputs, training=False):
        return self.dense(self.norm(inputs, training=training))


def test_a_model_that_only_rank_0_has_built():
    model = Subclassed()
    kernel = np.ones((oracle.FEATURES, oracle.CLASSES), "float32")
    if hvd.rank() == 0:
        model(np.zeros((1, oracle.FEATURES), "float32"))
        model.dense.kernel.assign(kernel)
    # A learning rate of 0: the weights stay those of the broadcast.
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), oracle.LOSS)
    fit_shard(
        model,
        hvd.callbacks.AverageMovingStatisticsCallback(),
        hvd.callbacks.ConsistencyCheckCallback(every_steps=2),
    )
    np.testing.assert_array_equal(model.dense.kernel.numpy(), kernel)
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


@pytest.mark.parametrize("steps_per_execution", [2, 5])
def test_an_unbuilt_model_takes_every_step_once(steps_per_execution):
    model = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
    model.compile(
        hvd.DistributedOptimizer(momentum_sgd()),
        oracle.LOSS,
        steps_per_execution=steps_per_execution,
    )
    fit_shard(model)
    assert model.optimizer.iterations.numpy() == 3


class FailsFirst(keras.callbacks.Callback):
    """Ends a `fit` before its first step."""

    def on_epoch_begin(self, epoch, logs=None):
        raise RuntimeError("left")


def test_a_fit_that_fails_before_the_first_step_leaves_nothing_behind():
    def new_model():
        model = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
        model.compile(hvd.DistributedOptimizer(momentum_sgd()), oracle.LOSS)
        return model

    model = new_model()
    with pytest.raises(RuntimeError, match="left"):
        fit_shard(model, FailsFirst())
    if hvd.rank() > 0:
        # As in a worker that has come anew: it would broadcast once, rank 0 twice.
        model = new_model()
    fit_shard(model)
    assert int(model.optimizer.iterations) == 3
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


@pytest.mark.long
def test_an_incomplete_window_of_accumulation_goes_on_in_another_fit():
    def optimizer():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)

    single = oracle.build_model()
    single.compile(optimizer(), oracle.LOSS)
    inputs, labels = oracle.samples(steps=3)
    for _ in range(2):
        oracle.fit_big_batch(single, inputs, labels)

    for is_new in (False, True):
        model = oracle.build_model()
        model.compile(hvd.DistributedOptimizer(optimizer()), oracle.LOSS)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        oracle.fit_shard(model, inputs, labels, callbacks=[callback])
        if is_new:
            callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        oracle.fit_shard(model, inputs, labels, callbacks=[callback])
        assert oracle.difference(model.get_weights(), single.get_weights()) < 1e-6


def test_it_broadcasts_once():
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(momentum_sgd()), oracle.LOSS)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    randomize(model)
    before = weights_and_state(model)
    with pytest.raises(hvd.callbacks.DesynchronizedError, match="since the last fit"):
        callback.on_train_begin()
    for value, wanted in zip(weights_and_state(model), before, strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_local_variables_and_their_slots_stay():
    model = oracle.build_model()
    optimizer = hvd.DistributedOptimizer(momentum_sgd())
    model.compile(optimizer, oracle.LOSS)
    optimizer.build(model.trainable_variables)
    randomize(model)
    before = [v.numpy().copy() for v in model.weights + optimizer.momentums]
    local = model.layers[0].kernel
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(
        0, local_variables=[local]
    )
    callback.register_local_var(model.layers[1].bias.value)
    callback.set_model(model)
    callback.on_train_begin()
    after = [v.numpy() for v in model.weights + optimizer.momentums]
    kept = [np.array_equal(a, b) for a, b in zip(after, before, strict=True)]
    is_root = hvd.rank() == 0
    assert kept == 2 * [True, is_root, is_root, True]


def test_slots_go_to_the_longest_name_that_fits():
    class Pair(keras.layers.Layer):
        def build(self, input_shape):
            self.a = self.add_weight(shape=(2,), name="kernel")
            self.b = self.add_weight(shape=(2,), name="kernel_2")

        def call(self, inputs):
            return inputs * self.a + self.b

    model = keras.Sequential([keras.Input((2,)), Pair()])
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    first, _ = model.trainable_variables
    shared = non_local_variables(model, local_keys={variable_key(first)})
    names = [variable.name for variable in shared]
    # iteration, learning rate; the second weight and its two moments.
    assert len(names) == 2 + 3
    assert sum("kernel_2" in name for name in names) == 3


@pytest.mark.ranks
def test_ranks_with_different_names_are_matched_by_position():
    for _ in range(hvd.rank()):
        keras.layers.Dense(1)  # moves Keras' counter of names
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(hvd.DistributedOptimizer(momentum_sgd()), "mse")
    model.optimizer.build(model.trainable_variables)
    randomize(model)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    oracle.assert_bitwise_equal_over_ranks(weights_and_state(model))


@pytest.mark.parametrize("difference", ["units", "layers"])
def test_different_models_are_an_error_on_every_rank(difference):
    is_odd = hvd.rank() == 1
    units = 4 if is_odd and difference == "units" else 3
    layers = [keras.layers.Dense(units)]
    if is_odd and difference == "layers":
        layers.append(keras.layers.Dense(units))
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(hvd.DistributedOptimizer(momentum_sgd()), "mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    with pytest.raises(ValueError, match="The ranks' models differ"):
        callback.on_train_begin()


@pytest.mark.parametrize("local", ["kernel", ["a", "b"], [1.0]])
def test_local_variables_must_be_variables(local):
    with pytest.raises(ValueError, match="Local variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local)


def dropout_model(seed=None):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dropout(0.5, seed=seed),
            keras.layers.Dropout(0.1),
        ]
    )


def dropped(model):
    return np.asarray(model.layers[0](np.ones((1, 64), "float32"), training=True)) == 0


def test_ranks_that_are_seeded_alike_drop_different_units():
    model = dropout_model()
    masks = hvd.allgather_object(dropped(model).tobytes(), name="alike")
    assert len(set(masks)) == 1
    separate_seeds(seed_states(model))
    masks = hvd.allgather_object(dropped(model).tobytes(), name="apart")
    assert len(set(masks)) == hvd.size()


def test_separate_seeds_is_reproducible_and_safe_to_repeat():
    def states(model):
        return [state.numpy().tolist() for state in seed_states(model)]

    model = dropout_model()
    dropped(model)
    original = states(model)
    separate_seeds(seed_states(model))
    once = states(model)
    separate_seeds(seed_states(model))
    assert states(model) == once
    assert [counter for _, counter in once] == [counter for _, counter in original]
    if hvd.rank() == 0:
        assert once == original

    again = dropout_model()
    dropped(again)
    separate_seeds(seed_states(again))
    assert states(again) == once

    # Resumed from what rank 0 wrote: everybody gets back what it had.
    for state, value in zip(seed_states(model), original, strict=True):
        state.assign(value)
    separate_seeds(seed_states(model))
    assert states(model) == once


def test_seeds_that_differ_already_stay():
    model = dropout_model(seed=5 + hvd.rank())
    separate_seeds(seed_states(model))
    assert seed_states(model)[0].numpy().tolist() == [5 + hvd.rank(), 0]


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("seed", [None, 5 + hvd.rank()])
def test_a_broadcast_by_hand_leaves_the_ranks_different_masks(seed, is_traced):
    # `None` is equal on all ranks: dropout_model calls set_random_seed.
    model = dropout_model(seed)
    weight = keras.Variable([float(hvd.rank())])
    variables = [*model.variables, weight]

    def broadcast():
        hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)

    (tf.function(broadcast) if is_traced else broadcast)()
    assert float(weight.numpy()[0]) == hvd.size() - 1
    masks = hvd.allgather_object(dropped(model).tobytes(), name="by hand")
    assert len(set(masks)) == hvd.size()
    if seed is not None:
        assert seed_states(model)[0].numpy()[0] == seed


def test_fit_separates_the_seeds():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((oracle.FEATURES,)),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(oracle.CLASSES, activation="softmax"),
        ]
    )
    model.compile(hvd.DistributedOptimizer(momentum_sgd()), oracle.LOSS)
    fit_shard(model)
    oracle.assert_bitwise_equal_over_ranks(weights_and_state(model))
    seeds = hvd.allgather_object(seed_states(model)[0].numpy().tolist(), name="seeds")
    assert len({seed for seed, _ in seeds}) == hvd.size()
    assert {counter for _, counter in seeds} == {3}


def normalized_model():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((oracle.FEATURES,)),
            keras.layers.Normalization(),
            keras.layers.Dense(oracle.CLASSES, activation="softmax"),
        ]
    )


def samples_far_from_0():
    inputs, labels = oracle.samples(steps=3)
    return 5 * inputs + 40, labels


def fit_normalized(model, fit, **options):
    """Return losses and weights of a training."""
    inputs, labels = samples_far_from_0()
    losses = fit(model, inputs, labels, **options).history["loss"]
    losses.append(model.evaluate(inputs, labels, verbose=0))
    return losses + model.get_weights()


@functools.cache
def normalized_by_one_process():
    def train():
        single = normalized_model()
        single.layers[0].adapt(samples_far_from_0()[0])
        single.compile(momentum_sgd(), oracle.LOSS)
        return fit_normalized(single, oracle.fit_big_batch)

    return oracle.on_one_process(train)


@pytest.mark.parametrize(
    "way",
    [
        "callback",
        pytest.param("by hand", marks=pytest.mark.release),
        pytest.param("frozen", marks=pytest.mark.release),
        pytest.param("after a step", marks=pytest.mark.release),
    ],
)
def test_normalization_computes_with_the_variables_of_rank_0(way):
    inputs, labels = samples_far_from_0()
    model = normalized_model()
    optimizer = hvd.DistributedOptimizer(momentum_sgd())
    model.compile(optimizer, oracle.LOSS)
    if way == "after a step":
        # Compiled functions have the old tensors. Nothing changes at a rate of 0.
        optimizer.learning_rate = 0.0
        model.evaluate(inputs, labels, verbose=0)
        oracle.fit_shard(model, inputs, labels)
        optimizer.learning_rate = 0.1
    if hvd.rank() == 0:
        model.layers[0].adapt(inputs)
    callbacks = [hvd.callbacks.MetricAverageCallback()]
    if way == "frozen":
        gc.freeze()
    if way in ("by hand", "frozen"):
        hvd.broadcast_variables(model.variables, root_rank=0)
    else:
        callbacks.insert(0, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    found = fit_normalized(model, oracle.fit_shard, callbacks=callbacks)
    assert oracle.difference(found, normalized_by_one_process()) < 1e-5


def test_a_broadcast_of_other_variables_does_not_search_layers(monkeypatch):
    model = keras.Sequential(
        [
            keras.Input((oracle.FEATURES,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    for variable in model.variables:
        variable.assign(variable + float(hvd.rank()))
    monkeypatch.setattr(gc, "get_objects", None)
    hvd.broadcast_variables(model.variables, root_rank=0)
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


def add_to_weight(model):
    weight = model.layers[0].bias
    weight.assign(weight + 1.0)


def change_rate(model):
    model.optimizer.learning_rate = 0.2


def change_momentum(model):
    model.optimizer.momentum = 0.5


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (add_to_weight, "1 of 10 variables differ. First: sequential.*bias"),
        pytest.param(
            *(change_rate, "1 of 10 variables differ. First: .*learning_rate"),
            marks=pytest.mark.release,
        ),
        (change_momentum, "The ranks differ in momentum of SGD: 0.5 on rank 0 and 0.9"),
    ],
)
def test_a_change_of_one_rank_between_two_fits(change, name):
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(momentum_sgd()), oracle.LOSS)
    inputs, labels = oracle.samples(steps=3)
    root = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    oracle.fit_shard(model, inputs, labels, callbacks=[root])
    if hvd.rank() == 0:
        change(model)
    with pytest.raises(hvd.callbacks.DesynchronizedError, match=name) as error:
        oracle.fit_shard(model, inputs, labels, callbacks=[root])
    assert "\n" not in str(error.value)
    # The remedies of the messages.
    if change is change_momentum:
        change(model)
    else:
        root = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    oracle.fit_shard(model, inputs, labels, callbacks=[root])
    oracle.assert_bitwise_equal_over_ranks(weights_and_state(model))


def test_what_may_differ_between_two_fits():
    keras.utils.set_random_seed(1)
    normalization = keras.layers.Normalization()
    normalization.adapt(np.eye(oracle.FEATURES) * (hvd.rank() + 1))
    model = keras.Sequential(
        [
            keras.Input((oracle.FEATURES,)),
            normalization,
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=hvd.rank()),
            keras.layers.Dense(4, name="local"),
            keras.layers.Dense(oracle.CLASSES, activation="softmax"),
        ]
    )
    sgd = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    optimizer = hvd.PartialDistributedOptimizer(
        sgd, local_layers=model.get_layer("local")
    )
    for variable in normalization.variables:
        optimizer.register_local_var(variable)
    model.compile(optimizer, oracle.LOSS, metrics=["accuracy"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    for steps in (3, 2):
        oracle.fit_shard(model, *oracle.samples(steps), callbacks=callbacks)
    local = hvd.allgather_object(model.get_layer("local").get_weights()[0].tolist())
    assert local[0] != local[1]
    means = hvd.allgather_object(normalization.mean.numpy().tolist())
    assert means[0] != means[1]
    oracle.assert_bitwise_equal_over_ranks(model.layers[-1].get_weights())


def trained_model():
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(momentum_sgd()), oracle.LOSS)
    fit_shard(model)
    return model


def clone(model, path):
    copied = keras.models.clone_model(model)
    config = keras.optimizers.serialize(model.optimizer)
    copied.compile(keras.optimizers.deserialize(config), oracle.LOSS)
    return copied


def save_and_load(model, path):
    model.save(path)
    return keras.models.load_model(path)


COPIES = {
    "clone": clone,
    "deepcopy": lambda model, path: copy.deepcopy(model),
    "copy": lambda model, path: copy.copy(model),
    "pickle": lambda model, path: pickle.loads(pickle.dumps(model)),
    "load": save_and_load,
}


# Each of the other ways serializes the optimizer, or copies its attributes, too.
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=() if way == "load" else pytest.mark.release)
        for way in COPIES
    ],
)
def test_a_copy_with_a_plain_optimizer_is_refused(way, tmp_path):
    copied = COPIES[way](trained_model(), tmp_path / "model.keras")
    before = weights_and_state(copied)
    with pytest.raises(ValueError, match="not distributed") as error:
        fit_shard(copied)
    assert "a plain SGD" in str(error.value)
    assert "hvd.load_model" in str(error.value)
    assert "\n" not in str(error.value)
    assert oracle.difference(weights_and_state(copied), before) == 0
    # The remedy of the message.
    hvd.DistributedOptimizer(copied.optimizer)
    fit_shard(copied)
    oracle.assert_bitwise_equal_over_ranks(weights_and_state(copied))


def test_a_deep_copy_of_an_optimizer_is_plain():
    optimizer = hvd.DistributedOptimizer(momentum_sgd())
    model = oracle.build_model()
    model.compile(copy.deepcopy(optimizer), oracle.LOSS)
    with pytest.raises(ValueError, match="not distributed"):
        fit_shard(model)
    original = oracle.build_model()
    original.compile(optimizer, oracle.LOSS)
    fit_shard(original)
    assert int(optimizer.iterations) == 3


def recompiles(event, change):
    """A callback that changes the model at the first `event`."""

    def act(*_, **__):
        if not callback.has_acted:
            callback.has_acted = True
            change(callback.model)

    callback = keras.callbacks.LambdaCallback(**{event: act})
    callback.has_acted = False
    return callback


def compile_plain(model):
    model.compile(momentum_sgd(), oracle.LOSS)


def compile_plain_and_train(model):
    compile_plain(model)
    # Keras' `fit` raises a TypeError otherwise: it does not make it again.
    model.make_train_function()


def replace_optimizer(model):
    model.optimizer = momentum_sgd()


@pytest.mark.parametrize(
    ("event", "change"),
    [
        ("on_train_batch_end", compile_plain_and_train),
        ("on_epoch_begin", compile_plain),
        ("on_epoch_begin", replace_optimizer),
    ],
)
def test_a_callback_that_makes_the_optimizer_plain_is_refused(event, change):
    model = sgd_model()
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(ValueError, match="not distributed") as error:
        oracle.fit_shard(
            model,
            *oracle.samples(steps=3),
            epochs=2,
            callbacks=[first, recompiles(event, change)],
        )
    assert "compiled again, by a callback" in str(error.value)
    assert "\n" not in str(error.value)
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


@pytest.mark.parametrize(
    "is_first", [False, pytest.param(True, marks=pytest.mark.release)]
)
def test_a_model_may_be_compiled_for_inference_at_the_end(is_first):
    model = sgd_model()
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    callbacks.insert(not is_first, recompiles("on_train_end", compile_plain))
    inputs, labels = oracle.samples(steps=3)
    oracle.fit_shard(model, inputs, labels, callbacks=callbacks)
    oracle.assert_bitwise_equal_over_ranks(
        [*model.get_weights(), model.evaluate(inputs, labels, verbose=0)]
    )


class TapeModel(keras.Sequential):
    """A `train_step` of the user, which reduces the gradients itself."""

    def train_step(self, data):
        inputs, labels = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=inputs, y=labels, y_pred=self(inputs))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_a_plain_optimizer_with_a_tape_is_not_refused():
    model = oracle.build_model(TapeModel)
    model.compile(momentum_sgd(), oracle.LOSS)
    fit_shard(model)
    oracle.assert_bitwise_equal_over_ranks(weights_and_state(model))


def test_an_optimizer_of_horovod_is_named():
    model = oracle.build_model()
    model.compile(horovod_keras.DistributedOptimizer(momentum_sgd()), oracle.LOSS)
    with pytest.raises(TypeError, match=r"horovod\._keras\.SGD") as error:
        fit_shard(model)
    assert "import hvdtrain.keras as hvd" in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match=r"horovod\._keras\.SGD"):
        hvd.DistributedOptimizer(horovod_keras.DistributedOptimizer(momentum_sgd()))


def test_an_optimizer_that_is_distributed_between_two_fits():
    inputs, labels = oracle.samples(steps=3)
    model = oracle.build_model()
    model.compile(momentum_sgd(), oracle.LOSS)
    oracle.fit_shard(model, inputs, labels)
    start = hvd.broadcast_object(weights_and_state(model), 0, name="first fit")
    hvd.DistributedOptimizer(model.optimizer)
    fit_shard(model)

    single = oracle.build_model()
    single.compile(momentum_sgd(), oracle.LOSS)
    single.optimizer.build(single.trainable_variables)
    variables = single.weights + single.optimizer.variables
    for variable, value in zip(variables, start, strict=True):
        variable.assign(value)
    size = oracle.LOCAL_BATCH_SIZE * hvd.size()
    single.fit(inputs, labels, batch_size=size, shuffle=False, verbose=0)
    assert oracle.difference(weights_and_state(model), weights_and_state(single)) < 1e-6
    oracle.assert_bitwise_equal_over_ranks(weights_and_state(model))


class Interrupt(keras.callbacks.Callback):
    """Ends `fit` on all ranks before a batch of an epoch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.place = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            raise KeyboardInterrupt


class Epochs(keras.callbacks.Callback):
    """Notes the epochs of a `fit`."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(epoch)


def fit_with_backup(model, path, *extra_callbacks, backup_is_first=True):
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *extra_callbacks]
    if hvd.rank() == 0:
        backup = keras.callbacks.BackupAndRestore(path)
        callbacks.insert(0 if backup_is_first else 1, backup)
    inputs, labels = oracle.samples(steps=3)
    oracle.fit_shard(model, inputs, labels, epochs=4, callbacks=callbacks)


def sgd_model():
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(momentum_sgd()), oracle.LOSS)
    return model


@pytest.mark.parametrize(
    "is_same_process", [False, pytest.param(True, marks=pytest.mark.release)]
)
def test_backup_and_restore_on_rank_0(is_same_process, tmp_path):
    uninterrupted = sgd_model()
    fit_with_backup(uninterrupted, tmp_path / "uninterrupted")
    model, epochs = sgd_model(), Epochs()
    with pytest.raises(KeyboardInterrupt):
        fit_with_backup(model, tmp_path / "backup", Interrupt(2, 1))
    if is_same_process:
        # Nothing is saved, and the epoch to restore is the one before.
        with pytest.raises(KeyboardInterrupt):
            fit_with_backup(model, tmp_path / "backup", Interrupt(2, 2))
    else:
        model = sgd_model()
    fit_with_backup(model, tmp_path / "backup", epochs)
    assert epochs.seen == [2, 3]
    expected = weights_and_state(uninterrupted)
    assert oracle.difference(weights_and_state(model), expected) == 0
    oracle.assert_bitwise_equal_over_ranks(weights_and_state(model))


def test_backup_and_restore_after_the_broadcast_is_refused(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit_with_backup(sgd_model(), tmp_path / "backup", Interrupt(2, 1))
    with pytest.raises(ValueError, match=r"2 on rank 0 and 0 on ranks? 1") as error:
        fit_with_backup(sgd_model(), tmp_path / "backup", backup_is_first=False)
    assert "BackupAndRestore before" in str(error.value)


def test_files_that_several_ranks_write_are_refused(tmp_path):
    def writers(path):
        return [
            keras.callbacks.ModelCheckpoint(f"{path}.keras"),
            keras.callbacks.BackupAndRestore(path),
            keras.callbacks.CSVLogger(f"{path}.csv"),
        ]

    path = hvd.broadcast_object(f"{tmp_path}/x", root_rank=0)
    for writer, file in zip(writers(path), ("x.keras", "x", "x.csv"), strict=True):
        error = f"{type(writer).__name__} with .*/{file} on ranks 0, 1.*on rank 0 alone"
        with pytest.raises(ValueError, match=error):
            fit_writing(writer)
    own = writers(f"{path}-{hvd.rank()}")
    fit_writing(*own, *(writers(path) if hvd.rank() == 0 else []))


def fit_writing(*writers):
    inputs, labels = oracle.samples(steps=1)
    callbacks = [*writers, hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    oracle.fit_shard(sgd_model(), inputs, labels, epochs=1, callbacks=callbacks)


def test_a_rank_without_an_epoch_left_is_refused():
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    inputs, labels = oracle.samples(steps=3)
    with pytest.raises(ValueError, match=r"none on rank 0 and 1 on ranks? 1"):
        oracle.fit_shard(
            sgd_model(),
            inputs,
            labels,
            initial_epoch=1,
            epochs=1 + (hvd.rank() > 0),
            callbacks=[first],
        )


def fit_unequal_steps(*callbacks, **options):
    count = (3 + hvd.rank()) * oracle.LOCAL_BATCH_SIZE
    inputs, labels = oracle.samples(steps=3 + hvd.size())
    model = sgd_model()
    model.fit(
        inputs[:count],
        labels[:count],
        batch_size=oracle.LOCAL_BATCH_SIZE,
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks],
        **options,
    )
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())
    return int(model.optimizer.iterations)


def test_unequal_numbers_of_steps_are_refused():
    with pytest.raises(ValueError, match="3 on rank 0 and 4 on rank 1") as error:
        fit_unequal_steps()
    for remedy in ("steps_per_epoch=3", "drop_remainder", "JoinCallback"):
        assert remedy in str(error.value)
    assert "\n" not in str(error.value)


def test_unequal_numbers_of_batches_with_a_remedy():
    assert fit_unequal_steps(steps_per_epoch=3) == 3
    assert fit_unequal_steps(hvd.callbacks.JoinCallback()) == 2 + hvd.size()


def test_unequal_numbers_of_steps_after_a_fit_that_joined():
    joining = hvd.callbacks.JoinCallback()
    model, first = sgd_model(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    inputs, labels = oracle.samples(steps=3)
    oracle.fit_shard(model, inputs, labels, callbacks=[first, joining])
    count = (1 + hvd.rank()) * oracle.LOCAL_BATCH_SIZE
    with pytest.raises(ValueError, match="different numbers of steps"):
        model.fit(
            inputs[:count],
            labels[:count],
            batch_size=oracle.LOCAL_BATCH_SIZE,
            verbose=0,
            callbacks=[first],
        )


def test_unequal_numbers_of_steps_after_a_fit_that_failed():
    model, first = sgd_model(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    inputs, labels = oracle.samples(steps=1 + hvd.rank())
    joining = hvd.callbacks.JoinCallback()
    with pytest.raises(KeyboardInterrupt):
        oracle.fit(
            model, inputs, labels, callbacks=[first, joining, Interrupt(0, batch=0)]
        )
    with pytest.raises(ValueError, match="different numbers of steps"):
        oracle.fit(model, inputs, labels, callbacks=[first])


def test_join_callback_on_one_rank_is_refused():
    joining = [hvd.callbacks.JoinCallback()] if hvd.rank() == 0 else []
    others = list(range(1, hvd.size()))
    with pytest.raises(ValueError, match="have different callbacks") as error:
        fit_shard(sgd_model(), *joining)
    expected = f"Received: JoinCallback on rank 0 and not on {name_ranks(others)}. Pass"
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("MetricAverage Join", "MetricAverageCallback before JoinCallback."),
        pytest.param(
            "AverageMovingStatistics Join",
            "AverageMovingStatisticsCallback before JoinCallback.",
            marks=pytest.mark.release,
        ),
        ("StopTogether Join", "StopTogetherCallback before JoinCallback."),
        # On rank 0 alone: refused on every rank.
        ("StopTogether EarlyStopping", "StopTogetherCallback before EarlyStopping."),
    ],
)
def test_callbacks_in_an_order_that_would_block_are_refused(names, expected):
    callbacks = [
        getattr(hvd.callbacks, f"{name}Callback")()
        for name in names.split()
        if name != "EarlyStopping"
    ]
    if "EarlyStopping" in names:
        callbacks += on_rank_0(keras.callbacks.EarlyStopping("loss"))
    with pytest.raises(ValueError, match=f"wrong order. Received: {expected}") as error:
        fit_unequal_steps(*callbacks, steps_per_epoch=3)
    assert "\n" not in str(error.value)
    if "Join" in names:
        inputs, labels = oracle.samples(steps=1)
        with pytest.raises(ValueError, match=f"wrong order. Received: {expected}"):
            oracle.fit_shard(sgd_model(), inputs, labels, callbacks=callbacks)


def test_callbacks_in_another_order_on_each_rank_are_refused():
    names = ["MetricAverageCallback", "StopTogetherCallback"]
    callbacks = [getattr(hvd.callbacks, name)() for name in names]
    with pytest.raises(ValueError, match="in different orders") as error:
        fit_shard(sgd_model(), *callbacks[:: 1 if hvd.rank() == 0 else -1])
    assert f"{', '.join(names)} on rank 0 and Broadcast" in str(error.value)
    assert "\n" not in str(error.value)


def test_no_callback_compares_ranks_in_mid_epoch_beside_a_join():
    # After 7 steps, the ranks are in different steps of an epoch.
    callbacks = [
        hvd.callbacks.JoinCallback(),
        hvd.callbacks.StopTogetherCallback(every_steps=7),
        hvd.callbacks.ConsistencyCheckCallback(every_steps=7),
    ]
    assert fit_unequal_steps(*callbacks, epochs=3) == 3 * (2 + hvd.size())


def on_rank_0(*callbacks):
    return callbacks if hvd.rank() == 0 else ()


@pytest.mark.parametrize(
    "make",
    [
        hvd.callbacks.MetricAverageCallback,
        hvd.callbacks.StopTogetherCallback,
        keras.callbacks.ReduceLROnPlateau,
        keras.callbacks.EarlyStopping,
    ],
)
def test_a_callback_that_is_missing_on_a_rank_is_named(make):
    with pytest.raises(ValueError, match="have different callbacks") as error:
        fit_shard(sgd_model(), *on_rank_0(make()))
    others = "rank 1" if hvd.size() == 2 else "ranks 1, "
    expected = f"Received: {make.__name__} on rank 0 and not on {others}"
    assert expected in str(error.value)


def test_the_callback_is_named_whose_collective_the_others_do_not_call():
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    inputs, labels = oracle.samples(steps=1)
    with pytest.raises(tf.errors.FailedPreconditionError) as error:
        oracle.fit_shard(sgd_model(), inputs, labels, callbacks=[*on_rank_0(first)])
    assert "BroadcastGlobalVariablesCallback.on_train_begin; rank 1: " in str(
        error.value
    )
    assert "in no callback" in str(error.value)
    assert "to fit on all ranks" in str(error.value)


def test_callbacks_without_collectives_may_be_on_one_rank():
    model = sgd_model()
    printing = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    fit_shard(model, *on_rank_0(printing), hvd.callbacks.MetricAverageCallback())
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


NORMALIZATION = "BatchNormalization updates its moving statistics"


@pytest.mark.long
def test_moving_statistics_that_nothing_combines_are_warned_of_once():
    def make(layer):
        dense = keras.layers.Dense(oracle.CLASSES, activation="softmax")
        model = keras.Sequential([keras.Input((oracle.FEATURES,)), layer, dense])
        model.compile(hvd.DistributedOptimizer(momentum_sgd()), oracle.LOSS)
        return model

    def texts(model, *callbacks, fits=1):
        inputs, labels = oracle.samples(steps=3)
        first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(fits):
                oracle.fit_shard(model, inputs, labels, callbacks=[first, *callbacks])
        found = [str(warning.message) for warning in caught]
        return [text for text in found if text.startswith(NORMALIZATION)]

    local = keras.layers.BatchNormalization
    found = texts(make(local(name="bn")), fits=2)
    assert len(found) == (1 if hvd.rank() == 0 else 0)
    for text in found:
        assert "Received 1 such layer, bn the first." in text
        assert "Use hvd.SyncBatchNormalization, or add hvd.callbacks.Average" in text
    assert not texts(make(hvd.SyncBatchNormalization()))
    assert not texts(make(local(trainable=False)))
    assert not texts(make(local()), hvd.callbacks.AverageMovingStatisticsCallback())


def test_an_unknown_number_of_steps_is_not_refused():
    data = tf.data.Dataset.from_tensor_slices(oracle.samples(steps=2))
    data = data.shard(hvd.size(), hvd.rank()).batch(oracle.LOCAL_BATCH_SIZE)
    data = data.filter(lambda inputs, labels: True)
    model, first = sgd_model(), hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(data, verbose=0, callbacks=[first])
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())
