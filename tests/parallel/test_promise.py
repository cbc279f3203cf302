"""The conditions under which N ranks equal one process, each with its number.

Eight samples, 1 to 8, in one step of a model with one weight. Its loss is |1 - w x|
and the weight starts at 0: with SGD at 0.1 it becomes 0.1 times the mean of the
samples. The numbers are those of docs/moving/equivalence.md.
"""

import inspect
import warnings

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import World
from hvdtrain.keras import loss_reductions, moving_statistics
from hvdtrain.keras.variables import is_distributed

RANK, SIZE = hvd.rank(), hvd.size()
SAMPLES = np.arange(1.0, 9.0, dtype="float32")
HALF = slice(4 * RANK, 4 * RANK + 4)
# Of two sequences of four steps, the second has one that counts.
UNMASKED = np.array([1, 1, 1, 1, 1, 0, 0, 0], "float32")
two_ranks = pytest.mark.skipif(SIZE != 2, reason="the numbers are those of two ranks")


def broadcast_for(optimizer):
    """Returns the first callbacks of `fit`: none on one process."""
    if not is_distributed(optimizer):
        return []
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]


def step(
    model, optimizer, inputs, targets, *, loss="mae", weights=None, loss_weights=None
):
    """Takes one step with all of `inputs`."""
    # Tracing would take longer than the step.
    model.compile(optimizer, loss, run_eagerly=True, loss_weights=loss_weights)
    model.fit(
        inputs,
        targets,
        sample_weight=weights,
        batch_size=len(inputs),
        verbose=0,
        callbacks=broadcast_for(optimizer),
    )


def weight_after_step(optimizer, samples, shape, layers, weights, loss):
    inputs = samples.reshape(shape)
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    step(
        keras.Sequential([keras.Input(inputs.shape[1:]), *layers, dense]),
        optimizer,
        inputs,
        np.ones_like(inputs),
        loss=keras.losses.MeanAbsoluteError(**loss),
        weights=None if weights is None else weights.reshape(inputs.shape[:-1]),
    )
    return float(dense.kernel[0, 0])


def updates(
    part=HALF,
    samples=SAMPLES,
    *,
    op=hvd.Average,
    shape=(-1, 1),
    layers=(),
    weights=None,
    **loss,
):
    """Returns the weight after one step of all ranks, and after one of one process."""
    options = {"shape": shape, "layers": layers, "loss": loss}
    return (
        weight_after_step(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=op),
            samples[part],
            weights=None if weights is None else weights[part],
            **options,
        ),
        weight_after_step(
            keras.optimizers.SGD(0.1), samples, weights=weights, **options
        ),
    )


def check(found, expected):
    # Optimizers add an epsilon to what they divide by.
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@two_ranks
def test_local_batches_of_equal_size():
    check(updates(), [0.45, 0.45])


@two_ranks
def test_local_batches_of_unequal_size():
    # (21 / 6 + 15 / 2) / 2 instead of 36 / 8
    check(updates(slice(0, 6) if RANK == 0 else slice(6, 8)), [0.55, 0.45])


@two_ranks
@pytest.mark.parametrize(
    ("op", "reduction", "found"),
    [(hvd.Average, "sum", 1.8), (hvd.Average, None, 1.8), (hvd.Sum, "sum", 3.6)],
)
def test_loss_that_is_a_sum(op, reduction, found, recwarn):
    loss_reductions._warn.cache_clear()
    check(updates(op=op, reduction=reduction), [found, 3.6])
    texts = [str(warning.message) for warning in recwarn]
    text = f"with reduction={reduction!r}; expected a mean over samples"
    count = len([each for each in texts if text in each])
    assert count == (op == hvd.Average and RANK == 0)


