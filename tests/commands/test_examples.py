"""Every example runs with the command of its docstring, and prints what that says."""

import ast
import importlib.util
import json
import os
import pathlib
import re
import struct
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# The file, then what it prints, with a number above or below a bound.
ABOVE = {
    "custom_loop.py": (r"test accuracy ([\d.]+)", 0.9),
    "dlrm_parquet.py": (r"evaluation at step 586: .* auc ([\d.]+)", 0.75),
    "mixed_precision.py": (r"test accuracy ([\d.]+), loss scale \d+", 0.9),
    "mnist_fit.py": (r"test accuracy ([\d.]+) on digits", 0.9),
    "pipeline.py": (r"test accuracy ([\d.]+)", 0.9),
    "tabular.py": (r"evaluation at step 500: .* auc ([\d.]+)", 0.8),
}
# Those that the functions below start.
OTHERS = {
    "elastic.py",
    "gan.py",
    "gpt2_text.py",
    "imagenet_resnet50.py",
    "optuna_slurm.py",
    "optuna_slurm.sbatch",
    "resnet_images.py",
    "restart.ipynb",
    "trackers/mlflow_observer.py",
    "trackers/tensorboard_observer.py",
    "trackers/train.py",
    "trackers/wandb_observer.py",
}


def command(name, number=0):
    """Return one of the commands of a docstring that start ranks."""
    page = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    found = re.findall(r"^ {4}(horovodrun (?:.*\\\n)*.*)$", page, re.M)
    return found[number].replace("python examples", f"{sys.executable} examples")


def needs(package, remedy):
    """Skip a test where a package is missing."""
    return pytest.mark.skipif(
        not importlib.util.find_spec(package), reason=f"no {package}: {remedy}"
    )


def search_path(package):
    """Return a PYTHONPATH with this clone and the directory of a package."""
    origin = pathlib.Path(importlib.util.find_spec(package).origin)
    return f"{ROOT}{os.pathsep}{origin.parents[1]}"


def number(pattern, text):
    """Return the number that the last match of `pattern` has as its group."""
    return float(re.findall(pattern, text)[-1])


@pytest.fixture
def shell(run):
    """Return `shell(command, ...)`: runs it and returns what its ranks print."""

    def shell(command, **environment):
        offline = {"HVDTRAIN_MNIST_URLS": "http://127.0.0.1:1/"}
        job = run([], program=["sh", "-c", command], environment=offline | environment)
        assert job.returncode == 0, job.text
        return "\n".join(job.lines)

    return shell


def test_every_example_has_a_test():
    files = {
        str(path.relative_to(EXAMPLES))
        for pattern in ("**/*.py", "**/*.sbatch", "**/*.ipynb")
        for path in EXAMPLES.glob(pattern)
    }
    assert files == {*ABOVE} | OTHERS


def test_the_table_has_every_example():
    table = (EXAMPLES / "README.md").read_text()
    linked = {*re.findall(r"\]\(([^)]*)\)", table)}
    files = {*ABOVE} | OTHERS | {"imagenet_resnet50.diff"}
    assert linked == files


# By default one script runs as users start it, the README's: test_readme.py.
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "mnist_fit.py" else pytest.mark.release)
        for name in ABOVE
    ],
)
def test_an_accuracy(shell, tmp_path, name):
    program = command(name).replace("=run", f"={tmp_path / 'run'}")
    text = shell(program, HVDTRAIN_CACHE_DIR=str(tmp_path))
    pattern, bound = ABOVE[name]
    assert number(pattern, text) > bound, text


@pytest.mark.release
def test_gan(shell):
    text = shell(command("gan.py"))
    assert number(r"distance of the mean images ([\d.]+)", text) < 0.12, text
    assert number(r"spread: generated ([\d.]+)", text) > 0.15, text


@needs("keras_hub", "scripts/test.sh hub")
def test_gpt2_text(shell):
    text = shell(command("gpt2_text.py"), PYTHONPATH=search_path("keras_hub"))
    assert number(r"evaluation at step 300: loss ([\d.]+)", text) < 2.7, text


