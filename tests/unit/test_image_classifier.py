"""An experiment from options: the flags of mnist, checked and used."""

import dataclasses
import socket
from unittest import mock

import keras
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

import hvdtrain.keras as hvd
from hvdtrain.job import JobError, World
from hvdtrain.mnist import __main__ as mnist
from hvdtrain.mnist import experiment
from hvdtrain.mnist.options import ClassifierOptions
from hvdtrain.training import Plan


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


def fit(world=None, **changes):
    chosen = options(**changes)
    dataset, _ = experiment.load(chosen, World())
    return experiment.fit(chosen, dataset, world or World())


def arguments(**changes):
    """Return what `training.fit` receives, with `make_model` and `source`."""
    with mock.patch.object(experiment.training, "fit") as called:
        fit(**changes)
    make_model, source = called.call_args.args
    return called.call_args.kwargs | {"make_model": make_model, "source": source}


def plan(**changes):
    values = {
        "max_steps": 10_000,
        "epochs": 79,
        "fit_epoch_steps": 128,
        "steps_per_execution": 20,
        "global_batch_size": 64,
    }
    return Plan(**(values | changes))


def test_a_run_with_the_defaults():
    found = arguments(export=["best", "final"], model_dir="run", skip_nonfinite=True)
    assert found["global_batch_size"](4) == 256
    assert found["max_steps"](4) == 2500
    assert found["skip_nonfinite"]
    assert found["validation_batch_size"] == 256
    assert found["unchanged"] == {"dataset": "synthetic"}
    assert [exporter.name for exporter in found["exporters"]] == ["best", "final"]
    model = found["make_model"]()
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    (check,) = found["callbacks"](plan())
    assert type(check) is hvd.callbacks.ConsistencyCheckCallback


def test_rates_and_policy_follow_the_options():
    changes = {"decay": "cosine", "consistency_check_steps": 0, "optimizer": "adam"}
    found = arguments(mixed_precision="bfloat16", **changes)
    try:
        model = found["make_model"]()
        assert model.layers[1].compute_dtype == "bfloat16"
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert float(model.optimizer.learning_rate) == pytest.approx(0.001)
    (rates,) = found["callbacks"](plan())
    assert type(rates).__name__ == "LearningRateCallback"


def test_a_scaled_run_goes_on_from_the_samples_of_its_checkpoint():
    # 250 steps of 256 samples on four ranks, of which 100 and their samples are left.
    found = arguments(max_steps=1000, decay="cosine", consistency_check_steps=0)
    left = plan(max_steps=150 + 400, start_step=150, start_sample=150 * 256)
    (rates,) = found["callbacks"](left)
    model = found["make_model"]()
    rates.set_model(model)
    rates.on_epoch_begin(0)
    rates.on_train_batch_begin(150)
    cosine = (1 + np.cos(np.pi * 0.6)) / 2
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 * cosine)


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
        fit(**changes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch_size=0"], ["--batch_size=0", "[1, "]),
        (["--batch_size=many"], ["--batch_size=many"]),
        (["--max_steps=-1"], ["--max_steps=-1", "[1, "]),
        (["--model_dir="], ["--model_dir", "expected a path"]),
        (
            ["--data_dir=s3://b/run"],
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
            fit(dataset="mnist")
    assert not list(tmp_path.iterdir())


def test_fewer_samples_than_ranks(tmp_path):
    images, labels = np.zeros((2, 8, 8), "uint8"), np.zeros(2, int)
    arrays = {"x_train": images[:1], "y_train": labels[:1]}
    np.savez(tmp_path / "data.npz", **arrays, x_test=images, y_test=labels)
    # Horovod has this rank alone: what it gathers from two ranks is its own value.
    with pytest.raises(JobError, match=r"^Received 1 samples for 2 ranks"):
        fit(World(size=2), dataset="custom", data_dir=str(tmp_path))


@pytest.mark.long
def test_same_seed_same_bits():
    """Of dropout and convolutions too."""
    few = {"dataset": "digits", "model": "cnn", "max_steps": 12, "batch_size": 16}

    first, second = (fit(**few).model.get_weights() for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