class AddLoss(keras.layers.Layer):
    """Adds a number computed from its inputs to the loss."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def call(self, inputs):
        self.add_loss(self.compute(inputs))
        return inputs


def distributed(op):
    return hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=op)


def weight_beside(optimizer, samples, *layers, loss_weights=None, **regularizers):
    """Returns the weight after a step with a sum of losses and `model.losses`.

    With a list of several `loss_weights`, the model has so many outputs, of which all
    but the first are 0 times the weight.
    """
    dense = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="zeros", **regularizers
    )
    x = keras.Input((1,))
    outputs = [keras.Sequential([dense, *layers])(x)]
    outputs += [0 * outputs[0] for _ in (loss_weights or [])[1:]]
    inputs = samples.reshape(-1, 1)
    losses = [keras.losses.MeanAbsoluteError(reduction="sum") for _ in outputs]
    step(
        keras.Model(x, outputs if len(outputs) > 1 else outputs[0]),
        optimizer,
        inputs,
        [np.ones_like(inputs) for _ in outputs],
        loss=losses,
        loss_weights=loss_weights,
    )
    return float(dense.kernel[0, 0])


@two_ranks
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(
    ("regularizer", "expected"),
    [
        # The gradient of the sum of the kernel is 1: (36 - 1) / 10.
        ("kernel_regularizer", 3.5),
        # The mean of w x has the gradient 4.5: (36 - 4.5) / 10.
        ("activity_regularizer", 3.15),
    ],
)
def test_a_loss_that_is_a_sum_beside_a_regularizer(regularizer, expected, outputs):
    options = {regularizer: keras.ops.sum}
    with pytest.raises(ValueError, match="would multiply the losses of reg") as error:
        weight_beside(distributed(hvd.Sum), SAMPLES[HALF], **options)
    assert "dense" in str(error.value)
    assert "loss_weights=[float(hvd.size())]" in str(error.value)
    assert "\n" not in str(error.value)
    # The remedy of the message.
    found = weight_beside(
        distributed(hvd.Average),
        SAMPLES[HALF],
        loss_weights=[float(SIZE)] * outputs,
        **options,
    )
    single = weight_beside(keras.optimizers.SGD(0.1), SAMPLES, **options)
    check([found, single], [expected, expected])


def half_of_the_sum(inputs):
    return keras.ops.sum(inputs) / 2


def mean_by_size(inputs):
    return keras.ops.mean(inputs) / SIZE


@two_ranks
@pytest.mark.parametrize(
    ("op", "added", "found", "one_process"),
    [
        # The sum of w x / 2 has the gradient 18, and its mean over ranks 9.
        (hvd.Sum, half_of_the_sum, (36 - 18) / 10, 1.8),
        (hvd.Average, half_of_the_sum, (36 - 9) / 10, 1.8),
        # The means of the ranks have the gradients 2.5 and 6.5.
        (hvd.Sum, keras.ops.mean, (36 - 9) / 10, 3.15),
        (hvd.Sum, mean_by_size, (36 - 4.5) / 10, 3.15),
        (hvd.Average, keras.ops.mean, (36 - 4.5) / 10, 3.15),
    ],
)
def test_a_loss_that_is_a_sum_beside_add_loss(op, added, found, one_process):
    weights = [float(SIZE)] if op == hvd.Average else None
    result = weight_beside(
        distributed(op), SAMPLES[HALF], AddLoss(added), loss_weights=weights
    )
    reference = keras.ops.mean if added is mean_by_size else added
    single = weight_beside(keras.optimizers.SGD(0.1), SAMPLES, AddLoss(reference))
    check([result, single], [found, one_process])


@two_ranks
@pytest.mark.parametrize(("divisor", "found"), [(1, 3.4), (SIZE, 3.5)])
def test_a_loop_that_adds_the_losses_of_a_model(divisor, found):
    inputs = SAMPLES[HALF].reshape(-1, 1)
    dense = keras.layers.Dense(
        1,
        use_bias=False,
        kernel_initializer="zeros",
        kernel_regularizer=keras.ops.sum,
    )
    model = keras.Sequential([keras.Input((1,)), dense])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.abs(1 - model(inputs)))
        loss += sum(model.losses) / divisor
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    gradients = tape.gradient(loss, model.trainable_variables)
    keras.optimizers.SGD(0.1).apply(gradients, model.trainable_variables)
    check([float(dense.kernel[0, 0])], [found])


@two_ranks
def test_a_loss_that_is_no_mean_over_samples():
    def weight_after(optimizer, samples, loss):
        inputs = samples.reshape(-1, 1)
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), dense])
        step(model, optimizer, inputs, np.ones_like(inputs), loss=loss)
        return float(dense.kernel[0, 0])

    def gathered(y_true, y_pred):
        return keras.losses.dice(hvd.allgather(y_true), hvd.allgather(y_pred))

    def distributed():
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))

    # Of n targets of 1 and predictions w x with the sum w s, the loss is
    # 1 - 2 w s / (n + w s), and its gradient at 1 is -2 s n / (n + s)^2.
    one_process = 1 + 2 * 36 * 8 / 44**2
    found = [
        weight_after(keras.optimizers.SGD(1.0), SAMPLES, keras.losses.Dice()),
        weight_after(distributed(), SAMPLES[HALF], keras.losses.Dice()),
        weight_after(distributed(), SAMPLES[HALF], gathered),
    ]
    check(found, [one_process, 1 + (80 / 14**2 + 208 / 30**2) / 2, one_process])


@two_ranks
@pytest.mark.parametrize(
    ("reduction", "found", "expected"),
    [
        # (10 / 4 + 26 / 4) / 2 instead of (10 + 0.1 * 26) / (4 + 0.1 * 4)
        ("mean_with_sample_weight", 0.45, 1.26 / 4.4),
        # (10 / 4 + 2.6 / 4) / 2 = 12.6 / 8
        ("sum_over_batch_size", 0.1575, 0.1575),
    ],
)
def test_sample_weights(reduction, found, expected):
    weights = np.repeat(np.array([1.0, 0.1], "float32"), 4)
    check(updates(reduction=reduction, weights=weights), [found, expected])


@two_ranks
def test_masks_of_unequal_length():
    masking = keras.layers.Masking(mask_value=0.0)
    found = updates(samples=SAMPLES * UNMASKED, shape=(-1, 4, 1), layers=[masking])
    # (10 / 4 + 5 / 1) / 2 instead of 15 / 5
    check(found, [0.375, 0.3])


@two_ranks
def test_sample_weights_in_place_of_a_mask():
    # (10 / 4 + 5 / 4) / 2 = 15 / 8
    check(updates(shape=(-1, 4, 1), weights=UNMASKED), [0.1875, 0.1875])


@two_ranks
@pytest.mark.parametrize(
    ("make", "as_dense", "found", "expected"),
    [
        # Four gradients of 1/4, or one of 1. Adam divides by the root of the sum of
        # squares, RMSprop by that of a tenth of it, and Adagrad begins at 0.1.
        (keras.optimizers.Adam, False, 0.2, 0.2),
        (keras.optimizers.Adam, True, 0.1, 0.2),
        (keras.optimizers.RMSprop, False, 0.2 / 0.1**0.5, 0.2 / 0.1**0.5),
        (keras.optimizers.RMSprop, True, 0.1 / 0.1**0.5, 0.2 / 0.1**0.5),
        (keras.optimizers.Adagrad, False, 0.1 / 0.35**0.5, 0.1 / 0.35**0.5),
        (keras.optimizers.Adagrad, True, 0.1 / 1.1**0.5, 0.1 / 0.35**0.5),
        (keras.optimizers.SGD, False, 0.1, 0.1),
        (keras.optimizers.SGD, True, 0.1, 0.1),
    ],
)
def test_rows_that_several_samples_share(make, as_dense, found, expected):
    def update(optimizer, count):
        embedding = keras.layers.Embedding(2, 1, embeddings_initializer="zeros")
        model = keras.Sequential([keras.Input((), dtype="int32"), embedding])
        step(model, optimizer, np.zeros(count, "int32"), np.ones((count, 1)))
        return float(embedding.embeddings[0, 0])

    optimizer = hvd.DistributedOptimizer(make(0.1), sparse_as_dense=as_dense)
    check([update(optimizer, 2), update(make(0.1), 4)], [found, expected])


class Normalizer:
    """A model that learns nothing but moving statistics."""

    def __init__(self, layer_class=keras.layers.BatchNormalization, momentum=0.5):
        self.layer = layer_class(momentum=momentum, epsilon=0.0)
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        self.model = keras.Sequential([keras.Input((1,)), self.layer, dense])

    def fit(self, samples, callbacks=(), *, distributed=True, **options):
        optimizer = keras.optimizers.SGD(0.0)
        if distributed:
            hvd.DistributedOptimizer(optimizer)
        self.model.compile(optimizer, "mse")
        self.model.fit(
            samples.reshape(-1, 1),
            np.zeros((samples.size, 1)),
            shuffle=False,
            verbose=0,
            callbacks=[*broadcast_for(optimizer), *callbacks],
            **options,
        )
        return self.statistics()

    def statistics(self):
        """Returns moving mean, moving variance, and what the model makes of an 8."""
        prediction = self.model(np.array([[8.0]], "float32"))
        layer = self.layer
        values = layer.moving_mean[0], layer.moving_variance[0], prediction[0, 0]
        return [float(value) for value in values]


# Samples 1 to 8 have the mean 4.5 and the variance 5.25; momentum is 0.5.
ONE_PROCESS = [2.25, 3.125, 5.75 / 3.125**0.5]


@two_ranks
def test_moving_statistics_of_one_process():
    check(Normalizer().fit(SAMPLES, distributed=False), ONE_PROCESS)


@two_ranks
def test_moving_statistics_differ_by_rank():
    # Both halves have the variance 1.25.
    mean = [1.25, 3.25][RANK]
    check(Normalizer().fit(SAMPLES[HALF]), [mean, 1.125, (8 - mean) / 1.125**0.5])


@two_ranks
def test_averaged_moving_statistics():
    average = hvd.callbacks.AverageMovingStatisticsCallback()
    check(Normalizer().fit(SAMPLES[HALF], [average]), ONE_PROCESS)


@two_ranks
def test_synchronized_batch_normalization():
    normalizer = Normalizer(hvd.SyncBatchNormalization)
    check(normalizer.fit(SAMPLES[HALF]), ONE_PROCESS)


def batches_of_all_ranks(steps, size):
    """Returns an array [steps, ranks, size]."""
    return np.random.default_rng(1).normal(3, 2, (steps, SIZE, size)).astype("float32")


def fit_all_and_own(data, *, epochs=1):
    """Returns the statistics of one process, and those of all ranks."""
    steps, _, size = data.shape
    options = {"epochs": epochs, "steps_per_epoch": steps // epochs}
    expected = Normalizer(momentum=0.9).fit(
        data, distributed=False, batch_size=size * SIZE, **options
    )
    average = hvd.callbacks.AverageMovingStatisticsCallback()
    found = Normalizer(momentum=0.9).fit(
        data[:, RANK], [average], batch_size=size, **options
    )
    oracle.assert_bitwise_equal_over_ranks(found)
    return expected, found


@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.release), 4])
def test_means_that_differ_alike_in_each_step(epochs):
    data = batches_of_all_ranks(steps=1, size=8) + 5 * np.arange(SIZE)[:, np.newaxis]
    expected, found = fit_all_and_own(np.repeat(data, 12, axis=0), epochs=epochs)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.release), 4])
def test_of_shuffled_data_the_variance_is_a_little_low(epochs):
    data = batches_of_all_ranks(steps=100, size=8)
    (mean, variance, _), (found_mean, found_variance, _) = fit_all_and_own(
        data, epochs=epochs
    )
    assert found_mean == pytest.approx(mean, rel=1e-5)
    assert 1 - 1 / 8 < found_variance / variance < 1


def test_validation_on_rank_0_alone():
    data = batches_of_all_ranks(steps=6, size=4)
    validation = (data[0, 0].reshape(-1, 1), np.zeros((4, 1)))
    callbacks = [
        hvd.callbacks.AverageMovingStatisticsCallback(),
        hvd.callbacks.MetricAverageCallback(),
    ]
    found = Normalizer().fit(
        data[:, RANK],
        callbacks,
        batch_size=4,
        epochs=2,
        validation_data=validation if RANK == 0 else None,
    )
    oracle.assert_bitwise_equal_over_ranks(found)


def test_local_layers_keep_their_statistics():
    normalizer = Normalizer()
    normalizer.layer.moving_mean.assign([float(RANK)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    optimizer.register_local_var(normalizer.layer.moving_mean)
    normalizer.model.compile(optimizer, "mse")
    moving_statistics.average_moving_statistics(normalizer.model)
    assert float(normalizer.layer.moving_mean[0]) == RANK


@pytest.mark.parametrize("layer_class", [hvd.SyncBatchNormalization, None])
def test_nothing_to_average_costs_no_communication(layer_class, monkeypatch):
    monkeypatch.setattr(moving_statistics, "transport", None)
    model = Normalizer(layer_class).model if layer_class else oracle.build_model()
    moving_statistics.average_moving_statistics(model)


@pytest.mark.parametrize(
    ("aggregation", "expected", "is_named"),
    [
        ("none", 0.0, True),
        ("sum", 0.0, True),
        ("mean", 0.75 * sum(range(SIZE)) / SIZE, False),
        ("only_first_replica", 0.0, False),
    ],
)
def test_weights_that_a_layer_updates_in_its_call(aggregation, expected, is_named):
    layer = oracle.Centre(aggregation)
    model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1)])
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True
    )
    x = np.full((4, 1), float(RANK), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(
            *(x, x),
            batch_size=2,
            verbose=0,
            callbacks=[
                hvd.callbacks.BroadcastGlobalVariablesCallback(0),
                hvd.callbacks.AverageMovingStatisticsCallback(),
            ],
        )
    # Two steps: 0.5 of the batch, then 0.5 of this and 0.5 of the batch.
    assert layer.centre.numpy() == pytest.approx(expected)
    named = [str(w.message) for w in caught if "/centre, which a layer" in str(w)]
    assert len(named) == (is_named and RANK == 0)


def test_averaging_twice_changes_nothing():
    layer = (normalizer := Normalizer(momentum=0.99)).layer
    layer.moving_mean.assign([1e3 + RANK / 3])
    moving_statistics.average_moving_statistics(normalizer.model)
    once = normalizer.statistics()
    moving_statistics.average_moving_statistics(normalizer.model, steps=1)
    assert normalizer.statistics() == once
    assert once[0] == pytest.approx(1e3 + (SIZE - 1) / 6, rel=1e-6)


@pytest.mark.skipif(
    "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters,
    reason="Keras has it from 3.14 on",
)
def test_renormalisation_goes_on_from_the_averaged_variance():
    layer = keras.layers.BatchNormalization(renorm=True, momentum=1.0)
    model = keras.Sequential([keras.Input((1,)), layer])
    layer.moving_variance.assign([1.0 + RANK])
    moving_statistics.average_moving_statistics(model)
    averaged = float(layer.moving_variance[0])
    assert averaged == 1 + (SIZE - 1) / 2
    layer(np.zeros((4, 1), "float32"), training=True)
    assert float(layer.moving_variance[0]) == pytest.approx(averaged, rel=1e-5)


def test_what_train_and_evaluate_evaluates_is_the_model_of_every_rank():
    data = batches_of_all_ranks(steps=6, size=4)
    normalizer = Normalizer(momentum=0.9)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    normalizer.model.compile(optimizer, "mse")

    def batches(samples):
        inputs = samples.reshape(-1, 1)
        pairs = tf.data.Dataset.from_tensor_slices((inputs, np.zeros_like(inputs)))
        return pairs.batch(4)

    result = training.train_and_evaluate(
        lambda: normalizer.model,
        training.TrainSpec(
            input_fn=lambda start, end: batches(data[start:end, RANK]),
            max_steps=6,
            pass_steps=3,
            local_batch_size=4,
        ),
        training.EvalSpec(input_fn=lambda: batches(data[:, RANK])),
        world=World(rank=RANK, size=SIZE),
    )
    oracle.assert_bitwise_equal_over_ranks(normalizer.statistics())
    loss = normalizer.model.evaluate(batches(data), verbose=0)
    assert result.test_metrics["loss"] == pytest.approx(loss, rel=1e-5)
