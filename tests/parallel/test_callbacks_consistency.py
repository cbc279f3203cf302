"""Ranks with different variables raise an error that names the variable."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.keras.consistency import check_consistency

DriftedApart = hvd.callbacks.DesynchronizedError


class ChangeAfter(keras.callbacks.Callback):
    """Runs `change()` on one rank after so many batches."""

    def __init__(self, batch, rank, change):
        super().__init__()
        self.batch, self.rank, self.change = batch, rank, change
        self.batches_seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches_seen += 1
        if batch == self.batch and hvd.rank() == self.rank:
            self.change()


def adam_model(**model_args):
    model = oracle.build_model(**model_args)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), oracle.LOSS)
    return model


def fit(model, *callbacks, broadcast=True, epochs=1):
    inputs, labels = oracle.samples(steps=10)
    if broadcast:
        first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callbacks = (first, *callbacks)
    oracle.fit_shard(model, inputs, labels, epochs=epochs, callbacks=callbacks)


def assert_same_text_everywhere(error):
    texts = hvd.allgather_object(str(error.value), name="texts")
    assert len(set(texts)) == 1
    assert "\n" not in texts[0]


def test_equal_ranks_pass():
    fit(adam_model(), hvd.callbacks.ConsistencyCheckCallback(every_steps=1), epochs=2)


@pytest.mark.parametrize("root_comes_last", [False, True])
def test_the_first_check_follows_the_broadcast_wherever_it_stands(root_comes_last):
    model = adam_model()
    model.layers[0].bias.assign(np.full(8, hvd.rank(), "float32"))
    check = hvd.callbacks.ConsistencyCheckCallback()
    root = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    order = [check, root] if root_comes_last else [root, check]
    fit(model, *order, broadcast=False)


@pytest.mark.ranks
def test_weights_that_were_not_broadcast():
    model = adam_model()
    model.layers[0].bias.assign(np.full(8, hvd.rank(), "float32"))
    steps = ChangeAfter(0, 0, lambda: None)
    check = hvd.callbacks.ConsistencyCheckCallback()
    with pytest.raises(DriftedApart, match="1 of 6 variables differ") as error:
        fit(model, check, steps, broadcast=False)
    assert steps.batches_seen == 0
    assert model.layers[0].bias.path in str(error.value)
    assert_same_text_everywhere(error)


@pytest.mark.ranks
def test_drift_is_found_at_the_next_check_and_named():
    model = adam_model()
    bias = model.layers[1].bias
    change = ChangeAfter(3, 1, lambda: bias.assign(np.nextafter(bias.numpy(), 9)))
    check = hvd.callbacks.ConsistencyCheckCallback(every_steps=6)
    with pytest.raises(DriftedApart) as error:
        fit(model, check, change)
    assert change.batches_seen == 6
    others = "ranks 0, 2 and rank 1" if hvd.size() == 3 else "rank 0 and rank 1"
    if hvd.size() < 4:
        assert f"{bias.path}, where {others} hold" in str(error.value)
    assert_same_text_everywhere(error)


def test_a_learning_rate_of_one_rank_is_named():
    model = adam_model()
    optimizer = model.optimizer

    def change():
        optimizer.learning_rate = 0.02

    with pytest.raises(DriftedApart, match=optimizer.learning_rate.path) as error:
        fit(
            model,
            hvd.callbacks.ConsistencyCheckCallback(),
            ChangeAfter(9, hvd.size() - 1, change),
        )
    assert_same_text_everywhere(error)


def test_an_optimizer_that_reduces_nothing_is_found():
    model = oracle.build_model()
    model.compile(keras.optimizers.SGD(0.1), oracle.LOSS)
    # Equal by their seeds: the broadcast callback refuses a plain optimizer.
    check = hvd.callbacks.ConsistencyCheckCallback(every_steps=2)
    with pytest.raises(DriftedApart, match="4 of 6 variables"):
        fit(model, check, broadcast=False)


def test_local_variables_may_differ():
    model = adam_model()
    bias = model.layers[1].bias
    change = ChangeAfter(
        1, 1, lambda: [v.assign(v + 1.0) for v in (bias, model.optimizer._momentums[3])]
    )
    # What a change of the last bias does to the others' gradients is shared.
    check = hvd.callbacks.ConsistencyCheckCallback(
        every_steps=2, local_variables=[bias]
    )
    fit(model, check, change)


def test_what_the_optimizer_knows_as_local_may_differ():
    model = oracle.build_model()
    local, shared = model.layers
    local.bias.assign(local.bias + float(hvd.rank()))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        hvd.PartialDistributedOptimizer(optimizer, local_layers=local), oracle.LOSS
    )
    fit(model, hvd.callbacks.ConsistencyCheckCallback(every_steps=1))
    oracle.assert_bitwise_equal_over_ranks(shared.get_weights())
    biases = hvd.allgather_object(local.bias.numpy().tolist(), name="biases")
    assert len({tuple(bias) for bias in biases}) == hvd.size()


@pytest.mark.parametrize(
    "is_built", [pytest.param(True, marks=pytest.mark.release), False]
)
def test_moving_averages_are_each_rank_s_own(is_built):
    model = keras.Sequential(
        [
            keras.layers.BatchNormalization(),
            keras.layers.Dense(oracle.CLASSES, activation="softmax"),
        ]
    )
    if is_built:
        model.build((None, oracle.FEATURES))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), oracle.LOSS)
    check = hvd.callbacks.ConsistencyCheckCallback(every_steps=2)
    root = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, root, check, broadcast=False)
    fit(model, root, check, broadcast=False)
    # The broadcast is not repeated, and another check has a first one.
    new_check = hvd.callbacks.ConsistencyCheckCallback(every_steps=2)
    fit(model, root, new_check, broadcast=False)


@pytest.mark.parametrize("aggregation", ["none", "mean"])
def test_a_weight_that_a_layer_updates_is_named_unless_it_is_declared(aggregation):
    layer = keras.layers.Dense(oracle.CLASSES, activation="softmax")
    counter = layer.add_weight(
        shape=(), trainable=False, aggregation=aggregation, name="counter"
    )
    model = keras.Sequential([keras.Input((oracle.FEATURES,)), layer])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), oracle.LOSS)
    add = ChangeAfter(1, 1, lambda: counter.assign_add(1.0))
    check = hvd.callbacks.ConsistencyCheckCallback(every_steps=2)
    if aggregation == "mean":
        fit(model, check, add)
        return
    with pytest.raises(DriftedApart, match=r"counter.*hvd\.allreduce") as error:
        fit(model, check, add)
    assert_same_text_everywhere(error)


def test_moving_averages_that_differ_before_the_first_step():
    model = keras.Sequential(
        [keras.Input((oracle.FEATURES,)), keras.layers.BatchNormalization()]
    )
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    hvd.broadcast_variables(model.variables, root_rank=0)
    model.layers[0].moving_mean.assign(np.full(oracle.FEATURES, hvd.rank(), "float32"))
    inputs, _ = oracle.samples(steps=1)
    check = hvd.callbacks.ConsistencyCheckCallback()
    with pytest.raises(DriftedApart, match="moving_mean"):
        oracle.fit_shard(model, inputs, inputs, callbacks=[check])


@pytest.mark.ranks
def test_different_numbers_of_variables():
    variables = [keras.Variable([1.0, 2.0]) for _ in range(2 + (hvd.rank() == 1))]
    with pytest.raises(DriftedApart, match=r"2 on ranks? 0.* and 3 on rank 1"):
        check_consistency(variables)


def test_shapes_that_differ_are_named():
    variable = keras.Variable(np.zeros((2, 4 if hvd.rank() == 1 else 3)), name="kernel")
    reason = r"shape of kernel is \(2, 3\) on ranks? 0.* and \(2, 4\) on rank 1"
    with pytest.raises(DriftedApart, match=reason):
        check_consistency([keras.Variable(1.0), variable])


def test_the_type_counts():
    dtype = "int32" if hvd.rank() == 1 else "float32"
    with pytest.raises(DriftedApart):
        check_consistency([keras.Variable([0, 0], dtype=dtype)])
    check_consistency([keras.Variable([1, 0], dtype="bfloat16")])
    check_consistency([keras.Variable(1.0), keras.Variable(np.zeros((0, 3)))])


def test_a_rank_whose_callbacks_are_new_keeps_step_with_the_others():
    # As in an elastic job that a worker joins late: the others have trained 10 steps,
    # a multiple of neither number.
    def new_callbacks():
        return [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.ConsistencyCheckCallback(every_steps=4),
            hvd.callbacks.StopTogetherCallback(every_steps=3),
        ]

    def set_apart():
        model.layers[0].bias.assign(np.full(8, hvd.rank(), "float32"))

    model, callbacks = adam_model(), new_callbacks()
    fit(model, *callbacks, broadcast=False)
    if hvd.rank() == hvd.size() - 1:
        callbacks = new_callbacks()
    set_apart()
    fit(model, *callbacks, broadcast=False)
    assert int(model.optimizer.iterations) == 20
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())
    # None of them is new now: no broadcast, and the ranks are compared.
    set_apart()
    seen = ChangeAfter(0, 0, lambda: None)
    with pytest.raises(DriftedApart, match=model.layers[0].bias.path):
        fit(model, *callbacks, seen, broadcast=False)
    assert seen.batches_seen == 0


def test_an_incomplete_window_of_accumulation_is_no_drift():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(optimizer), oracle.LOSS)
    check = hvd.callbacks.ConsistencyCheckCallback(every_steps=1)
    oracle.fit_shard(model, *oracle.samples(), callbacks=[check])
    assert int(optimizer.iterations) == oracle.STEPS // 3
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


def test_a_new_callback_takes_an_incomplete_window_for_no_drift():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(optimizer), oracle.LOSS)
    # Ten steps: the fourth window has one of its three.
    for _ in range(2):
        fit(model, hvd.callbacks.ConsistencyCheckCallback(every_steps=1))
    assert int(optimizer.iterations) == 20 // 3


def test_checks_are_as_frequent_when_steps_are_taken_at_a_stretch():
    model = oracle.build_model()
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)),
        oracle.LOSS,
        steps_per_execution=5,
    )
    bias = model.layers[1].bias

    def drift():
        # Two executions an epoch, of which the first ends with batch 4: the third.
        if int(model.optimizer.iterations) == 15:
            bias.assign(bias + 1.0)

    change = ChangeAfter(4, 1, drift)
    check = hvd.callbacks.ConsistencyCheckCallback(every_steps=10)
    with pytest.raises(DriftedApart):
        fit(model, check, change, epochs=6)
    # 10 steps are two executions: found after the fourth.
    assert change.batches_seen == 4


def test_vocabularies_are_read_when_a_training_begins(monkeypatch):
    get_vocabulary, reads = keras.layers.StringLookup.get_vocabulary, []

    def read(layer, *args, **kwargs):
        reads.append(layer)
        return get_vocabulary(layer, *args, **kwargs)

    monkeypatch.setattr(keras.layers.StringLookup, "get_vocabulary", read)
    text = keras.layers.TextVectorization(
        vocabulary=["a", "b"], output_mode="multi_hot", max_tokens=4
    )
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((1,), dtype="string"), text, keras.layers.Dense(1)]
    )
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    check = hvd.callbacks.ConsistencyCheckCallback(1)
    words = tf.constant([["a"], ["b"], ["a b"], ["c"]])
    oracle.fit(model, words, np.ones((4, 1)), 1, epochs=2, callbacks=[check])
    # By the first check of the callback, and that of the first step.
    assert len(reads) == 2 * (hvd.size() > 1)