@pytest.mark.release
def test_elastic_without_the_host_that_is_lost(start, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n127.0.0.1:1\n")
    program = command("elastic.py").replace("cat hosts", f"cat {hosts}")
    program = program.replace("--gloo", "--gloo --network-interface lo")
    job = start([], program=["sh", "-c", program])
    job.wait_for("Epoch 2/10")
    job.ranks()[1].kill()
    job.wait()
    assert job.returncode == 0, job.text
    accuracy = number(r"test accuracy ([\d.]+) on 1 ranks at the end", job.text)
    assert accuracy > 0.9


@pytest.mark.release
def test_imagenet_continues_from_a_checkpoint(shell, tmp_path):
    program = f"{command('imagenet_resnet50.py', 1)} --checkpoint-dir={tmp_path}"
    shell(f"{program} --epochs=1 --steps-per-epoch=5")
    text = shell(program)
    assert "Epoch 1/2" not in text
    assert "Epoch 2/2" in text
    assert number(r" accuracy: ([\d.]+)", text) > 0.3, text
    names = [path.name for path in sorted(tmp_path.glob("*.keras"))]
    assert names == ["checkpoint-001.keras", "checkpoint-002.keras"]


def test_the_lines_of_the_diff_are_in_the_imagenet_example():
    example = (EXAMPLES / "imagenet_resnet50.py").read_text()
    diff = (EXAMPLES / "imagenet_resnet50.diff").read_text()
    added = re.findall(r"^\+(.*)$", diff, re.M)
    assert len(added) > 10
    assert [line for line in added if line not in example.splitlines()] == []


@pytest.mark.release
def test_resnet_continues_after_a_signal(start, shell, tmp_path):
    program = command("resnet_images.py").replace("=run", f"={tmp_path}/run")
    program = program.replace("=digits", f"={tmp_path}/digits")
    job = start([], program=["sh", "-c", program])
    job.wait_for("evaluation at step 94")
    job.ranks()[0].terminate()
    assert job.wait().returncode == 75, job.text
    text = shell(program)
    assert "evaluation at step 94:" not in text
    assert number(r"evaluation at step 281: .*accuracy ([\d.]+)", text) > 0.85, text
    assert len([*tmp_path.glob("digits/*/*/*.png")]) == 1797


@pytest.mark.engines
@needs("nbclient", "scripts/test.sh engines")
def test_the_notebook_continues_after_a_kill(monkeypatch, tmp_path):
    nbclient = importlib.import_module("nbclient")
    nbformat = importlib.import_module("nbformat")
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(EXAMPLES / "restart.ipynb", as_version=4)
    # Its assertion compares the weights with those of a job that was not killed.
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "Starting restart 1 of 1." in text
    # Of both runs.
    assert re.findall(r"^starts +(\d)", text, re.M) == ["2", "1"], text
    first, second = map(int, re.findall(r"^steps repeated +(\d+)", text, re.M))
    assert first < 130, text
    assert second == 0, text
    assert outputs[-1]["data"].keys() >= {"image/png"}


def test_the_notebook_is_committed_without_outputs():
    notebook = json.loads((EXAMPLES / "restart.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    assert {cell["execution_count"] for cell in code} == {None}


@pytest.mark.release
@needs("optuna", "scripts/setup.sh")
def test_optuna(shell, tmp_path):
    program = command("optuna_slurm.py").replace("study.log", f"{tmp_path}/study.log")
    text = shell(f"{program} --epochs=3", PYTHONPATH=search_path("optuna"))
    assert number(r"trial 0: accuracy ([\d.]+)", text) > 0.5, text


@pytest.mark.release
@needs("optuna", "scripts/setup.sh")
def test_tasks_of_a_slurm_array_share_a_study(shell, tmp_path):
    study = tmp_path / "study.log"
    for task in range(2):
        text = shell(
            f"bash examples/optuna_slurm.sbatch --epochs=3 --study={study}",
            PYTHONPATH=search_path("optuna"),
            SLURM_SUBMIT_DIR=str(ROOT),
            SLURM_NTASKS="2",
            SLURM_ARRAY_JOB_ID="1",
        )
        assert f"trial {task}: accuracy" in text
        assert f"best of {task + 1}:" in text


# What an observer is called with: tests/unit/test_observers.py.
@pytest.mark.long
def test_tensorboard(shell, tmp_path):
    text = shell(f"{command('trackers/train.py')} --model_dir={tmp_path}")
    assert number(r"evaluation at step .*accuracy ([\d.]+)", text) > 0.9
    assert len([*tmp_path.glob("tensorboard/events.out.*")]) == 1


@needs("mlflow", "scripts/test.sh trackers")
def test_mlflow_continues_the_run_of_a_job(shell, tmp_path):
    program = command("trackers/train.py").replace("tensorboard", "mlflow")
    for epochs in (1, 2):
        shell(
            f"{program} --model_dir={tmp_path / 'run'} --epochs={epochs}",
            PYTHONPATH=search_path("mlflow"),
            MLFLOW_TRACKING_URI=f"file://{tmp_path / 'store'}",
            MLFLOW_ALLOW_FILE_STORE="true",
        )
    # Of the only run: a line has a time, a value and a step.
    [path] = tmp_path.glob("store/*/*/metrics/test_accuracy")
    assert path.parents[1].name == (tmp_path / "run/mlflow_run_id").read_text()
    steps = [int(line.split()[2]) for line in path.read_text().splitlines()]
    assert len(steps) > 1
    assert steps == sorted(steps)


def wandb_records(path):
    """Yield the records of a .wandb file, which is in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    content, at, record = path.read_bytes(), 7, b""
    while at < len(content):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        # Whole, or the last piece.
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


@needs("wandb", "scripts/test.sh trackers")
def test_wandb_continues_the_run_of_a_job(shell, tmp_path):
    # One rank: the others have no observer, and each start takes less time.
    program = f"{sys.executable} examples/trackers/train.py --tracker=wandb"
    for epochs in (1, 2):
        shell(
            f"{program} --model_dir={tmp_path} --epochs={epochs}",
            PYTHONPATH=search_path("wandb"),
            WANDB_MODE="offline",
        )
    name = (tmp_path / "wandb_run_id").read_text()
    paths = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in paths] == [f"run-{name}.wandb"] * 2
    steps = []
    for path in paths:
        records = [*wandb_records(path)]
        [axis] = [each.metric for each in records if each.HasField("metric")]
        assert (axis.glob_name, axis.step_metric) == ("*", "step")
        for each in records:
            values = {
                (item.key or item.nested_key[0]): item.value_json
                for item in each.history.item
            }
            if "test_accuracy" in values:
                steps.append(int(values["step"]))
    assert len(steps) > 1
    assert steps == sorted(steps)
