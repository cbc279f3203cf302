"""An experiment from options: the flags of mnist, checked and built."""

import dataclasses
import socket

import keras
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

import hvdtrain.keras as hvd
from hvdtrain.checkpoint.header import Checkpoint, Header
from hvdtrain.checkpoint.storage import CheckpointFiles
from hvdtrain.data import Sampler
from hvdtrain.job import JobError, World
from hvdtrain.mnist import __main__ as mnist
from hvdtrain.mnist.experiment import build
from hvdtrain.mnist.options import ClassifierOptions
from hvdtrain.training import Plan, train_and_evaluate


@pytest.fixture(autouse=True)
def _horovod(monkeypatch):
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
    hvd.init()


def options(**changes):
    return ClassifierOptions(**({"dataset": "synthetic"} | changes))


def test_options_are_the_flags_of_mnist():
    defined = flags.FLAGS.flags_by_module_dict()[mnist.__name__]
    fields = dataclasses.fields(ClassifierOptions)
    assert [flag.name for flag in defined] == [field.name for field in fields]
    assert [flag.default for flag in defined] == [field.default for field in fields]


def test_a_run_with_the_defaults(tmp_path):
    changes = {"model_dir": str(tmp_path), "skip_nonfinite": True}
    experiment = build(options(export=["best", "final"], **changes), World())
    assert experiment.config.skip_nonfinite
    assert [exporter.name for exporter in experiment.eval_spec.exporters] == [
        "best",
        "final",
    ]
    assert experiment.warning == ""
    assert experiment.dataset.name == "synthetic"
    assert experiment.train_spec.max_steps == 10_000
    assert experiment.train_spec.pass_steps == 128  # 8,192 images
    assert float(experiment.model.optimizer.learning_rate) == pytest.approx(0.1)
    observers = [type(observer).__name__ for observer in experiment.observers]
    assert observers == ["Console", "JsonLog", "EventLog"]
    plan = Plan.of(experiment.train_spec)
    (check,) = experiment.train_spec.callbacks(plan)
    assert type(check) is hvd.callbacks.ConsistencyCheckCallback


def test_rates_and_policy_follow_the_options():
    changes = {"decay": "cosine", "consistency_check_steps": 0, "optimizer": "adam"}
    try:
        experiment = build(options(mixed_precision="bfloat16", **changes), World())
        assert experiment.model.layers[1].compute_dtype == "bfloat16"
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert float(experiment.model.optimizer.learning_rate) == pytest.approx(0.001)
    (rates,) = experiment.train_spec.callbacks(Plan.of(experiment.train_spec))
    assert type(rates).__name__ == "LearningRateCallback"


