"""The programs of benchmarks/ for a few rounds: their tables and files."""

import json
import os
import pathlib
import sys

import pytest

pytestmark = pytest.mark.release


@pytest.mark.parametrize("launcher", ["mpi", "gloo"])
def test_collectives(run, tmp_path, launcher):
    path = tmp_path / "collectives.json"
    few = ["--rounds=2", "--seconds=0.01", "--max_bytes=64000"]
    program = [sys.executable, "-m", "benchmarks.allreduce"]
    job = run([*few, f"--json={path}"], program=program, launcher=launcher)
    assert job.returncode == 0, job.text
    measured = json.loads(path.read_text())["collectives"]
    assert [row["bytes"] for row in measured["rows"]] == [1000, 4000, 16000, 64000]
    paths = ["Horovod", "hvdtrain", "copy"]
    if launcher == "mpi":
        paths = ["MPI", *paths]
    for row in measured["rows"]:
        assert list(row["seconds"]) == paths
        assert all(seconds > 0 for seconds in row["seconds"].values())


def test_collectives_beside_pytorch(run, tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "collectives.json"
    few = ["--torch", "--rounds=1", "--seconds=0.01", "--sizes=1000"]
    program = [sys.executable, "-m", "benchmarks.allreduce"]
    packages = pathlib.Path(torch.__file__).parents[1]
    job = run(
        [*few, f"--json={path}"],
        program=program,
        launcher="gloo",
        environment={"PYTHONPATH": f".{os.pathsep}{packages}"},
    )
    assert job.returncode == 0, job.text
    result = json.loads(path.read_text())
    (row,) = result["collectives"]["rows"]
    assert list(row["seconds"]) == ["Horovod", "hvdtrain", "PyTorch", "copy"]
    assert result["versions"]["PyTorch"] == torch.__version__


def test_input(run, tmp_path):
    path = tmp_path / "input.json"
    few = ["--rounds=2", "--seconds=0.05", "--batch_size=100"]
    program = [sys.executable, "-m", "benchmarks.input_speed"]
    job = run([*few, f"--json={path}"], program=program)
    assert job.returncode == 0, job.text
    result = json.loads(path.read_text())
    assert result["flags"]["batch_size"] == 100
    for name, speeds in result["input"].items():
        assert any(line.startswith(name) for line in job.lines), job.text
        assert list(speeds["samples_per_second"]) == ["data.batches", "tf.data"]


def test_kinds_of_parallelism(run, tmp_path):
    path, picture = tmp_path / "kinds.json", tmp_path / "kinds.png"
    few = ["--rounds=2", "--seconds=0.01", "--tables=17,300", "--batch_size=8"]
    program = [sys.executable, "-m", "benchmarks.parallelism"]
    job = run([*few, f"--json={path}"], program=program, launcher="mpirun")
    assert job.returncode == 0, job.text
    kinds = json.loads(path.read_text())["parallelism"]
    assert list(kinds) == ["replicated", "row", "column", "tables"]
    for name in kinds:
        assert any(line.startswith(name) for line in job.lines), job.text
    pytest.importorskip("matplotlib")
    program = [sys.executable, "-m", "benchmarks.charts"]
    drawn = run(
        [f"--output={picture}", str(path)],
        program=program,
        # With matplotlib, which other programs of these tests run without.
        environment={"PYTHONPATH": "."},
    )
    assert drawn.returncode == 0, drawn.text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_model_over_stages(run):
    few = ["--workload=wide", "--rounds=1", "--seconds=0.01", "--batch_size=8"]
    program = [sys.executable, "-m", "benchmarks.parallelism"]
    job = run(few, program=program, launcher="mpirun")
    assert job.returncode == 0, job.text
    for name in ("replicated", "state", "model", "pipeline"):
        assert any(line.startswith(name) for line in job.lines), job.text


def test_input_is_measured_in_one_process(run):
    program = [sys.executable, "-m", "benchmarks.input_speed"]
    job = run([], program=program, launcher="gloo")
    assert (job.returncode, len(job.lines)) == (1, 1), job.text
    assert "a job of 2 ranks; expected one process" in job.text


def test_a_backward_pass_that_leaves_the_cpu_free(run, tmp_path):
    path = tmp_path / "backward.json"
    few = ["--rounds=1", "--seconds=0.01", "--batch_size=1", f"--json={path}"]
    job = run(
        ["--workload=benchmarks.backward:at_once", *few],
        program=[sys.executable, "-m", "hvdtrain.benchmark"],
        launcher="mpirun",
    )
    assert job.returncode == 0, job.text
    figures = json.loads(path.read_text())["figures"]
    assert figures["reduced_bytes"] == 4 * 20 * 1118**2
