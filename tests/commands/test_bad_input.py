"""Bad input and failures: one line, exit code not 0, no rank left running."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

HERE = pathlib.Path(__file__).parent
# Long enough to be interrupted.
ENDLESS = ["--dataset=digits", "--model=cnn", "--max_steps=1000000"]


def fails_with(job, *words, code=1):
    """Check that the job failed, and that its last line, printed once, has `words`."""
    assert job.returncode != 0, job.text
    if not job.is_gloo and code:  # horovodrun --gloo exits with 1, whatever happened
        assert job.returncode == code, job.text
    reason = job.lines[-1]
    for word in words:
        assert word in reason, job.text
    assert job.text.count(reason) == 1, job.text
    assert "Traceback" not in "\n".join(job.lines), job.text
    return job


def save_npz(directory, *, train=40, labels=None, **arrays):
    """Write a small data set of four classes; `arrays` replace its valid arrays."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.RandomState(0)
    valid = {
        "x_train": random.randint(0, 256, (train, 8, 8)).astype("uint8"),
        "y_train": np.arange(labels or train) % 4,
        "x_test": random.randint(0, 256, (12, 8, 8)).astype("uint8"),
        "y_test": np.arange(12) % 4,
    }
    np.savez(directory / "data.npz", **(valid | arrays))
    return directory


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no_such_flag"], ["no_such_flag"]),
        (["surplus"], ["surplus"]),
        (["--batch_size=0"], ["--batch_size=0", "[1, "]),
        (["--batch_size=many"], ["--batch_size=many"]),
        (["--max_steps=-1"], ["--max_steps=-1", "[1, "]),
        (["--model_dir="], ["--model_dir", "expected a path"]),
        (["--epochs=0"], ["--epochs=0", "[1, "]),
        (["--epochs=1", "--max_steps=10"], ["epochs=1", "max_steps=10"]),
        (["--learning_rate=0"], ["--learning_rate=0", "positive"]),
        (["--learning_rate=nan"], ["--learning_rate=nan", "positive"]),
        (["--warmup_epochs=-1"], ["--warmup_epochs=-1", "0 or more"]),
        (["--seed=-1"], ["--seed=-1"]),
        (["--dataset=imagenet"], ["--dataset=imagenet", "digits"]),
        (["--dataset=digits", "--data_dir=/tmp"], ["dataset=digits", "data_dir=/tmp"]),
        (["--dataset=custom"], ["custom", "--data_dir"]),
    ],
)
def test_wrong_flags(run, arguments, words):
    job = fails_with(run(arguments), *words, code=2)
    assert len(job.lines) == 1, job.text


def test_wrong_flag_on_all_ranks_is_printed_once(start):
    names = ("gloo", "mpi", "mpirun")
    jobs = [start(["--batch_size=0"], launcher=name) for name in names]
    for job in jobs:
        fails_with(job.wait(), "[1, ", code=2)
        assert len(job.lines) == 1, job.text


def test_wrong_flag_on_one_rank_is_printed_with_its_rank(start):
    script = (
        f'[ "$HOROVOD_RANK$OMPI_COMM_WORLD_RANK" = 0 ] || set -- --batch_size=0; '
        f'exec {sys.executable} -m hvdtrain.mnist --dataset=digits "$@"'
    )
    program = ["sh", "-c", script]
    for job in [start([], program=program, launcher=name) for name in ("gloo", "mpi")]:
        assert job.wait().returncode == (1 if job.is_gloo else 2), job.text
        reasons = [line for line in job.lines if "[1, " in line]
        assert len(reasons) == 1, job.text
        assert reasons[0].startswith(f"rank 1 on {socket.gethostname()}: "), job.text


def test_fewer_steps_than_ranks(run):
    job = run(["--dataset=digits", "--max_steps=1"], launcher="mpirun")
    fails_with(job, "--max_steps=1", "2 ranks")


def test_fewer_steps_than_an_update_takes(run):
    flags = ["--dataset=digits", "--epochs=1", "--accumulation_steps=100"]
    fails_with(run(flags), "--accumulation_steps=100", "24 steps")


