"""The real benchmark for a few steps: its figures exist and are consistent."""

import json
import pathlib
import re
import shutil
import sys

import pytest

PAGE = (
    pathlib.Path(__file__).parents[2].joinpath("docs/figures/benchmark.md").read_text()
)
BENCHMARK = [sys.executable, "-m", "hvdtrain.benchmark"]
FEW = ["--rounds=2", "--seconds=0.05", "--dataset=digits"]
PARTS = ("compute", "communication", "overhead", "input_wait")
# A user's own model.
MODEL = """
import keras

def make():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    return model

"""


def figures_of(path, *, size, devices):
    """Read a file, and check what holds for every training."""
    result = json.loads(path.read_text())
    figures = result["figures"]
    assert (result["size"], figures["devices"]) == (size, devices)
    by_rank = figures["samples_per_second_by_rank"]
    assert len(by_rank) == len(figures["memory"]) == size
    assert figures["samples_per_second"] == pytest.approx(sum(by_rank))
    times = figures["step_seconds"]
    assert 0 < times["p50"] <= times["p90"] <= times["p99"]
    assert times["mean"] <= times["p99"]
    for parts in figures["rounds"]["split_seconds"]:
        assert sum(parts[name] for name in PARTS) == pytest.approx(parts["step"])
        assert parts["compute"] > 0
    one = figures["one_rank"]
    assert one["efficiency"] == pytest.approx(one["speedup"] / devices)
    assert 0 < figures["load_balance"] <= 1
    assert all(100e6 < each["peak_resident"] < 10e9 for each in figures["memory"])
    assert 1 < figures["start_up"]["seconds"] < 240
    return result, figures


@pytest.mark.release
def test_two_ranks(run, tmp_path):
    path = tmp_path / "two.json"
    # The first command of the page; the default rounds take a minute.
    command, _ = re.search(r"```sh\n(.*hvdtrain\.benchmark.*)", PAGE)[1].split("#")
    script = " ".join([command, *FEW, f"--json={path}"])
    job = run([], program=["sh", "-c", script], forked=False)
    assert job.returncode == 0, job.text
    for word in ("communication", "bare Keras", "load balance", "start-up"):
        assert word in job.text
    # On rank 0 alone.
    assert sum(line.startswith("speed ") for line in job.lines) == 1, job.text
    assert job.lines[0].startswith("versions"), job.text
    result, figures = figures_of(path, size=2, devices=2)
    assert result["flags"]["batch_size"] == 64
    # 101,770 weights of float32.
    assert figures["reduced_bytes"] == 407_080
    variants = figures["rounds"]["step_seconds_by_rank"]
    assert set(variants[0]) == set(variants[1])
    assert set(variants[0]) == {
        *("train", "constant", "function", "local", "alone", "bare")
    }
    assert all(variants[0]["alone"])
    # The other rank was blocked meanwhile.
    assert variants[1]["alone"] == variants[1]["bare"] == [None, None]
    assert figures["start_up"]["command"] == "mpirun"
    copy = shutil.copy(path, tmp_path / "copy.json")
    compared = run([f"--compare={path},{copy}"], program=BENCHMARK)
    assert compared.returncode == 0, compared.text
    assert compared.lines[0].split() == ["strategy", "horovod", "horovod"]


@pytest.mark.release
def test_one_process(start, tmp_path):
    names = {"single": 1, "split": 2, "mirrored": 2}
    jobs = {
        name: start(
            [*FEW, f"--strategy={name}", f"--json={tmp_path / name}.json"],
            program=BENCHMARK,
        )
        for name in names
    }
    for name, job in jobs.items():
        assert job.wait().returncode == 0, job.text
        _, figures = figures_of(tmp_path / f"{name}.json", size=1, devices=names[name])
        if names[name] > 1:
            assert figures["reduced_bytes"] == 407_080


@pytest.mark.long
def test_a_model_of_ones_own(run, tmp_path):
    (tmp_path / "my_model.py").write_text(MODEL)
    path = tmp_path / "own.json"
    flags = ["--workload=my_model:make", "--batch_size=8", f"--json={path}"]
    job = run(
        [*FEW, *flags],
        program=BENCHMARK,
        environment={"PYTHONPATH": f"{tmp_path}:."},
        # Its start-up is measured.
        forked=False,
    )
    assert job.returncode == 0, job.text
    result, figures = figures_of(path, size=1, devices=1)
    assert result["flags"]["batch_size"] == 8
    assert figures["reduced_bytes"] == 0
    assert "communication" in job.text


STRATEGY = """
import sys

import numpy as np

from hvdtrain.benchmark import one_process, workloads
from hvdtrain.benchmark.benchmark_options import BenchmarkOptions
from hvdtrain.job import World

options = BenchmarkOptions(strategy=sys.argv[1], dataset="digits").with_defaults()
names = one_process.make_devices(options)
workload = workloads.load(options, World())
model, reference = one_process.build(options, workload, names), workload.build(2)
reference.set_weights(model.get_weights())
for each in (model, reference):
    batches = workload.input(options, devices=2)(0, 5)
    each.fit(batches, steps_per_epoch=5, shuffle=False, verbose=0)
pairs = zip(model.get_weights(), reference.get_weights(), strict=True)
print(max(float(np.abs(a - b).max()) for a, b in pairs))
"""


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["split", "mirrored"])
def test_a_strategy_computes_what_one_device_does(run, strategy):
    job = run([strategy], program=[sys.executable, "-c", STRATEGY])
    assert job.returncode == 0, job.text
    assert 0 <= float(job.lines[-1]) < 1e-6


def long(*values):
    """A case that starts TensorFlow, of which one other is in the README's command."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("arguments", "launcher", "words"),
    [
        (["--strategy=split"], "gloo", ["2 ranks", "--strategy=split", "one process"]),
        long(
            ["--strategy=mirrored", "--steps_per_execution=2"],
            "alone",
            ["--steps_per_execution=2", "expected 1"],
        ),
        long(
            ["--json=/dev/null/a.json"], "alone", ["/dev/null/a.json", "another --json"]
        ),
        long(["--workload=no_module:make"], "alone", ["no_module", "module:function"]),
        long(
            ["--workload=platform:node"], "alone", ["platform:node", "compiled Keras"]
        ),
        long(["--workload=os.path:join"], "alone", ["os.path:join raised TypeError"]),
        long(["--workload=sys:exit"], "alone", ["sys:exit raised SystemExit"]),
        long(["--dataset=custom"], "alone", ["custom", "data_dir"]),
    ],
)
def test_what_cannot_be_measured_is_one_line(run, arguments, launcher, words):
    job = run(arguments, program=BENCHMARK, launcher=launcher)
    assert job.returncode == 1, job.text
    assert len(job.lines) == 1, job.text
    assert all(word in job.text for word in words), job.text
