"""A run from options: the flags of mnist, checked and built."""

import dataclasses

import keras
import pytest
from absl import flags

import hvdtrain.keras as hvd
from hvdtrain import mnist
from hvdtrain.job import JobError, World
from hvdtrain.training import Plan
from hvdtrain.training.image_classifier import Options, build

DEFAULTS = {
    flag.name: flag.default
    for flag in flags.FLAGS.flags_by_module_dict()[mnist.__name__]
}


@pytest.fixture(autouse=True)
def _horovod(monkeypatch):
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    hvd.init()


def options(**changes):
    return Options(**(DEFAULTS | {"dataset": "synthetic"} | changes))


def test_options_are_the_flags_of_mnist():
    assert [field.name for field in dataclasses.fields(Options)] == list(DEFAULTS)


def test_a_run_with_the_defaults(tmp_path):
    run = build(options(model_dir=str(tmp_path)), World())
    assert run.warning == ""
    assert run.dataset.name == "synthetic"
    assert run.train_spec.max_steps == 10_000
    assert run.train_spec.pass_steps == 128  # 8,192 images
    assert float(run.model.optimizer.learning_rate) == pytest.approx(0.1)
    assert [type(each).__name__ for each in run.observers] == ["Console", "EventLog"]
    plan = Plan.of(run.train_spec)
    (check,) = run.train_spec.callbacks(plan)
    assert type(check) is hvd.callbacks.ConsistencyCheckCallback


def test_rates_and_policy_follow_the_options():
    changes = {"decay": "cosine", "consistency_check_steps": 0, "optimizer": "adam"}
    try:
        run = build(options(mixed_precision="bfloat16", **changes), World())
        assert run.model.layers[1].compute_dtype == "bfloat16"
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert float(run.model.optimizer.learning_rate) == pytest.approx(0.001)
    (rates,) = run.train_spec.callbacks(Plan.of(run.train_spec))
    assert type(rates).__name__ == "LearningRateCallback"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epochs": 1, "warmup_epochs": 2.0}, r"--warmup_epochs=2 .* 1 epochs"),
        ({"max_steps": 3, "accumulation_steps": 4}, r"--max_steps=3 .* expected 4"),
        ({"model_dir": "/dev/null"}, r"/dev/null is not a directory"),
    ],
)
def test_options_that_contradict_each_other(changes, reason):
    with pytest.raises(JobError, match=reason):
        build(options(**changes), World())
