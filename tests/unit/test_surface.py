"""The public names, compared with the Horovod that is installed."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import hvdtrain.keras as hvd

PAGE = (Path(__file__).parents[2] / "docs" / "horovod.md").read_text()
# Of several modules that have a name, the first gives the order of parameters.
MODULES = {
    "horovod.tensorflow.keras": hvd,
    "horovod.keras": hvd,
    "horovod.tensorflow": hvd,
    "horovod.tensorflow.keras.callbacks": hvd.callbacks,
    "horovod.keras.callbacks": hvd.callbacks,
    "horovod.tensorflow.keras.elastic": hvd.elastic,
    "horovod.keras.elastic": hvd.elastic,
}
# Each stands in the page with its reason.
NOT_OFFERED = {
    name
    for row in re.findall(r"^\| (`.*?) \|", PAGE.split("## Not offered")[1], re.M)
    if "use_locking" not in row
    for name in re.findall(r"`(\w+)`", row)
}
OTHER_DEFAULT = {
    ("horovod.keras", "allreduce", "average"),
    *(
        (module, "LearningRateWarmupCallback", "initial_lr")
        for module in ("horovod.tensorflow.keras.callbacks", "horovod.keras.callbacks")
    ),
}
OTHER_PARAMETER = {("horovod.tensorflow", "DistributedOptimizer", "use_locking")}
# horovod.tensorflow calls the same parameter otherwise than horovod.tensorflow.keras.
RENAMED = {
    ("horovod.tensorflow", name, "tensor"): "value"
    for name in ("allreduce", "allgather", "broadcast", "reducescatter")
}


def public_names(module):
    names = getattr(module, "__all__", None) or dir(module)
    return [
        name
        for name in names
        if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
    ]


def offered():
    return [
        (module, name)
        for module in MODULES
        for name in public_names(importlib.import_module(module))
        if name not in NOT_OFFERED
    ]


def parameters(function):
    return inspect.signature(function).parameters


def callables():
    return [
        (module, name)
        for module, name in offered()
        if callable(getattr(importlib.import_module(module), name))
        and name not in ("Compression", "ProcessSet")
    ]


def test_the_reference_is_the_whole_of_horovod():
    # Were the reference empty, nothing below could fail.
    names = {name for _, name in offered()}
    assert len(names) > 60
    assert {"DistributedOptimizer", "KerasState", "MetricAverageCallback"} <= names


@pytest.mark.parametrize(("module", "name"), offered())
def test_no_name_is_missing(module, name):
    assert hasattr(MODULES[module], name)
    if MODULES[module] is hvd:
        assert name in hvd.__all__


def test_all_holds_public_names_only():
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    modules = [name for name in hvd.__all__ if inspect.ismodule(getattr(hvd, name))]
    assert modules == ["callbacks", "elastic"]


@pytest.mark.parametrize(("module", "name"), offered())
def test_every_name_stands_in_the_page(module, name):
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_what_the_page_calls_not_offered_is_not(name):
    assert not hasattr(hvd, name)
    assert not hasattr(hvd.elastic, name)
    assert any(hasattr(importlib.import_module(module), name) for module in MODULES)


@pytest.mark.parametrize(("module", "name"), callables())
def test_no_parameter_is_missing_or_has_another_default(module, name):
    theirs = parameters(getattr(importlib.import_module(module), name))
    mine = parameters(getattr(MODULES[module], name))
    for parameter, description in theirs.items():
        key = (module, name, parameter)
        if key in OTHER_PARAMETER:
            continue
        own = mine.get(RENAMED.get(key, parameter))
        assert own is not None, f"{name} has no parameter {parameter}"
        assert own.kind == description.kind
        if key not in OTHER_DEFAULT:
            assert own.default is description.default or (
                own.default == description.default
            ), parameter


def leading():
    seen = set()
    for module, name in callables():
        if name not in seen:
            seen.add(name)
            yield module, name


@pytest.mark.parametrize(("module", "name"), list(leading()))
def test_parameters_by_position_are_the_same(module, name):
    theirs = list(parameters(getattr(importlib.import_module(module), name)))
    mine = list(parameters(getattr(MODULES[module], name)))
    named = [p for p in theirs if p != "kwargs"]
    assert mine[: len(named)] == named


@pytest.mark.parametrize("name", ["Average", "Sum", "Adasum", "Min", "Max", "Product"])
def test_operations_are_horovods_own(name):
    assert getattr(hvd, name) == getattr(
        importlib.import_module("horovod.tensorflow"), name
    )


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_compressors_are_horovods_own(name):
    upstream = importlib.import_module("horovod.tensorflow").Compression
    assert getattr(hvd.Compression, name) is getattr(upstream, name)


def test_names_that_are_only_tensorflow_1s_say_what_to_use():
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
