"""The public names, compared with the Horovod that is installed."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import hvdtrain.keras as hvd

PAGES = Path(__file__).parents[2] / "docs" / "moving"
PAGE = "".join((PAGES / name).read_text() for name in ("callbacks.md", "api.md"))
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
    assert len(NOT_OFFERED) > 3
    assert {"DistributedOptimizer", "KerasState", "MetricAverageCallback"} <= names


def test_no_name_is_missing():
    missing = [
        f"{module}.{name}"
        for module, name in offered()
        if not hasattr(MODULES[module], name)
        or (MODULES[module] is hvd and name not in hvd.__all__)
    ]
    assert not missing


def test_all_holds_public_names_only():
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    modules = [name for name in hvd.__all__ if inspect.ismodule(getattr(hvd, name))]
    assert modules == ["callbacks", "elastic"]


def test_every_name_stands_in_the_page():
    assert not [name for _, name in offered() if f"`{name}`" not in PAGE]


def test_what_the_page_calls_not_offered_is_not():
    offered_after_all = [
        name for name in NOT_OFFERED if hasattr(hvd, name) or hasattr(hvd.elastic, name)
    ]
    assert not offered_after_all
    modules = [importlib.import_module(module) for module in MODULES]
    unknown_to_horovod = [
        name
        for name in NOT_OFFERED
        if not any(hasattr(module, name) for module in modules)
    ]
    assert not unknown_to_horovod


def differences(module, name):
    """Yields what a call of Horovod's `module.name` would find different here."""
    theirs = parameters(getattr(importlib.import_module(module), name))
    mine = parameters(getattr(MODULES[module], name))
    for parameter, description in theirs.items():
        key = (module, name, parameter)
        own = mine.get(RENAMED.get(key, parameter))
        if key in OTHER_PARAMETER:
            continue
        if own is None:
            yield f"{module}.{name} has no parameter {parameter}"
        elif own.kind != description.kind:
            yield f"{module}.{name}: {parameter} is {own.kind}"
        elif key not in OTHER_DEFAULT and not (
            own.default is description.default or own.default == description.default
        ):
            yield f"{module}.{name}: {parameter} defaults to {own.default!r}"


def test_no_parameter_is_missing_or_has_another_default():
    found = [text for names in callables() for text in differences(*names)]
    assert not found


def test_parameters_by_position_are_the_same():
    moved = []
    seen = set()
    for module, name in callables():
        theirs = list(parameters(getattr(importlib.import_module(module), name)))
        mine = list(parameters(getattr(MODULES[module], name)))
        named = [parameter for parameter in theirs if parameter != "kwargs"]
        if name not in seen and mine[: len(named)] != named:
            moved.append(f"{module}.{name}: {mine}, expected {named}")
        seen.add(name)
    assert not moved


def test_operations_and_compressors_are_horovods_own():
    upstream = importlib.import_module("horovod.tensorflow")
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(hvd, name) == getattr(upstream, name), name
    for name in ("none", "fp16"):
        mine, theirs = (getattr(m.Compression, name) for m in (hvd, upstream))
        assert mine is theirs, name


def test_names_that_are_only_tensorflow_1s_say_what_to_use():
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