def test_flags_that_differ_between_ranks(run):
    program = [sys.executable, "-m", "hvdtrain.mnist"]
    flags = ["--dataset=digits", "--max_steps=20"]
    job = run(
        [*flags, ":", "-np", "1", *program, *flags, "--seed=1"],
        launcher="mpirun",
        ranks=1,
    )
    fails_with(job, "--seed=0 on rank 0", "--seed=1 on rank 1")
    assert len(job.lines) == 1, job.text


def test_warmup_beyond_the_end(run):
    flags = ["--dataset=digits", "--epochs=1"]
    job = fails_with(
        run([*flags, "--warmup_epochs=1.5"]), "--warmup_epochs=1.5", "1 ep"
    )
    assert len(job.lines) == 1, job.text


def test_images_too_small_for_the_model(run, tmp_path):
    images = {part: np.zeros((40, 5, 5), "uint8") for part in ("x_train", "x_test")}
    save_npz(tmp_path / "data", **images, y_test=np.arange(40) % 4)
    flags = ["--model=cnn", "--dataset=custom", f"--data_dir={tmp_path / 'data'}"]
    job = fails_with(run(flags), "5x5", "6x6")
    assert len(job.lines) == 1, job.text


def test_interrupt_while_tensorflow_loads(start):
    job = start(ENDLESS)
    job.wait_for_import("tensorflow")
    os.killpg(job.process.pid, signal.SIGINT)
    fails_with(job.wait(), "Stopped by SIGINT", code=130)


@pytest.mark.parametrize(
    ("redirection", "code", "words"),
    [
        (">/dev/full", 1, "No space left"),
        (">&-", 0, ""),  # closed on purpose: the output is not wanted
        ("2>&-", 0, ""),
    ],
)
def test_output_that_cannot_be_written(run, redirection, code, words):
    program = f"{sys.executable} -m hvdtrain.mnist --dataset=digits --max_steps=20"
    job = run([], program=["sh", "-c", f"exec {program} {redirection}"])
    assert job.returncode == code, job.text
    assert words in job.text
    assert "Traceback" not in job.text


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        ("", "Cannot write the output: Broken pipe."),
        ("horovodrun --gloo -np 2", "horovodrun: cannot write the output: Broken pipe"),
    ],
)
def test_output_that_nobody_reads(run, launcher, reason):
    program = f"{launcher} {sys.executable} -m hvdtrain.mnist {' '.join(ENDLESS)}"
    job = run([], program=["bash", "-c", f"set -o pipefail; {program} | head -n 1"])
    assert job.returncode == 1, job.text
    first, last = job.text.splitlines()
    assert "hvdtrain" in first
    assert last == reason


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_interrupt_before_the_ranks_are_started(start, launcher):
    job = start(ENDLESS, launcher=launcher)
    # A child of horovodrun loads TensorFlow, to see what Horovod was built with.
    while not any(map(has_tensorflow, psutil.Process(job.process.pid).children())):
        assert job.process.poll() is None, job.text
        time.sleep(0.05)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait().returncode == 130, job.text
    assert job.text == "horovodrun: stopped by SIGINT\n"


def has_tensorflow(process):
    return "/tensorflow/" in pathlib.Path(f"/proc/{process.pid}/maps").read_text()


def test_fewer_samples_than_ranks(run, tmp_path):
    save_npz(tmp_path / "data", train=1, y_test=np.zeros(12, int))
    job = run(
        ["--dataset=custom", f"--data_dir={tmp_path / 'data'}"], launcher="mpirun"
    )
    fails_with(job, "1 samples for 2 ranks")


def test_missing_data_directory(run):
    job = run(["--data_dir=/no/such/place"], launcher="gloo")
    fails_with(job, "/no/such/place")
    assert len(job.lines) == 1, job.text


def test_bad_data(run, tmp_path):
    # What can be wrong with data: tests/unit/test_datasets.py.
    directory = save_npz(tmp_path / "data", labels=39)
    job = run(["--dataset=custom", f"--data_dir={directory}"])
    fails_with(job, str(directory), "39", "40")
    assert len(job.lines) == 1, job.text


