"""The commands of the README, and the scripts of the pages, run as they stand there."""

import pathlib
import re
import socket
import sys

import keras
import numpy as np
import pytest

from hvdtrain import data

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT.joinpath("README.md").read_text()
(WAYS,) = re.findall(r"```bash\n(horovodrun .*?)\n```", README, re.S)
WAYS = [line.partition(" #")[0].rstrip() for line in WAYS.splitlines()]
# scripts/slurm_test.sh and scripts/docker_test.sh run the others:
# tests/unit/test_deployment.py.
PROGRAMS = [way for way in WAYS if way.split()[0] not in ("docker", "sbatch")]


@pytest.fixture
def _no_network(monkeypatch, tmp_path):
    # auto then takes the embedded digits. A port that is bound and does not listen.
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/"
        monkeypatch.setenv("HVDTRAIN_MNIST_URLS", url)
        monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "cache"))
        yield


def test_the_ways_to_run_it_are_in_the_readme():
    starts = [command.split()[0] for command in WAYS]
    programs = ["mpirun", "python", "python"]
    assert starts == ["horovodrun", "sbatch", *["docker"] * 3, *programs]


# Other tests train under these launchers, with other flags and on two ranks.
@pytest.mark.long
@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize("command", PROGRAMS)
def test_a_way_to_run_it(run, command, tmp_path):
    command = command.replace("/tmp/digits", str(tmp_path))
    if "--epochs" not in command:
        # The default number of steps: test_mnist.py.
        command += " --max_steps=40"
    job = run([], program=["sh", "-c", command], forked=False)
    assert job.returncode == 0, job.text
    assert "test accuracy" in job.text


@pytest.mark.parametrize(
    "launcher", [pytest.param("alone", marks=pytest.mark.long), "gloo"]
)
def test_the_example(run, tmp_path, launcher):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    script = tmp_path / "script.py"
    script.write_text(code)
    program = [sys.executable, str(script)]
    job = run([], program=program, launcher=launcher, forked=False)
    assert job.returncode == 0, job.text
    assert "Epoch 2/2" in job.text


# It calls `training.fit`, as unit tests do.
@pytest.mark.long
def test_the_script_of_your_own(run, tmp_path, monkeypatch):
    page = ROOT.joinpath("docs/training.md").read_text()
    script, records = re.findall(r"```python\n(.*?)```", page, re.S)
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.S)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "records.py").write_text(records)
    (tmp_path / "from_files.py").write_text(changed(script, diff))
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "cache"))

    def python(arguments, launcher):
        program = ["sh", "-c", f"cd {tmp_path} && exec {sys.executable} {arguments}"]
        job = run([], program=program, launcher=launcher)
        assert job.returncode == 0, job.text
        return job.text

    text = python("train.py --epochs=5", "mpirun")
    accuracy = re.search(r"test accuracy ([\d.]+)", text)[1]
    assert float(accuracy) > 0.9
    model = keras.models.load_model(tmp_path / "run/model.keras")
    digits = data.load("digits")
    _, saved = model.evaluate(digits.x_test, digits.y_test, verbose=0)
    assert f"{saved:.4f}" == accuracy
    python("records.py", "alone")
    text = python("from_files.py --epochs=5 --model_dir=files", "mpirun")
    # The same samples in the same order.
    assert re.search(r"test accuracy ([\d.]+)", text)[1] == accuracy
    text = python("from_files.py --epochs=6 --model_dir=files", "alone")
    assert "continues      at step 117 from files/checkpoints/step-" in text
    assert "which 2 ranks wrote" in text
    # The page about predictions takes the model of this one.
    page = ROOT.joinpath("docs/predicting.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.S)
    (tmp_path / "predict.py").write_text(script)
    count = len(digits.x_test)
    text = python("predict.py --out=scores/digits-*.npy", "mpirun")
    assert re.search(rf"^{count} samples in \d+ files$", text, re.M)
    paths = sorted(tmp_path.glob("scores/digits-*.npy"))
    found = np.concatenate([np.load(path) for path in paths]).argmax(axis=1)
    assert f"{np.mean(found == digits.y_test):.4f}" == accuracy


def changed(text, diff):
    """Return a text with the - lines replaced by the + lines that follow them."""
    for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, re.M):
        before, after = (re.sub(r"^. ?", "", part, flags=re.M) for part in (old, new))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


@pytest.mark.long
def test_the_script_of_a_sharded_model(run, tmp_path):
    page = ROOT.joinpath("docs/parallelism/mesh.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    script = tmp_path / "script.py"
    script.write_text(code)
    program = [sys.executable, str(script)]
    job = run([str(tmp_path / "model.keras")], program=program, launcher="mpirun")
    assert job.returncode == 0, job.text
    assert "kernel: (20, 128) on rank 0" in job.text
    # The full model, in plain Keras.
    found = re.search(r"kernel: \(20, 256\) .* accuracy ([\d.]+)", job.text)
    assert float(found[1]) > 0.9


def test_an_environment_of_your_own(run):
    """The commands find what is installed: test_install.py has empty environments."""
    [commands] = re.findall(r"```bash\n(pip install .*?)\n```", README, re.S)
    script = f"export PIP_NO_INDEX=1\n{commands}"
    job = run([], program=["sh", "-ec", script], forked=False)
    assert job.returncode == 0, job.text
    assert "is installed, nothing to do" in job.text


def test_ci_calls_the_readmes_test_command():
    assert "./scripts/test.sh" in README
    assert "./scripts/test.sh" in ROOT.joinpath(".ci/run").read_text()