def test_a_scaled_run_goes_on_from_the_samples_of_its_checkpoint(tmp_path):
    # 250 steps of 256 samples on four ranks, of which 100 and their samples are left.
    header = Header(
        step=150,
        local_batch_sizes=(64,) * 4,
        global_batch_size=256,
        sample=150 * 256,
        original_size=4,
        fit_epoch_steps=32,
        steps_per_execution=1,
    )
    files = CheckpointFiles(tmp_path / "checkpoints")
    files.write(Checkpoint(header=header, arrays={}))
    changes = {"max_steps": 1000, "decay": "cosine", "consistency_check_steps": 0}
    changes["model_dir"] = str(tmp_path)
    experiment = build(options(scale_batch=True, **changes), World())
    spec = experiment.train_spec
    assert (spec.scale_from.step, spec.local_batch_size, experiment.batch_ranks) == (
        150,
        64,
        1,
    )
    assert spec.max_steps == 150 + 400
    assert spec.pass_steps == 128
    images = next(iter(spec.input_fn(150, 151)))[0].numpy()
    order = Sampler(num_samples=8192, global_batch_size=1, seed=0)
    expected = experiment.dataset.x_train[
        order.indices(150 * 256, 150 * 256 + 64).ravel()
    ]
    np.testing.assert_array_equal(images, expected)
    (rates,) = spec.callbacks(Plan.of(spec))
    rates.set_model(experiment.model)
    rates.on_epoch_begin(0)
    rates.on_train_batch_begin(150)
    cosine = (1 + np.cos(np.pi * 0.6)) / 2
    assert float(experiment.model.optimizer.learning_rate) == pytest.approx(
        0.1 * cosine
    )
    kept = build(options(**changes), World())
    assert (kept.train_spec.max_steps, kept.train_spec.local_batch_size) == (250, 256)
    assert kept.train_spec.scale_from is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epochs": 1, "warmup_epochs": 2.0}, r"--warmup_epochs=2 .* 1 epochs"),
        ({"max_steps": 3, "accumulation_steps": 4}, r"--max_steps=3 .* expected 4"),
        ({"max_steps": 9, "profile_steps": (5, 10)}, r"--profile_steps=5,10 .* 9 st"),
        ({"model_dir": "/dev/null"}, r"/dev/null is not a directory"),
    ],
)
def test_options_that_contradict_each_other(changes, reason):
    with pytest.raises(JobError, match=reason):
        build(options(**changes), World())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch_size=0"], ["--batch_size=0", "[1, "]),
        (["--batch_size=many"], ["--batch_size=many"]),
        (["--max_steps=-1"], ["--max_steps=-1", "[1, "]),
        (["--model_dir="], ["--model_dir", "expected a path"]),
        (
            ["--model_dir=s3://b/run"],
            ["Received s3://b/run; expected a path of a"],
        ),
        (["--epochs=0"], ["--epochs=0", "[1, "]),
        (["--learning_rate=0"], ["--learning_rate=0", "positive"]),
        (["--warmup_epochs=-1"], ["--warmup_epochs=-1", "0 or more"]),
        (["--seed=-1"], ["--seed=-1"]),
        (["--dataset=imagenet"], ["--dataset=imagenet", "digits"]),
        (["--dataset=digits", "--data_dir=/tmp"], ["dataset=digits", "data_dir=/tmp"]),
        (["--dataset=custom"], ["custom", "--data_dir"]),
        (["--export=best"], ["--export,", "need --model_dir"]),
        (["--export=best,worst", "--model_dir=x"], ["worst", "best, latest, final"]),
        (["--profile_steps=9,9", "--model_dir=a"], ["profile_steps=9,9", "100,120"]),
        (["--profile_steps=9", "--model_dir=a"], ["profile_steps=9", "100,120"]),
        (["--profile_steps=a,b", "--model_dir=a"], ["profile_steps=a,b", "100,120"]),
        (["--profile_steps=5,9"], ["profile_steps", "--model_dir"]),
    ],
)
def test_wrong_flags(arguments, words):
    with flagsaver.flagsaver(), pytest.raises(flags.Error) as caught:
        flags.FLAGS(["mnist", *arguments])
    for word in words:
        assert word in str(caught.value)


def test_mnist_from_a_network_that_refuses(monkeypatch, tmp_path):
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/mnist.npz"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("HVDTRAIN_MNIST_URLS", url)
        monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path))
        with pytest.raises(JobError, match=rf"{url}.* --data_dir"):
            build(options(dataset="mnist"), World())
    assert not list(tmp_path.iterdir())


def test_fewer_samples_than_ranks(tmp_path):
    images, labels = np.zeros((2, 8, 8), "uint8"), np.zeros(2, int)
    arrays = {"x_train": images[:1], "y_train": labels[:1]}
    np.savez(tmp_path / "data.npz", **arrays, x_test=images, y_test=labels)
    # Horovod has this rank alone: what it gathers from two ranks is its own value.
    with pytest.raises(JobError, match=r"^Received 1 samples for 2 ranks"):
        build(options(dataset="custom", data_dir=str(tmp_path)), World(size=2))


@pytest.mark.long
def test_same_seed_same_bits():
    """Of dropout and convolutions too."""
    few = {"dataset": "digits", "model": "cnn", "max_steps": 12, "batch_size": 16}

    def weights():
        keras.utils.set_random_seed(0)
        experiment = build(options(**few), World())
        specs = experiment.train_spec, experiment.eval_spec
        return train_and_evaluate(
            lambda: experiment.model, *specs, world=World()
        ).model.get_weights()

    for a, b in zip(weights(), weights(), strict=True):
        np.testing.assert_array_equal(a, b)
