"""Batches that are not finite, against the same training without them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from toy import BATCH, batches

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import JobError, World
from hvdtrain.keras.replication import get_hook
from hvdtrain.training import EvalSpec, RunConfig, TrainSpec

STEPS, POISONED = 12, 5
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(autouse=True)
def _horovod(monkeypatch):
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    hvd.init()


def poisoned(start_step, end_step, *, steps=(POISONED,)):
    def poison(step, pair):
        is_poisoned = tf.reduce_any(tf.equal(step, tf.constant(steps, tf.int64)))
        return tf.where(is_poisoned, np.nan, pair[0]), pair[1]

    return batches(start_step, end_step).enumerate(start_step).map(poison)


def network(optimizer, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
    )
    model.compile(optimizer, CROSSENTROPY, metrics=["accuracy"], **options)
    return model


def train(
    make_model,
    directory=None,
    *,
    max_steps=STEPS,
    input_fn=poisoned,
    test_input_fn=lambda: batches(0, 10),
    steps_per_execution=1,
    skip_nonfinite=True,
):
    return training.train_and_evaluate(
        make_model,
        TrainSpec(
            input_fn=input_fn,
            max_steps=max_steps,
            pass_steps=STEPS,
            local_batch_size=BATCH,
            steps_per_execution=steps_per_execution,
        ),
        EvalSpec(input_fn=test_input_fn),
        RunConfig(
            model_dir=directory and str(directory),
            save_every_steps=1,
            skip_nonfinite=skip_nonfinite,
        ),
        world=World(),
    )


def train_without_it(optimizer, *, window=1):
    """The model of plain Keras, and the losses, without the window of the batch."""
    model, losses = network(optimizer), []
    for step, (x, y) in enumerate(batches(0, STEPS)):
        if step // window != POISONED // window:
            model.reset_metrics()
            losses.append(model.train_on_batch(x, y)[0])
            continue
        optimizer._iterations.assign_add(1)
        if step != POISONED:
            losses.append(float(CROSSENTROPY(y, model(x))))
    optimizer.finalize_variable_values(model.trainable_variables)
    return model, losses


def assert_same_state(model, expected):
    for found, wanted in zip(
        [*model.variables, *model.optimizer.variables],
        [*expected.variables, *expected.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_array_equal(found.numpy(), wanted.numpy(), wanted.path)


@pytest.mark.parametrize(
    ("make_optimizer", "options", "steps_per_execution"),
    [
        pytest.param(
            *(keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True}, 1),
            marks=pytest.mark.release,
        ),
        pytest.param(
            *(keras.optimizers.SGD, {"gradient_accumulation_steps": 4}, 5),
            marks=pytest.mark.release,
        ),
        pytest.param(
            *(keras.optimizers.AdamW, {"global_clipnorm": 0.1}, 4),
            marks=pytest.mark.release,
        ),
        (keras.optimizers.Nadam, {"use_ema": True, "ema_momentum": 0.9}, 1),
    ],
)
def test_the_others_are_trained_on(make_optimizer, options, steps_per_execution):
    result = train(
        lambda: network(make_optimizer(0.1, **options)),
        steps_per_execution=steps_per_execution,
    )
    window = options.get("gradient_accumulation_steps", 1)
    expected, losses = train_without_it(make_optimizer(0.1, **options), window=window)
    assert_same_state(result.model, expected)
    assert int(result.model.optimizer._iterations) == STEPS
    assert result.skipped_updates == 1
    assert len(losses) == STEPS - 1
    assert result.train_metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "gradient"),
    [
        ({}, np.nan),
        ({"clipvalue": 1.0}, np.inf),
        # The square overflows.
        ({"global_clipnorm": 1.0}, 1e30),
    ],
)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_moving_averages_and_clipping(options, gradient, is_sparse):
    variable = keras.Variable([[1.0]])
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, **options)
    hvd.DistributedOptimizer(optimizer).build([variable])
    count = get_hook(optimizer).skip_nonfinite()
    (average,) = optimizer._model_variables_moving_average

    @tf.function
    def step(value):
        value = tf.reshape(value, [1, 1])
        if is_sparse:
            value = tf.IndexedSlices(value, tf.constant([0]), tf.constant([1, 1]))
        optimizer.apply([value], [variable])

    found = []
    for each in (gradient, 1.0, gradient, 1.0):
        step(tf.constant(each))
        found.append((float(variable[0, 0]), float(average[0, 0])))
    # The first averages are the first weights.
    assert found == [(1.0, 1.0), (0.0, 0.5), (0.0, 0.5), (-1.0, -0.25)]
    assert int(count) == 2


def test_overflow_of_the_loss_scale_is_not_counted():
    def scaled():
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0)

    result = train(lambda: network(scaled()))
    expected = network(scaled())
    for x, y in poisoned(0, STEPS):
        expected.train_on_batch(x, y)
    assert_same_state(result.model, expected)
    assert float(result.model.optimizer.dynamic_scale) == 1.0
    assert result.skipped_updates == 0
    assert np.isfinite(result.train_metrics["loss"])


@pytest.mark.release
def test_the_count_is_in_checkpoints_and_the_flag_may_be_set_later(tmp_path):
    def make_model():
        return network(keras.optimizers.Adam(0.1))

    def input_fn(start_step, end_step):
        return poisoned(start_step, end_step, steps=(POISONED, 8))

    expected = train(make_model, input_fn=input_fn)
    with pytest.raises(JobError, match=r"no longer finite|loss became"):
        train(make_model, tmp_path, input_fn=input_fn, skip_nonfinite=False)
    counts = []
    for max_steps in (POISONED + 1, STEPS, STEPS):
        result = train(make_model, tmp_path, input_fn=input_fn, max_steps=max_steps)
        assert result.start_step > 0
        counts.append(result.skipped_updates)
    assert counts == [1, 2, 2]
    assert expected.skipped_updates == 2
    assert_same_state(result.model, expected.model)
    assert result.history == expected.history


def test_losses_of_outputs():
    def make_model():
        inputs = keras.Input((6,))
        outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"}
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.0), {"a": "mse", "b": "mse"})
        for layer in model.layers[1:]:
            layer.kernel.assign(tf.zeros_like(layer.kernel))
        return model

    def input_fn(start_step, end_step):
        # Losses: 1 and the square of the step, without that of the second step.
        def targets(step, pair):
            b = tf.where(step == 1, np.nan, tf.cast(step, tf.float32))
            ones = tf.ones((BATCH, 1))
            return pair[0], {"a": ones, "b": b * ones}

        return batches(start_step, end_step).enumerate(start_step).map(targets)

    result = train(
        make_model, max_steps=4, input_fn=input_fn, test_input_fn=lambda: input_fn(0, 1)
    )
    losses = {"a_loss": 1.0, "b_loss": (0 + 4 + 9) / 3, "loss": 1 + (0 + 4 + 9) / 3}
    assert result.train_metrics == pytest.approx(losses)
    assert result.skipped_updates == 1


def test_an_evaluation_that_is_not_finite_ends_the_job():
    with pytest.raises(JobError, match=f"loss became nan before step {STEPS}"):
        train(
            lambda: network(keras.optimizers.SGD(0.1)),
            test_input_fn=lambda: poisoned(0, STEPS),
        )


def test_weights_that_are_not_finite_end_the_job():
    def make_model():
        model = network(keras.optimizers.SGD(0.1))
        model.layers[-1].bias.assign([np.inf, 0.0])
        return model

    with pytest.raises(JobError, match="no longer finite at step 2:"):
        train(make_model)


def test_nothing_but_batches_that_are_not_finite():
    result = train(
        lambda: network(keras.optimizers.SGD(0.1)),
        input_fn=lambda start, end: poisoned(start, end, steps=[*range(STEPS)]),
    )
    assert np.isnan(result.train_metrics["loss"])
    assert result.skipped_updates == STEPS
    initial = network("sgd").get_weights()
    for found, wanted in zip(result.model.get_weights(), initial, strict=True):
        np.testing.assert_array_equal(found, wanted)
