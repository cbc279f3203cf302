"""The real program, for a few steps, under each launcher."""

import fcntl
import importlib.util
import json
import os
import pathlib
import pty
import re
import subprocess
import sys
import termios
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_SECONDS = 240
NOISE = re.compile(r"I0000|E0000|W0000|oneDNN|cuda|CUDA|Warning|InitializeLog")


# Of one process and of every launcher's job, which are to compute the same.
DIGITS = ["--dataset=digits", "--seed=7"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return what one process shows on a terminal, and its home.

    The processes of pytest-xdist share the run: the first one starts it.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    home, shown = shared / "alone", shared / "alone.shown"
    with (shared / "alone.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shown.exists():
            home.mkdir(exist_ok=True)
            shown.write_bytes(train_on_a_terminal(home))
    return shown.read_bytes(), home


def train_on_a_terminal(home):
    flags = ["--learning_rate=0.2", "--max_steps=40", "--model_dir=~/run"]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain.mnist", *DIGITS, *flags],
        cwd=ROOT,
        env=os.environ | {"HOME": str(home)},
        stdout=theirs,
        stderr=theirs,
    )
    limit = threading.Timer(TIMEOUT_SECONDS, process.kill)
    limit.start()
    os.close(theirs)
    shown = b""
    try:
        while chunk := read(ours):
            shown += chunk
        assert process.wait(60) == 0, shown
    finally:
        limit.cancel()
        process.kill()
        os.close(ours)
    return shown


def read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other end is closed
        return b""


@pytest.fixture
def train(run, tmp_path):
    """Return `train(arguments, ...)`: the finished job and its summary."""

    def train(arguments, *, launcher, ranks=2):
        model_dir = tmp_path / launcher
        arguments = [*arguments, f"--model_dir={model_dir}"]
        # As users start it: these ranks import TensorFlow themselves.
        job = run(arguments, launcher=launcher, ranks=ranks, forked=False)
        assert job.returncode == 0, job.text
        return job, json.loads((model_dir / "summary.json").read_text())

    return train


def weights(directory):
    return keras.models.load_model(directory / "model.keras").get_weights()


def test_bar_on_a_terminal(alone):
    shown, _ = alone
    assert b"100%|" in shown
    assert b"40/40" in shown
    assert b"evaluation at step 40" in shown


def test_summary_and_files(alone):
    _, home = alone
    summary = json.loads((home / "run" / "summary.json").read_text())
    assert summary["flags"]["max_steps"] == 40
    assert summary["flags"]["model_dir"] == str(home / "run")
    expected = {
        "dataset": "digits",
        "model": "mlp",
        "size": 1,
        "local_batch_size": 64,
        "global_batch_size": 64,
        "steps": 40,
        "learning_rate": 0.2,
        "seed": 7,
    }
    assert {key: summary[key] for key in expected} == expected
    assert set(summary["versions"]) >= {"hvdtrain", "TensorFlow", "Keras", "Horovod"}
    assert 0 < summary["test_loss"] < 3
    assert 0 < summary["train_loss"] < 3
    assert 0 < summary["test_accuracy"] <= 1
    assert summary["samples_per_second"] > 0
    assert summary["train_seconds"] > 0
    entries = sorted(path.name for path in (home / "run").glob("[!.]*"))
    assert entries == [
        *("checkpoints", "log.jsonl", "model.keras", "summary.json", "test", "train")
    ]


# horovodrun --mpi calls mpirun: the two compute the same bits.
@pytest.mark.parametrize(
    "launchers",
    [("gloo",), pytest.param(("mpi", "mpirun"), marks=pytest.mark.release)],
)
def test_every_launcher_computes_what_one_process_does(
    alone, train, tmp_path, launchers
):
    _, home = alone
    expected = json.loads((home / "run" / "summary.json").read_text())
    reference = weights(home / "run")
    arguments = [*DIGITS, "--learning_rate=0.1", "--batch_size=32", "--max_steps=80"]
    found = {}
    for launcher in launchers:
        job, summary = train(arguments, launcher=launcher)
        assert summary["size"] == 2
        assert summary["steps"] == expected["steps"] == 40
        assert summary["local_batch_size"] == 32
        assert summary["global_batch_size"] == expected["global_batch_size"] == 64
        assert summary["learning_rate"] == expected["learning_rate"] == 0.2
        assert summary["controller"] == ("Gloo" if launcher == "gloo" else "MPI")
        assert summary["test_accuracy"] == expected["test_accuracy"]
        for key in ("train_loss", "test_loss"):
            assert summary[key] == pytest.approx(expected[key], rel=1e-4)
        found[launcher] = weights(tmp_path / launcher)
        for mine, theirs in zip(found[launcher], reference, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        check_output(job.lines)
    # The same seed and the same ranks: the same bits.
    if "mpi" in found:
        for a, b in zip(found["mpi"], found["mpirun"], strict=True):
            np.testing.assert_array_equal(a, b)


# Divided models that one process equals: tests/parallel.
@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "mesh", "flags"),
    [
        pytest.param(
            *(4, "data 2 x pipeline 1 x model 2", ["--model_parallel=2"]),
            marks=pytest.mark.release,
        ),
        (2, "data 1 x pipeline 2 x model 1", ["--pipeline_stages=2"]),
    ],
)
def test_a_divided_model_computes_what_one_process_does(
    alone, train, tmp_path, ranks, mesh, flags
):
    _, home = alone
    replicas = int(mesh.split()[1])
    job, summary = train(
        [
            *(*DIGITS, *flags, "--shard_optimizer_state", "--save_every_steps=20"),
            f"--learning_rate={0.2 / replicas}",
            f"--batch_size={64 // replicas}",
            f"--max_steps={40 * replicas}",
        ],
        launcher="mpi",
        ranks=ranks,
    )
    assert f"mesh           {mesh}" in job.text
    assert f"per replica x {replicas} replica" in job.text
    expected = json.loads((home / "run" / "summary.json").read_text())
    assert summary["test_accuracy"] == expected["test_accuracy"]
    for mine, theirs in zip(
        weights(tmp_path / "mpi"), weights(home / "run"), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def check_output(lines):
    """Check the output: that of one rank, without messages of TensorFlow."""
    assert not [line for line in lines if NOISE.search(line)], lines
    beginnings = ["data ", "hvdtrain 0", "ranks ", "model ", "batch ", "learning rate "]
    for line, beginning in zip(lines, beginnings, strict=False):
        assert line.startswith(beginning), lines
    rest = lines[len(beginnings) :]
    progress = (
        r"step \d+/40, epoch \d/\d  loss \d.\d+  accuracy \d.\d+  "
        r"[\d,]+ samples/s  .* left"
    )
    while re.fullmatch(progress, rest[0]):
        rest = rest[1:]
    assert lines[lines.index(rest[0]) - 1].startswith("step 40/40")
    words = [line.split()[0] for line in rest]
    assert words == ["evaluation", "checkpoint", "test", "written"]


def test_report_of_a_run(alone, run, tmp_path):
    _, home = alone
    # The table does not need it.
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    output = tmp_path / "report.png"
    arguments = [f"--output={output}", str(home / "run")]
    job = run(
        arguments,
        program=[sys.executable, "-m", "hvdtrain.report"],
        # With matplotlib, which other programs of these tests run without.
        environment={"PYTHONPATH": "."},
    )
    cells = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in job.lines}
    summary = json.loads((home / "run" / "summary.json").read_text())
    assert cells["steps"] == "40 of 40", job.text
    assert cells["samples"] == "2,560"
    assert cells["starts"] == "1"
    assert cells["last accuracy"] == f"{summary['test_accuracy']:.4f}"
    assert job.returncode == (0 if has_matplotlib else 1)
    assert output.exists() == has_matplotlib


