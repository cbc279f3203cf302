"""Imports go down the house, never up, sideways or in a circle."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# From top to bottom; modules of one line do not know each other.
FLOORS = [
    ["mnist", "doctor"],
    ["program", "report", "training", "diagnosis.ranks"],
    ["diagnosis.cluster", "diagnosis.installation", "diagnosis.machine"],
    ["diagnosis"],
    ["diagnosis.finding", "diagnosis.probe"],
    ["observers", "progress", "checkpoint"],
    ["models", "optimizers"],
    ["data"],
    ["data.datasets", "data.sharding"],
    ["data.download"],
    ["data.files"],
    ["job"],
    ["job.start"],
    ["job.backend"],
    ["job.agreement"],
    ["keras"],
    ["keras.callbacks", "keras.elastic", "keras.saving", "keras.partial"],
    ["keras.callbacks.consistency", "keras.callbacks.joining"],
    ["keras.callbacks.broadcast", "keras.callbacks.stopping"],
    ["keras.callbacks.metric_average", "keras.callbacks.every"],
    ["keras.callbacks.checkpoint", "keras.callbacks.learning_rate"],
    ["keras.elastic.callbacks", "keras.elastic.running", "keras.elastic.state"],
    ["keras.variables"],
    ["keras.optimizer", "keras.tape", "keras.layers", "keras.exchange"],
    [
        "keras.hook",
        "keras.gradients",
        "keras.collectives",
        "keras.metrics",
        "keras.objects",
    ],
    ["keras.reduction", "keras.basics", "keras.rates"],
    ["keras.groups"],
    ["keras.wire"],
    ["job.cores", "job.files", "job.output"],
    ["job.launchers"],
    ["job.world"],
    [""],
]
FLOOR_OF = {module: i for i, floor in enumerate(FLOORS) for module in floor}


def module_name(path):
    parts = path.relative_to(ROOT / "hvdtrain").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {
    module_name(path): path for path in sorted((ROOT / "hvdtrain").rglob("*.py"))
}


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from hvdtrain import data` imports a module, `from x import f` does not.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                name if name.removeprefix("hvdtrain.") in MODULES else node.module
                for name in names
            ]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "hvdtrain":
                yield name.removeprefix("hvdtrain").removeprefix(".")


def test_every_module_has_its_floor():
    assert sorted(FLOOR_OF) == sorted(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    for imported in imported_modules(MODULES[module]):
        assert FLOOR_OF[imported] > FLOOR_OF[module], f"{module} imports {imported}"


def test_the_drop_in_stands_alone():
    for module, path in MODULES.items():
        if module.startswith("keras"):
            outside = [
                name
                for name in imported_modules(path)
                if name and not name.startswith(("keras", "job.files"))
            ]
            assert not outside, f"{module} imports {outside}"


def test_data_knows_no_horovod():
    for module, path in MODULES.items():
        if module.startswith(("data", "models", "optimizers")):
            assert "horovod" not in path.read_text().replace("horovodrun", "")


def test_importing_the_package_loads_no_tensorflow():
    code = (
        "import hvdtrain, hvdtrain.job, hvdtrain.data, sys;"
        "assert not {'tensorflow', 'keras', 'horovod'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
