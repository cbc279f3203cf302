"""Exports on one rank: which there are, and what they compute."""

import functools
import os
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
import toy

from hvdtrain import training
from hvdtrain.job import JobError, World
from hvdtrain.training import BestExporter, FinalExporter, LatestExporter
from hvdtrain.training.exporting import Exports

X, Y = toy.X[:200], toy.Y[:200]
BATCH = toy.BATCH
batches = functools.partial(toy.batches, num_samples=len(X))
ALL = (LatestExporter(exports_to_keep=2), BestExporter(), FinalExporter())
# The loss falls: the first evaluation has the highest.
WORST = BestExporter("worst", mode="max")


pytestmark = pytest.mark.usefixtures("one_rank")


class Recorder:
    """Observes a job; `on_step` is called with the step of each evaluation."""

    def __init__(self, on_step=lambda step: None):
        self._on_step = on_step
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
        self._on_step(step)

    def on_export(self, step, text):
        self.exports.append((step, text))


class KilledError(Exception):
    """Ends a job without a chance to save."""


def model(*layers, **compile_args):
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(8), keras.layers.BatchNormalization(), *layers]
    network = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(2)])
    network.compile(
        keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        **compile_args,
    )
    return network


def train(
    model_dir,
    exporters,
    *,
    model_fn=model,
    max_steps=50,
    on_step=lambda step: None,
    callbacks=(),
):
    """Evaluate every 10 steps, save every 20."""
    recorder = Recorder(on_step)
    result = training.train_and_evaluate(
        model_fn,
        training.TrainSpec(
            input_fn=batches,
            max_steps=max_steps,
            pass_steps=20,
            local_batch_size=BATCH,
            steps_per_execution=10,
            callbacks=lambda plan: callbacks,
        ),
        training.EvalSpec(
            input_fn=lambda: batches(0, 50), throttle_steps=10, exporters=exporters
        ),
        training.RunConfig(model_dir=model_dir and str(model_dir), save_every_steps=20),
        world=World(),
        observers=[recorder],
    )
    return result, recorder


def names(model_dir, exporter):
    """The exported steps, and anything else in the directory."""
    found = sorted(path.name for path in (model_dir / "export" / exporter).iterdir())
    return [name.removeprefix("step-000000") for name in found]


def loaded(model_dir, exporter, step):
    path = model_dir / "export" / exporter / f"step-{step:08}"
    # Its functions need a reference to it.
    module = tf.saved_model.load(path)
    return module.serve(X).numpy()


def loss_and_accuracy(logits):
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    loss = -np.log(chances[np.arange(len(Y)), Y]).mean()
    return loss, (logits.argmax(axis=1) == Y).mean()