@pytest.mark.release
def test_all_flags_together(train, tmp_path):
    timeline = tmp_path / "timeline.json"
    job, summary = train(
        [
            "--dataset=digits",
            "--epochs=2",
            "--batch_size=50",
            "--optimizer=adam",
            "--warmup_epochs=0.5",
            "--decay=cosine",
            "--accumulation_steps=2",
            "--compression=bf16",
            "--mixed_precision=bfloat16",
            "--evaluate_every=1",
            "--export=best,final",
            "--consistency_check_steps=3",
            "--steps_per_execution=2",
            "--profile_steps=11,13",
            f"--timeline_file={timeline}",
        ],
        launcher="mpirun",
    )
    assert "reduction: Horovod" in job.text
    assert f"timeline       {timeline}" in job.text
    names = {event.get("name") for event in json.loads(timeline.read_text())}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE"} <= names
    (trace,) = (tmp_path / "mpirun" / "plugins").rglob("*.xplane.pb")
    assert trace.stat().st_size > 0
    # 1,497 images twice in batches of 100: 30 passes of each rank.
    assert summary["steps"] == 15
    assert summary["global_batch_size"] == 200
    assert summary["learning_rate"] == pytest.approx(0.002)
    assert summary["test_accuracy"] > 0.7
    path = f"{summary['flags']['model_dir']}/export/final/step-00000030"
    assert f"export at step 30 written to {path} in " in job.text
    assert tf.saved_model.contains_saved_model(path)


def test_help_is_readable_and_needs_no_tensorflow(run):
    environment = {"PYTHONPROFILEIMPORTTIME": "1"}
    job = run(["--help"], environment=environment, forked=False)
    assert job.returncode == 0
    assert "--batch_size=64" in job.text
    assert "horovodrun -np 4 python -m hvdtrain.mnist" in job.text
    imported = {line.rsplit("|")[-1].strip() for line in job.lines if "|" in line}
    assert "absl.flags" in imported
    assert not {"tensorflow", "keras", "horovod"} & imported


@pytest.mark.release
def test_real_mnist(train, real_mnist):
    _, summary = train([f"--data_dir={real_mnist}"], launcher="mpirun")
    assert summary["dataset"] == "mnist"
    assert summary["steps"] == 5000
    assert summary["test_accuracy"] >= 0.972