def test_damaged_file_on_one_node(run, tmp_path):
    save_npz(tmp_path / "data0")
    damaged = save_npz(tmp_path / "data1") / "data.npz"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    script = (
        f"exec {sys.executable} -m hvdtrain.mnist --dataset=custom "
        f"--data_dir={tmp_path}/data$HOROVOD_RANK$OMPI_COMM_WORLD_RANK"
    )
    job = run([], program=["sh", "-c", script], launcher="mpirun")
    fails_with(job, f"rank 1 on {socket.gethostname()}: ", str(damaged))


def test_refused_network(run, tmp_path):
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/mnist.npz"
        environment = {"HVDTRAIN_MNIST_URLS": url, "HVDTRAIN_CACHE_DIR": str(tmp_path)}
        job = run(["--dataset=mnist"], environment=environment)
    fails_with(job, url, "--data_dir")
    assert not list(tmp_path.rglob("*mnist*"))


def test_model_dir_is_a_file(run, tmp_path):
    (tmp_path / "taken").write_text("mine")
    job = run(["--dataset=digits", f"--model_dir={tmp_path / 'taken'}"])
    fails_with(job, str(tmp_path / "taken"), "--model_dir")
    assert (tmp_path / "taken").read_text() == "mine"


def test_full_disk(run, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        job = run(["--dataset=digits", f"--model_dir={disk / 'run'}"])
        fails_with(job, str(disk / "run"), "No space left")
        assert not any((disk / "run").iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_lonely_ranks(start):
    # As of srun without --mpi: processes that know their number and have no rendezvous.
    jobs = [
        start(
            ["--dataset=digits"],
            environment={"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank},
        )
        for rank in "01"
    ]
    fails_with(jobs[0].wait(), "2 processes from srun")
    assert jobs[1].wait().returncode == 1
    assert jobs[1].lines == []


def test_loss_that_is_not_a_number(run):
    job = run(["--dataset=digits", "--learning_rate=1e30"], launcher="mpirun")
    fails_with(job, "The loss became nan", "--learning_rate")
    assert "test accuracy" not in job.text


@pytest.mark.parametrize(
    ("launcher", "name"), [("alone", "SIGINT"), ("gloo", "SIGTERM"), ("mpirun", "SIG")]
)
def test_interrupt(start, launcher, name):
    job = start(ENDLESS, launcher=launcher)
    job.wait_for("samples/s")
    # As a terminal does: the signal goes to the group. Launchers send SIGTERM to ranks.
    os.killpg(job.process.pid, signal.SIGINT)
    fails_with(job.wait(), "Stopped by", name, code=None)
    assert launcher != "alone" or job.returncode == 130


def test_a_signal_to_horovodrun_ends_the_ranks(start):
    job = start(ENDLESS, launcher="mpi")
    job.wait_for("samples/s")
    job.process.terminate()
    fails_with(job.wait(), "Stopped by SIGTERM", code=None)


def test_killed_rank_ends_the_job(start):
    for job in [start(ENDLESS, launcher=name) for name in ("gloo", "mpirun")]:
        job.wait_for("samples/s")
        job.ranks()[1].kill()
        assert job.wait().returncode != 0
        assert "Traceback" not in "\n".join(job.lines), job.text


def test_bug_on_one_rank_is_shown_with_its_rank(run):
    program = [sys.executable, str(HERE / "broken_program.py")]
    job = run(["--on_rank=1"], program=program, launcher="gloo")
    assert job.returncode != 0
    assert job.lines[0].startswith(f"rank 1 on {socket.gethostname()}: Traceback")
    assert job.lines[-1] == "KeyError: 'a bug on purpose'"
    assert "Another rank" not in job.text


def test_mistake_on_one_rank_is_printed_with_its_rank(run):
    program = [sys.executable, str(HERE / "broken_program.py")]
    flags = ["--on_rank=1", "--error=mistake"]
    job = run(flags, program=program, launcher="mpirun")
    fails_with(job, f"rank 1 on {socket.gethostname()}: a mistake on purpose")
    assert len(job.lines) == 1, job.text
