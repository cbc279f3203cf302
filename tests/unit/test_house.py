"""Imports go down the floors of the package, never up or in a circle."""

import ast
import collections
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Top floor first. The names are modules and packages of hvdtrain.
FLOORS = [
    [
        *("mnist", "benchmark", "doctor", "launch", "report", "verify"),
        *("program", "__main__"),
    ],
    ["training"],
    ["checkpoint"],
    ["data", "flag_fields", "log", "optimizers"],
    ["distribution"],
    ["parallel"],
    ["keras"],
    ["sharding"],
    ["runner"],
    ["stores"],
    ["job"],
    ["collectives"],
    ["native"],
    ["libraries"],
    ["install"],
    ["flight"],
    [
        "addresses",
        "banner",
        "environment",
        "handshake",
        "lazy",
        "open_directory",
        "output",
    ],
    ["events"],
    ["interruption", "processes"],
]
FLOOR_OF = {name: i for i, floor in enumerate(FLOORS) for name in floor}
MAX_LOCAL_IMPORTS = 5
# Packages with a public name of Horovod, each with a module of that name beside it; and
# what `python -m` runs of a package.
ALLOWED_TWINS = {"callbacks", "elastic", "__main__"}
# Horovod's operations on tensors; the rest of horovod.tensorflow is topology.
OPERATION = re.compile(
    r"_?(grouped_)?(allreduce|allgather|broadcast|alltoall|reducescatter|join)"
    r"(_async)?_?"
)


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


TREES = {
    module_name(path): ast.parse(path.read_text())
    for path in sorted((ROOT / "hvdtrain").rglob("*.py"))
}


def imported_modules(nodes):
    """Yield the names of all modules that a module imports, in functions as well."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                # `from hvdtrain import data` imports a module, `from x import f` not.
                name = f"{node.module}.{alias.name}"
                yield name if name in TREES else node.module


def nodes_at_run_time(tree):
    """Yield all nodes but imports for type checkers, which may name a higher floor."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from nodes_at_run_time(node)


def our_imports(nodes):
    return {name for name in imported_modules(nodes) if name in TREES}


def top(name):
    """Return the module or package of hvdtrain that a module belongs to."""
    return name.split(".")[1] if "." in name else ""


def test_every_module_has_a_floor():
    assert {top(name) for name in TREES} - {*FLOOR_OF, ""} == set()


def test_imports_go_down():
    up = [
        f"{name} imports {imported}"
        for name, tree in TREES.items()
        for imported in our_imports(nodes_at_run_time(tree))
        if top(imported) not in ("", top(name)) and not is_below(imported, name)
    ]
    assert not up


def is_below(name, other):
    # What `python -m` runs of a package is a program, whatever the package's floor.
    floor, other_floor = (
        0 if module.endswith(".__main__") else FLOOR_OF.get(top(module), 0)
        for module in (name, other)
    )
    # Programs share modules of their own floor.
    return floor > other_floor or floor == other_floor == FLOOR_OF["program"]


def test_no_circle():
    """Types included."""
    graph = {name: our_imports(ast.walk(tree)) for name, tree in TREES.items()}
    # Raises CycleError, which names the circle.
    list(graphlib.TopologicalSorter(graph).static_order())


def test_no_two_modules_have_one_name():
    # `import hvdtrain.keras as hvd` has callbacks and elastic, as Horovod has.
    counts = collections.Counter(name.rpartition(".")[2] for name in TREES)
    assert {name for name, count in counts.items() if count > 1} <= ALLOWED_TWINS


def test_no_two_classes_have_one_name():
    counts = collections.Counter(
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in counts.items() if count > 1}


def test_modules_have_600_lines_or_fewer():
    paths = (ROOT / "hvdtrain").rglob("*.py")
    assert not [str(p) for p in paths if len(p.read_text().splitlines()) > 600]


def test_few_imports_stand_inside_of_functions():
    local = {
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert len(local) <= MAX_LOCAL_IMPORTS, sorted(local)


# The proof of an installation runs without the rest of the package.
CALLERS = ("hvdtrain.collectives.transport", "hvdtrain.install.proof")


def test_only_transport_calls_horovods_operations():
    calls = {
        f"{name}:{line} {operation}"
        for name, tree in TREES.items()
        if not name.startswith(CALLERS)
        for line, operation in horovod_operations(tree)
    }
    assert not calls, sorted(calls)


def horovod_operations(tree):
    """Yield line and name of each operation that a module uses."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = f"{getattr(node, 'module', None) or ''}.{alias.name}".lstrip(".")
                if name.startswith("horovod."):
                    modules.add(alias.asname or alias.name)
                    if OPERATION.fullmatch(alias.name):
                        yield node.lineno, alias.name
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                if module in modules and OPERATION.fullmatch(name):
                    yield node.lineno, name


def test_data_and_models_are_independent_of_horovod():
    for name, tree in TREES.items():
        if FLOOR_OF.get(top(name)) == FLOOR_OF["data"]:
            for imported in imported_modules(nodes_at_run_time(tree)):
                assert not imported.startswith(("horovod", "hvdtrain.keras")), name


# Programs define flags of the same name: one process imports one of them.
@pytest.mark.parametrize(
    "program",
    [
        *("hvdtrain.install", "hvdtrain.mnist.__main__", "hvdtrain.benchmark.__main__"),
        *("hvdtrain.doctor.__main__", "hvdtrain.report.__main__"),
        *("hvdtrain.verify.__main__", "benchmarks.allreduce", "benchmarks.input_speed"),
        "benchmarks.parallelism",
    ],
)
def test_importing_the_package_loads_no_tensorflow(program):
    code = (
        "import hvdtrain, hvdtrain.job, hvdtrain.job.signals, hvdtrain.data;"
        f"import {program}, sys;"
        "assert not {'tensorflow', 'keras', 'horovod'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
