"""The workloads of benchmarks/ that PyTorch trains too: samples, models and figures."""

import dataclasses
import importlib.util

import keras
import numpy as np
import pytest

from benchmarks import beside_torch, keras_loads, torch_run
from benchmarks.load_options import KERAS_KINDS, TORCH_KINDS, Run, TrainingOptions
from benchmarks.loads import Dlrm, Gpt2
from hvdtrain.benchmark import workloads
from hvdtrain.job import JobError

GPT2 = Gpt2(vocabulary=11, layers=2, width=8, heads=2, length=5)
DLRM = Dlrm(features=2, tables=3, rows=7, columns=4, bottom=(5,), top=(6,))


def small_dlrm():
    model = keras_loads.build_dlrm(DLRM, "replicated")
    return model, lambda count, rank: DLRM.samples(count, seed=rank)


def test_samples():
    tokens, following = GPT2.samples(3, seed=0)
    assert tokens.shape == following.shape == (3, 5)
    assert (tokens[:, 1:] == following[:, :-1]).all()
    (features, ids), targets = DLRM.samples(3, seed=1)
    assert (features.shape, ids.shape, targets.shape) == ((3, 2), (3, 3), (3, 1))
    assert 0 <= ids.min() <= ids.max() < 7


def test_dlrm_computes_what_numpy_does():
    model, samples = small_dlrm()
    # The bottom: 2 to 5 to 4. The top: 4 and 4 * 3 / 2 pairs to 6 to 1.
    assert model.count_params() == 15 + 24 + 3 * 7 * 4 + 66 + 7
    (features, ids), _ = samples(3, 0)
    bottom_1, bias_1, bottom_2, bias_2, *others = map(np.asarray, model.weights)
    *tables, top, top_bias, last, last_bias = others
    x = np.maximum(features @ bottom_1 + bias_1, 0)
    x = np.maximum(x @ bottom_2 + bias_2, 0)
    rows = [table[ids[:, i]] for i, table in enumerate(tables)]
    vectors = [x, *rows]
    products = [
        (vectors[i] * vectors[j]).sum(axis=1) for i in range(4) for j in range(i)
    ]
    x = np.concatenate([x, np.stack(products, axis=1)], axis=1)
    expected = np.maximum(x @ top + top_bias, 0) @ last + last_bias
    outputs = model((features, ids))
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-6)


def test_a_workload_with_samples_of_its_own(monkeypatch):
    monkeypatch.setattr(keras_loads, "small", small_dlrm, raising=False)
    name = "benchmarks.keras_loads:small"
    workload, shapes = workloads._load_function(name, 6, 1)
    assert workload.note == "its own, 2 and 3"
    assert shapes[0] == (2, 5)
    expected = DLRM.samples(6, seed=1)
    for found, array in zip(
        keras.tree.flatten(workload.batch), keras.tree.flatten(expected), strict=True
    ):
        np.testing.assert_array_equal(found, array)
    model = workload.build(2)
    history = model.fit(workload.constant_batches(2).take(1), verbose=0)
    assert 0 < history.history["loss"][0] < 1


@pytest.mark.parametrize(
    ("returned", "types"), [(("a",), "str"), (("a", 1), "str, int"), ((), "")]
)
def test_a_workload_that_returns_another_tuple(monkeypatch, returned, types):
    monkeypatch.setattr(keras_loads, "wrong", lambda: returned, raising=False)
    with pytest.raises(JobError, match=rf"Received a tuple of \({types}\) from --work"):
        workloads._load_function("benchmarks.keras_loads:wrong", 6, 1)


@pytest.mark.parametrize("name", ["gpt2", "dlrm"])
def test_the_twin_computes_the_same(name):
    pytest.importorskip("torch")
    from benchmarks import torch_loads, torch_training

    if name == "gpt2":
        pytest.importorskip("keras_hub")
        load, model = GPT2, keras_loads.build_gpt2(GPT2)
        module = torch_loads.Gpt2Module(load)
    else:
        load, model = DLRM, small_dlrm()[0]
        module = torch_loads.DlrmModule(load, sparse=True)
    assert model.count_params() == sum(each.numel() for each in module.parameters())
    torch_loads.copy_weights(module, map(np.asarray, model.weights))
    load = dataclasses.replace(load, batch_size=4)
    x, y = load.samples(4, seed=0)
    (inputs, targets), *_ = torch_training.batches(load, 0, count=1)
    loss = torch_training.compute_loss(load, module(*inputs), targets)
    assert float(model.compute_loss(x, y, model(x))) == pytest.approx(
        loss.item(), rel=1e-6
    )


@pytest.mark.parametrize(
    ("kinds", "options", "expected"),
    [
        (KERAS_KINDS, {"kind": "row"}, "kind=row with --load=gpt2; .* replicated, st"),
        (KERAS_KINDS, {"load": "dlrm", "kind": "ddp"}, "kind=ddp with --load=dlrm"),
        (TORCH_KINDS, {"kind": "replicated"}, "kind=replicated .* expected ddp, zero"),
        (TORCH_KINDS, {"load": "dlrm", "kind": "zero"}, "kind=zero .* ddp, ddp_spa"),
        (TORCH_KINDS, {"load": "dlrm", "dtype": "bfloat16"}, "bfloat16 .* float32"),
    ],
)
def test_a_training_that_a_program_has_not(kinds, options, expected):
    with pytest.raises(JobError, match=expected):
        TrainingOptions(**options).of(kinds)


def test_the_default_kind_of_a_program():
    options = TrainingOptions(dtype="bfloat16")
    assert [options.of(each).kind for each in (KERAS_KINDS, TORCH_KINDS)] == [
        "replicated",
        "ddp",
    ]


def test_figures_of_paired_rounds():
    def runs(speeds, peaks):
        return [
            Run(samples_per_second=s, peak_resident=[1, p], parameters=[5, 5])
            for s, p in zip(speeds, peaks, strict=True)
        ]

    given = {"row": runs([4, 9, 5], [10, 10, 10]), "ddp": runs([2, 3, 5], [20, 20, 40])}
    found = beside_torch.summarize(given)
    assert found["row"]["samples_per_second"] == 5
    assert (found["row"]["speed"], found["row"]["memory"]) == (
        {"ddp": 2},
        {"ddp": 0.5},
    )
    assert found["ddp"]["speed"] == {"ddp": 1}
    line = beside_torch.table(found).splitlines()[1]
    assert line.split() == ["row", "5.0", "5", "10", "B", "2.00,", "0.50"]


def test_without_pytorch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError, match="PyTorch is not installed"):
        torch_run.check_torch()
