"""Logs of an epoch are those of one process that trains on the big batch."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd

EPOCHS = 2


class LogRecorder(keras.callbacks.Callback):
    """Stands behind MetricAverageCallback and notes what it sees."""

    def __init__(self):
        super().__init__()
        self.epochs = []
        self.at_end = None

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))

    def on_train_end(self, logs=None):
        self.at_end = dict(logs)


class Put(keras.callbacks.Callback):
    """Puts entries into the logs of each epoch."""

    def __init__(self, **entries):
        super().__init__()
        self.entries = entries

    def on_epoch_end(self, epoch, logs=None):
        logs.update(self.entries)


class DictMetric(keras.metrics.Metric):
    """A metric whose result is a dict: means of both parts of the samples."""

    def __init__(self):
        super().__init__(name="dict_metric")
        self.num_shards = [keras.metrics.Mean(name=name) for name in ("low", "high")]

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.num_shards[0].update_state(y_pred[:, 0])
        self.num_shards[1].update_state(y_pred[:, 1])

    def reset_state(self):
        for part in self.num_shards:
            part.reset_state()

    def result(self):
        return {part.name: part.result() for part in self.num_shards}


def one_hot_samples(steps, seed):
    rng = np.random.default_rng(seed)
    count = steps * oracle.LOCAL_BATCH_SIZE * hvd.size()
    inputs = rng.normal(size=(count, oracle.FEATURES)).astype("float32")
    labels = np.eye(oracle.CLASSES, dtype="float32")[
        rng.integers(0, oracle.CLASSES, count)
    ]
    return inputs, labels, rng.uniform(0.5, 2, count).astype("float32")


def compiled_model(optimizer):
    model = oracle.build_model()
    model.compile(
        optimizer,
        "categorical_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(name="auc"), DictMetric()],
        weighted_metrics=["mse", keras.metrics.F1Score(average=None)],
    )
    return model


def fit(model, data, validation, batch_size, *callbacks):
    oracle.fit(
        model,
        *data[:2],
        batch_size,
        sample_weight=data[2],
        epochs=EPOCHS,
        validation_data=validation,
        validation_batch_size=5,
        callbacks=callbacks,
    )


def validation_shard(array):
    """Unequal parts: every rank but the last one has three samples."""
    start = 3 * hvd.rank()
    is_last = hvd.rank() == hvd.size() - 1
    return array[start:] if is_last else array[start : start + 3]


class Evaluate(keras.callbacks.Callback):
    """Evaluates after a batch and an epoch, and may log the results of the epoch."""

    def __init__(self, data, *, prefix=None, after_batch=None):
        super().__init__()
        self.data, self.prefix, self.after_batch = data, prefix, after_batch

    def evaluate(self):
        return self.model.evaluate(
            *self.data[:2], sample_weight=self.data[2], verbose=0, return_dict=True
        )

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.after_batch:
            self.evaluate()

    def on_epoch_end(self, epoch, logs=None):
        found = self.evaluate()
        if self.prefix is not None:
            logs.update({self.prefix + name: value for name, value in found.items()})


def test_training_and_validation_logs_equal_those_of_the_big_batch():
    data, validation = one_hot_samples(4, seed=1), one_hot_samples(3, seed=2)
    single = compiled_model(keras.optimizers.SGD(0.1))
    expected = LogRecorder()
    size = oracle.LOCAL_BATCH_SIZE * hvd.size()
    fit(single, data, validation, size, expected)

    model = compiled_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    found = LogRecorder()
    fit(
        model,
        [oracle.shard(array) for array in data],
        [validation_shard(array) for array in validation],
        oracle.LOCAL_BATCH_SIZE,
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # It resets the metrics, of which the logs have the results.
        Evaluate([array[:4] for array in data]),
        hvd.callbacks.MetricAverageCallback(),
        found,
    )
    assert {"auc", "low", "val_auc", "val_high", "val_f1_score"} <= set(found.at_end)
    for epoch in range(EPOCHS):
        assert set(found.epochs[epoch]) == set(expected.epochs[epoch])
        for name, value in expected.epochs[epoch].items():
            np.testing.assert_allclose(
                found.epochs[epoch][name], value, rtol=2e-5, err_msg=name
            )
    np.testing.assert_equal(found.at_end, found.epochs[-1])
    assert model.history.history["val_auc"] == [e["val_auc"] for e in found.epochs]
    oracle.assert_bitwise_equal_over_ranks(
        [value for epoch in found.epochs for _, value in sorted(epoch.items())]
    )


# Evaluations after batch 1 of 4, and after the last one, change the logs of the epoch,
# also in one process.
@pytest.mark.long
@pytest.mark.parametrize("after_batch", [None, 1, 3])
def test_a_callback_that_evaluates_and_logs(after_batch):
    data, test = one_hot_samples(4, seed=1), one_hot_samples(3, seed=2)
    single = compiled_model(keras.optimizers.SGD(0.1))
    expected = LogRecorder()
    size = oracle.LOCAL_BATCH_SIZE * hvd.size()
    evaluate = Evaluate(test, prefix="val_", after_batch=after_batch)
    fit(single, data, None, size, evaluate, expected)

    model = compiled_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    found = LogRecorder()
    fit(
        model,
        [oracle.shard(array) for array in data],
        None,
        oracle.LOCAL_BATCH_SIZE,
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        Evaluate(
            [oracle.shard(array) for array in test],
            prefix="val_",
            after_batch=after_batch,
        ),
        hvd.callbacks.MetricAverageCallback(),
        found,
    )
    for logs, wanted in zip(found.epochs, expected.epochs, strict=True):
        assert {"auc", "val_auc"} <= set(logs) == set(wanted)
        for name, value in wanted.items():
            np.testing.assert_allclose(logs[name], value, rtol=2e-5, err_msg=name)


@pytest.mark.long
def test_validation_on_rank_0_alone_reaches_every_rank():
    data, validation = one_hot_samples(2, seed=1), one_hot_samples(2, seed=2)
    model = compiled_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    found = LogRecorder()
    fit(
        model,
        [oracle.shard(array) for array in data],
        validation if hvd.rank() == 0 else None,
        oracle.LOCAL_BATCH_SIZE,
        hvd.callbacks.MetricAverageCallback(),
        found,
    )
    expected = model.evaluate(
        *validation[:2], sample_weight=validation[2], verbose=0, return_dict=True
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found.epochs[-1][f"val_{name}"], value, rtol=1e-5)
    oracle.assert_bitwise_equal_over_ranks(
        [value for _, value in sorted(found.epochs[-1].items())]
    )


def logs_of_one_epoch(model, *callbacks):
    found = LogRecorder()
    callbacks = [*callbacks, hvd.callbacks.MetricAverageCallback(), found]
    oracle.fit_shard(model, *oracle.samples(steps=2), callbacks=callbacks)
    return found.epochs[0]


def sgd_model(model_class=keras.Sequential):
    model = oracle.build_model(model_class)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), oracle.LOSS)
    return model


@pytest.mark.ranks
def test_other_numbers_are_averaged_over_the_ranks_that_log_them():
    entries = {"rank": float(hvd.rank()), "lr": 0.1, "text": "as it is"}
    kept = {"flag": True, "list": [[1], [2, 3]]}
    entries |= kept
    for kind in (int, np.int64, np.float32, np.array, tf.constant):
        entries[kind.__name__] = kind(hvd.rank())
    if hvd.rank() == 1:
        entries["mine"] = 7.0
    logs = logs_of_one_epoch(sgd_model(), Put(**entries))
    assert logs["rank"] == (hvd.size() - 1) / 2
    for kind in ("int", "int64", "float32", "array", "constant"):
        assert logs[kind] == (hvd.size() - 1) / 2
    assert (logs["lr"], logs["mine"], logs["text"]) == (0.1, 7.0, "as it is")
    assert {key: logs[key] for key in kept} == kept


def test_a_number_under_a_metric_s_name_is_not_taken_for_the_metric():
    logs = logs_of_one_epoch(sgd_model(), Put(loss=100.0 + hvd.rank()))
    assert logs["loss"] == 100 + (hvd.size() - 1) / 2


def test_later_evaluations_keep_no_states():
    model = sgd_model()
    average = hvd.callbacks.MetricAverageCallback()
    inputs, labels = oracle.samples(steps=2)
    for _ in range(2):
        oracle.fit_shard(model, inputs, labels, callbacks=[average, average])
        assert "reset_metrics" not in vars(model)
        model.evaluate(inputs, labels, verbose=0)


def test_nan_on_one_rank_is_nan_everywhere():
    logs = logs_of_one_epoch(sgd_model(), Put(odd=np.nan if hvd.rank() == 1 else 1.0))
    assert np.isnan(logs["odd"])


class TwoLosses(oracle.CustomStepModel):
    """A `train_step` that returns more than the model has metrics."""

    def train_step(self, data):
        return {**super().train_step(data), "rank": float(hvd.rank())}


def test_what_a_custom_train_step_returns_is_averaged():
    model = sgd_model(TwoLosses)
    seen = LogRecorder()
    logs = logs_of_one_epoch(model, seen)
    local = hvd.allgather_object(seen.epochs[0]["loss"], name="losses")
    assert len(set(local)) == hvd.size()
    assert logs["loss"] == pytest.approx(np.mean(local))
    assert logs["rank"] == (hvd.size() - 1) / 2


def test_plateau_and_early_stopping_decide_alike():
    # One validation set, which the others weigh by -1: rank 0's own loss gets better,
    # theirs get worse. Alone they would part.
    model = sgd_model()
    inputs, labels = oracle.samples(steps=2)
    local, logs = LogRecorder(), LogRecorder()
    plateau = keras.callbacks.ReduceLROnPlateau(
        monitor="val_loss", patience=0, factor=0.5, min_delta=0.0, min_lr=1e-6
    )
    stopping = keras.callbacks.EarlyStopping(monitor="val_loss", patience=2)
    oracle.fit_shard(
        model,
        inputs,
        labels,
        validation_data=(
            inputs,
            labels,
            np.full(len(inputs), 1.0 if hvd.rank() == 0 else -1.0),
        ),
        epochs=30,
        callbacks=[
            local,
            hvd.callbacks.MetricAverageCallback(),
            plateau,
            stopping,
            logs,
        ],
    )
    improves = local.epochs[-1]["val_loss"] < local.epochs[0]["val_loss"]
    assert improves == (hvd.rank() == 0)
    oracle.assert_bitwise_equal_over_ranks(
        [len(logs.epochs), [epoch["learning_rate"] for epoch in logs.epochs]]
    )
    assert len(logs.epochs) < 30


def unbuilt_metrics():
    model = compiled_model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    average = hvd.callbacks.MetricAverageCallback()
    average.set_model(model)
    average.on_epoch_begin(0)
    return model, average


def test_metrics_that_have_not_been_built_are_left_out():
    _, average = unbuilt_metrics()
    logs = {"rank": float(hvd.rank())}
    average.on_epoch_end(0, logs)
    assert logs == {"rank": (hvd.size() - 1) / 2}
    average.on_epoch_end(0)


def test_metrics_that_one_rank_has_not_built():
    model, average = unbuilt_metrics()
    inputs, labels, _ = one_hot_samples(1, seed=1)
    if hvd.rank() > 0:
        model.test_on_batch(inputs, labels)
    with pytest.raises(ValueError, match="at least one batch to every rank"):
        average.on_epoch_end(0, {})
