"""Exports of ranks whose statistics differ: the model that was evaluated."""

import pathlib

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import JobError, World
from hvdtrain.training import BestExporter, FinalExporter, LatestExporter

RANK, SIZE = hvd.rank(), hvd.size()
STEPS = 6
INPUTS, _ = oracle.samples(steps=STEPS)
LABELS = INPUTS[:, : oracle.CLASSES].argmax(axis=1)
# The ranks' samples differ, and so their moving statistics.
INPUTS[:, 0] += 3 * np.resize(np.arange(SIZE), len(INPUTS))


class Weights(keras.callbacks.Callback):
    """The weights in training after `step` steps, on this rank."""

    def __init__(self, step):
        super().__init__()
        self._step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self._step:
            self.weights = self.model.get_weights()


class Observer:
    def __init__(self, broken):
        self._broken = broken
        self.metrics = {}
        self.exports = []

    def on_start(self, start):
        pass

    def on_progress(self, progress):
        pass

    def on_checkpoint(self, step, text):
        pass

    def on_evaluation(self, step, metrics):
        self.metrics[step] = metrics
        if step == STEPS and self._broken:
            self._broken.rmdir()
            self._broken.write_text("no directory")

    def on_export(self, step, text):
        self.exports.append((step, text.split()[0]))


def model():
    keras.utils.set_random_seed(7)
    network = keras.Sequential(
        [
            keras.Input((oracle.FEATURES,)),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(8, activation="tanh"),
            hvd.SyncBatchNormalization(momentum=0.5),
            keras.layers.Dense(oracle.CLASSES, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.8)
    network.compile(optimizer, oracle.LOSS, jit_compile=False)
    return network


def batches(start_step, end_step):
    mine = [oracle.shard(INPUTS), oracle.shard(LABELS)]
    size = oracle.LOCAL_BATCH_SIZE
    part = tuple(array[start_step * size : end_step * size] for array in mine)
    return tf.data.Dataset.from_tensor_slices(part).batch(size)


def train(model_dir, *callbacks, broken=None):
    observer = Observer(broken)
    spec = training.TrainSpec(
        input_fn=batches,
        max_steps=STEPS,
        pass_steps=STEPS,
        local_batch_size=oracle.LOCAL_BATCH_SIZE,
        callbacks=lambda plan: callbacks,
        steps_per_execution=1,
    )
    exporters = LatestExporter(), BestExporter(), FinalExporter()
    result = training.train_and_evaluate(
        model,
        spec,
        training.EvalSpec(
            input_fn=lambda: batches(0, STEPS), throttle_steps=2, exporters=exporters
        ),
        training.RunConfig(model_dir=str(model_dir)),
        world=World(rank=RANK, size=SIZE),
        observers=[observer],
    )
    return result, observer


def loss(predictions):
    return -np.log(predictions[np.arange(len(LABELS)), LABELS]).mean()


@pytest.mark.long
def test_what_is_exported_is_what_was_evaluated(tmp_path):
    model_dir = pathlib.Path(hvd.broadcast_object(str(tmp_path), name="model_dir"))
    weights = Weights(step=2)
    result, observer = train(model_dir, weights)
    assert bool(observer.exports) == (RANK == 0)
    if RANK > 0:
        return
    latest = model_dir / "export" / "latest"
    assert sorted(observer.metrics) == [2, 4, 6]
    for step, metrics in observer.metrics.items():
        path = latest / f"step-{step:08}"
        module = tf.saved_model.load(path)
        found = loss(module.serve(INPUTS).numpy())
        assert found == pytest.approx(metrics["loss"], rel=1e-5)
        # Loading needs TensorFlow alone.
        assert b"orovod" not in (path / "saved_model.pb").read_bytes()
    assert found == pytest.approx(result.test_metrics["loss"], rel=1e-5)
    # Neither the moving averages of the weights, nor the statistics of all ranks.
    result.model.set_weights(weights.weights)
    local = loss(result.model.predict(INPUTS, verbose=0))
    assert abs(local - observer.metrics[2]["loss"]) > 1e-2


@pytest.mark.long
def test_a_failed_export_of_the_last_step_ends_all_ranks(tmp_path):
    model_dir = pathlib.Path(hvd.broadcast_object(str(tmp_path), name="model_dir"))
    final = model_dir / "export" / "final"
    with pytest.raises(
        JobError, match=r"^rank 0 on .*: Cannot write .*: Not a directory"
    ):
        train(model_dir, broken=final)
    if RANK == 0:
        final.unlink()
    result, observer = train(model_dir)
    assert result.start_step == STEPS
    if RANK == 0:
        assert observer.exports == [(STEPS, "written")]
        module = tf.saved_model.load(final / f"step-{STEPS:08}")
        found = loss(module.serve(INPUTS).numpy())
        assert found == pytest.approx(result.test_metrics["loss"], rel=1e-5)