def check_metrics(model_dir, exporter, step, reported):
    loss, accuracy = loss_and_accuracy(loaded(model_dir, exporter, step))
    assert reported["loss"] == pytest.approx(loss, rel=1e-5)
    assert reported["accuracy"] == pytest.approx(accuracy)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A job that nothing interrupts: its directory, result and recorder."""
    model_dir = tmp_path_factory.mktemp("whole")
    left = model_dir / "export" / "best" / ".partial-00000000-step-00000010"
    (left / "variables").mkdir(parents=True)
    (left / "variables" / "half").write_text("half")
    return model_dir, *train(model_dir, [*ALL, WORST])


def test_exports_compute_the_metrics_that_were_reported(whole):
    model_dir, result, recorder = whole
    losses = [metrics["loss"] for metrics in recorder.metrics.values()]
    assert losses == sorted(losses, reverse=True)
    assert names(model_dir, "latest") == ["40", "50"]
    assert names(model_dir, "best") == ["10", "20", "30", "40", "50"]
    assert names(model_dir, "final") == ["50"]
    assert names(model_dir, "worst") == ["10"]
    for exporter, step in [("best", 10), ("best", 30), ("latest", 40), ("final", 50)]:
        check_metrics(model_dir, exporter, step, recorder.metrics[step])
    predictions = result.model.predict(X, verbose=0)
    np.testing.assert_allclose(loaded(model_dir, "final", 50), predictions, rtol=1e-5)
    steps = [step for step, _ in recorder.exports]
    assert steps == [10, 10, 10, 20, 20, 30, 30, 40, 40, 50, 50, 50]
    path = model_dir / "export" / "latest" / "step-00000010"
    assert recorder.exports[0][1].startswith(f"written to {path} in ")


@pytest.mark.release
def test_exports_do_not_change_the_training(whole):
    _, result, _ = whole
    plain, _ = train(None, [])
    for mine, theirs in zip(
        result.model.get_weights(), plain.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.long
def test_a_killed_job_ends_with_the_same_exports(whole, tmp_path):
    # The best is due at each evaluation: the worst shows that those before are known.
    exporters = [LatestExporter(exports_to_keep=2), WORST, FinalExporter()]

    def kill(step):
        if step == 40:
            raise KilledError

    with pytest.raises(KilledError):
        train(tmp_path, exporters, on_step=kill)
    assert names(tmp_path, "latest") == ["20", "30"]
    result, recorder = train(tmp_path, exporters)
    assert result.start_step == 20
    # Those of the latest and the final: the worst was before.
    assert [step for step, _ in recorder.exports] == [30, 40, 50, 50]
    for exporter in ("latest", "final", "worst"):
        assert names(tmp_path, exporter) == names(whole[0], exporter)
    for exporter, step in [("latest", 40), ("final", 50)]:
        np.testing.assert_array_equal(
            loaded(tmp_path, exporter, step), loaded(whole[0], exporter, step)
        )


@pytest.mark.long
def test_a_job_that_a_callback_ends_after_its_evaluation_has_the_final_export(tmp_path):
    # Nothing is better by 1: the training ends with the second epoch.
    stop = keras.callbacks.EarlyStopping("val_loss", min_delta=1, patience=1)
    result, recorder = train(tmp_path, ALL, max_steps=60, callbacks=[stop])
    assert (result.step, [*recorder.metrics]) == (40, [10, 20, 30, 40])
    assert names(tmp_path, "final") == ["40"]
    check_metrics(tmp_path, "final", 40, result.test_metrics)
    # Each once.
    steps = [step for step, _ in recorder.exports]
    assert steps == [10, 10, 20, 20, 30, 30, 40, 40, 40]


@pytest.mark.release
def test_a_finished_job_writes_what_is_missing(tmp_path):
    def break_final(step):
        if step == 30:
            (tmp_path / "export" / "final").rmdir()
            (tmp_path / "export" / "final").write_text("no directory")

    reason = r"^Cannot write .*/final/step-00000030: Not a directory; expected "
    with pytest.raises(JobError, match=reason):
        train(tmp_path, ALL, max_steps=30, on_step=break_final)
    with pytest.raises(JobError, match=r"^Cannot write .*/export/final: File exists; "):
        train(tmp_path, ALL, max_steps=30)
    (tmp_path / "export" / "final").unlink()
    result, recorder = train(tmp_path, ALL, max_steps=30)
    assert result.start_step == 30
    assert [step for step, _ in recorder.exports] == [30]
    check_metrics(tmp_path, "final", 30, result.test_metrics)
    _, recorder = train(tmp_path, ALL, max_steps=30)
    assert recorder.exports == []


@pytest.mark.long
def test_training_goes_on_after_a_failed_export(tmp_path):
    directory = tmp_path / "export" / "best"

    def break_and_repair(step):
        if step == 10:
            directory.rename(tmp_path / "kept")
            directory.write_text("no directory")
        if step == 20:
            directory.unlink()
            (tmp_path / "kept").rename(directory)

    _, recorder = train(tmp_path, [BestExporter()], on_step=break_and_repair)
    (step, text), *others = recorder.exports
    assert (step, text.split(";")[0]) == (
        10,
        f"not written: Cannot write {directory}/step-00000010: Not a directory",
    )
    assert all(text.startswith("written to") for _, text in others)
    assert names(tmp_path, "best") == ["20", "30", "40", "50"]


@keras.saving.register_keras_serializable(package="test")
class OnlyEager(keras.layers.Layer):
    def call(self, inputs):
        return inputs + float(np.max(inputs) * 0)


def test_a_model_that_cannot_be_exported(tmp_path):
    def model_fn():
        return model(OnlyEager(), run_eagerly=True)

    with pytest.raises(JobError) as caught:
        train(tmp_path, [FinalExporter()], model_fn=model_fn, max_steps=10)
    assert "\n" not in str(caught.value)
    assert "AttributeError" in str(caught.value)
    assert names(tmp_path, "final") == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    recorder = Recorder()
    exports = Exports(tmp_path, [LatestExporter()], [recorder])
    try:
        exports.prepare()
        exports.write(model(), [{"step": 1, "metrics": {}}], is_last=True)
        ((_, text),) = recorder.exports
        path = tmp_path / "export" / "latest" / "step-00000001"
        assert text.startswith(f"not written: Cannot write {path}: No space left on")
        assert not list(path.parent.iterdir())
        with pytest.raises(JobError, match="No space left"):
            exports.check()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_exports_of_a_run_that_is_not_continued_are_deleted(tmp_path):
    exports = Exports(tmp_path, [LatestExporter(exports_to_keep=2)], [])
    exports.prepare()
    (tmp_path / "export" / "latest" / "mine").mkdir()
    network = model()
    for step in (10, 20, 30, 15):
        exports.write(network, [{"step": step, "metrics": {}}], is_last=False)
    found = sorted(path.name for path in (tmp_path / "export" / "latest").iterdir())
    assert found == ["mine", "step-00000015"]


@pytest.mark.parametrize(
    ("mode", "values", "due"),
    [
        ("min", [3.0], True),
        ("min", [3.0, 2.0], True),
        ("min", [3.0, 2.0, 2.0], False),
        ("min", [2.0, 3.0], False),
        ("max", [2.0, 3.0], True),
        ("max", [3.0, 2.0], False),
        ("max", [float("nan")], False),
        ("max", [float("nan"), 1.0], True),
        ("max", [None, 1.0], True),
    ],
)
def test_best_is_better_than_all_before(mode, values, due):
    evaluations = [
        {"step": step, "metrics": {} if value is None else {"auc": value}}
        for step, value in enumerate(values)
    ]
    exporter = BestExporter(metric="auc", mode=mode)
    assert exporter.is_due(evaluations, is_last=False) == due


@pytest.mark.parametrize(
    ("exporters", "reason"),
    [
        ([BestExporter(metric="auc")], r"'auc' .* expected one of .*: loss, accuracy"),
        ([BestExporter(), FinalExporter("best")], "names best, best; expected a diff"),
    ],
)
def test_exporters_that_cannot_be(tmp_path, exporters, reason):
    with pytest.raises(JobError, match=reason):
        train(tmp_path, exporters)
    with pytest.raises(JobError, match=r"expected .* RunConfig\(model_dir="):
        train(None, exporters)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"name": "a/b"}, "name='a/b'"),
        ({"name": ".."}, r"name='\.\.'"),
        ({"exports_to_keep": 0}, "exports_to_keep=0; expected 1"),
        ({"mode": "auto"}, "mode='auto'; expected 'min' or 'max'"),
    ],
)
def test_wrong_arguments(arguments, reason):
    with pytest.raises(JobError, match=reason):
        BestExporter(**arguments)
