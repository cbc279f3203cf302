"""The table of what the package touches in Keras, on the Keras that is installed."""

import ast
import functools
import importlib
import inspect
import pathlib
import pkgutil

import keras
import numpy as np
import pytest

from hvdtrain.keras import seams

ROOT = pathlib.Path(__file__).parents[2] / "hvdtrain"
TREES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
}
MODULES_WITH_KERAS = [
    module
    for module, tree in TREES.items()
    if "keras" in ast.dump(tree) and module != "keras.seams"
]
ROWS = [(owner, seam) for owner, rows in seams.SEAMS.items() for seam in rows]
# Private names of Python, of Horovod, of TensorFlow, and of our own objects in other
# modules.
NOT_OF_KERAS = {
    *("_exit", "_current_exceptions", "_replace", "_basics", "_state"),
    *("_get_process_set_ids_and_ranks", "_reset_callbacks", "_host_messages"),
    *("_DummyThread", "_target", "_grouped_allreduce", "_reduced_over"),
    *("_inputs", "_seed", "_seed2", "_num_shards", "_unique_id"),
}
# Names of `keras.ops` that the oldest supported Keras has not.
LATER_OPERATIONS = {"Erfc", "ReLU"}


def used_names(tree):
    """Yield the attributes, imported names and strings of a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                yield name
            case ast.alias(name=name) | ast.FunctionDef(name=name):
                yield name


def test_the_names_of_the_table_are_used():
    used = set().union(*(used_names(TREES[module]) for module in MODULES_WITH_KERAS))
    for _, seam in ROWS:
        assert seam.name in used
        for replacer in seam.replaced_by:
            module, _, function = replacer.rpartition(".")
            assert hasattr(importlib.import_module(f"hvdtrain.{module}"), function)
            assert seam.name in used_names(TREES[module]), module


@pytest.fixture(scope="module")
def instances():
    """An object of each class of the table, by the name of the class."""
    inputs = keras.Input((3, 4))
    masked = keras.layers.Masking()(inputs)
    outputs = keras.layers.Dense(2)(masked)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.zeros((2, 3, 4)), np.zeros((2, 3, 2)), verbose=0)
    model.predict(np.zeros((2, 3, 4)), verbose=0)
    model.evaluate(np.zeros((2, 3, 4)), np.zeros((2, 3, 2)), verbose=0)
    sequential = keras.Sequential([inputs, keras.layers.Dense(2)])
    attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)
    groups = keras.layers.GroupQueryAttention(4, 2, 1, dropout=0.1)
    for layer in (attention, groups):
        layer(masked, masked)
    normalization = keras.layers.BatchNormalization()
    normalization(masked)
    arguments = {"use_ema": True, "gradient_accumulation_steps": 2}
    found = {
        "keras.optimizers.Optimizer": keras.optimizers.SGD(**arguments),
        "keras.optimizers.RMSprop": keras.optimizers.RMSprop(momentum=0.9),
        "keras.Model": model,
        "keras.src.models.functional.Functional": model,
        "keras.src.trainers.compile_utils.CompileMetrics": model._compile_metrics,
        "keras.src.trainers.compile_utils.CompileLoss": model._compile_loss,
        "keras.Sequential": sequential,
        "keras.layers.Layer": model.layers[-1],
        "keras.layers.BatchNormalization": normalization,
        "keras.layers.MultiHeadAttention": attention,
        "keras.layers.GroupQueryAttention": groups,
        "keras.layers.TextVectorization": keras.layers.TextVectorization(),
        "keras.utils.FeatureSpace": keras.utils.FeatureSpace({"age": "float"}),
        "keras.Variable": model.weights[0],
        "keras.KerasTensor": masked,
        "keras.metrics.Metric": keras.metrics.Mean(),
        "keras.metrics.MeanMetricWrapper": keras.metrics.PearsonCorrelation(),
    }
    if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        schedule_free = keras.optimizers.ScheduleFreeAdamW()
        found["keras.optimizers.ScheduleFreeAdamW"] = schedule_free
    for optimizer in found.values():
        if isinstance(optimizer, keras.optimizers.Optimizer):
            optimizer.build(model.trainable_variables)
            optimizer._use_weight_decay(model.weights[0])
    return found


def test_keras_has_the_names_and_signatures(instances):
    errors = [check(owner, seam, instances) for owner, seam in ROWS]
    assert not list(filter(None, errors))


def check(owner, seam, instances):
    """Return an error text, or None."""
    if owner in instances:
        assert isinstance(instances[owner], pkgutil.resolve_name(owner))
        holder = instances[owner]
    else:
        holder = None if seam.is_optional else pkgutil.resolve_name(owner)
    if not hasattr(holder, seam.name):
        return None if seam.is_optional else f"{owner} has no {seam.name}"
    value = getattr(holder, seam.name)
    name, _, parameters = seam.signature.partition("(")
    if not parameters:
        return f"{owner}.{name} is a function" if inspect.isroutine(value) else None
    expected = [each for each in parameters.rstrip(")").split(", ") if each]
    received = [each for each in inspect.signature(value).parameters if each != "self"]
    is_expected = received == expected
    if "..." in expected:
        is_expected = set(expected) <= {*received, "..."}
    return None if is_expected else f"{owner}.{name} takes {received}"


def test_operation_classes_exist():
    names = pkgutil.resolve_name(seams.OPERATION_CLASSES)
    modules = [
        importlib.import_module(f"keras.src.ops.{each}")
        for each in ("core", "math", "nn", "numpy")
    ]
    existing = {name for module in modules for name in vars(module)}
    assert names - existing <= LATER_OPERATIONS


def names_of(module):
    """Return the private names that a module defines or assigns on `self`."""
    own = set()
    for node in ast.walk(TREES[module]):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
    return own


@functools.cache
def names_of_package():
    """Return the private names that any module defines."""
    return set().union(*map(names_of, TREES))


def private_names(module):
    """Yield the private attributes that a module uses and the package has not made."""
    of_package = names_of_package()
    of_module = names_of(module)
    for node in ast.walk(TREES[module]):
        match node:
            case ast.Attribute(value=value, attr=name):
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"),
                args=[value, ast.Constant(value=str(name)), *_],
            ):
                pass
            case ast.Subscript(
                value=ast.Call() as value, slice=ast.Constant(value=str(name))
            ):
                pass
            case _:
                continue
        # Mixins define methods of `self` in other modules.
        is_self = isinstance(value, ast.Name) and value.id in ("self", "cls")
        own = of_package if is_self else of_module
        is_private = name.startswith("_") and not name.startswith(("__", "_hvdtrain"))
        if is_private and name not in own | NOT_OF_KERAS:
            yield name


def test_no_private_name_is_missing_in_the_table():
    in_table = {seam.name for _, seam in ROWS}
    used = {(name, module) for module in TREES for name in private_names(module)}
    assert {(name, module) for name, module in used if name not in in_table} == set()


@pytest.mark.parametrize("module", MODULES_WITH_KERAS)
def test_no_private_module_is_missing_in_the_table(module):
    uses = {f"{owner}.{seam.name}" for owner, seam in ROWS}
    owners = {use.rpartition(".")[0] for use in uses}
    modules = {}
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            assert not any(each.name.startswith("keras.src") for each in node.names)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("keras.src"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                assert name in uses | owners
                modules[alias.asname or alias.name] = name
    for node in ast.walk(TREES[module]):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                if name in modules:
                    assert f"{modules[name]}.{attribute}" in uses


def test_overridden_private_methods_are_in_the_table():
    for module in TREES:
        if module.startswith(("keras.", "parallel.")):
            importlib.import_module(f"hvdtrain.{module.removesuffix('.__init__')}")
    in_table = {seam.name for _, seam in ROWS}
    for cls in subclasses(keras.layers.Layer, keras.metrics.Metric, keras.Loss):
        module = cls.__module__.removeprefix("hvdtrain.")
        for name in vars(cls):
            bases = [base for base in cls.__mro__[1:] if name in vars(base)]
            is_private = name.startswith("_") and not name.startswith("__")
            if is_private and any(
                each.__module__.startswith("keras") for each in bases
            ):
                assert name in in_table, cls


def subclasses(*classes):
    """Yield the classes of the package below some classes."""
    for cls in classes:
        for below in type.__subclasses__(cls):
            if below.__module__.startswith("hvdtrain"):
                yield below
            yield from subclasses(below)


@pytest.mark.parametrize("module", MODULES_WITH_KERAS)
def test_methods_are_replaced_by_the_function_of_the_table(module):
    replaced = {seam.name for _, seam in ROWS if seam.replaced_by}
    for node in ast.walk(TREES[module]):
        match node:
            case ast.Attribute(value=value, attr=name, ctx=ast.Store()):
                names_of_ours = ("self", "GradientReducer")
                is_ours = isinstance(value, ast.Name) and value.id in names_of_ours
                # Keras makes another train function; a stand-in is taken out.
                is_reset = name == "train_function"
                is_of_mpi4py = ast.unparse(value) == "mpi4py.rc"
                assert name not in replaced or is_ours or is_reset or is_of_mpi4py


class First:
    def apply(self, grads, trainable_variables=None):
        """Is put in place of Keras' method."""


def test_a_replacement_that_is_not_in_the_table_is_an_error():
    optimizer = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="has no row by which"):
        seams.replace(optimizer, "apply", First().apply, by=First)


def test_the_order_of_replacements_is_checked():
    from hvdtrain.keras.hook import UpdateSkipping
    from hvdtrain.keras.sharded_state import ShardedState

    optimizer, name = keras.optimizers.SGD(), "_backend_update_step"
    original = getattr(optimizer, name)
    inner, outer = (lambda *args: None), (lambda *args: None)
    assert seams.replace(optimizer, name, inner, by=ShardedState) == original
    assert seams.replace(optimizer, name, outer, by=UpdateSkipping) is inner
    with pytest.raises(ValueError, match=r"outermost last: keras\.sharded_state"):
        seams.replace(optimizer, name, inner, by=ShardedState)
    other = keras.optimizers.SGD()
    seams.replace(other, name, outer, by=UpdateSkipping)
    with pytest.raises(ValueError, match=r"replaced by keras\.hook\.UpdateSkipping"):
        seams.replace(other, name, inner, by=ShardedState)
