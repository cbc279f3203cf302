"""Bad input and failures: one line, exit code not 0, no rank left running."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import sys

import numpy as np
import psutil
import pytest

HERE = pathlib.Path(__file__).parent
# Long enough to be interrupted.
ENDLESS = ["--dataset=digits", "--max_steps=100000000"]


def fails_with(job, *words, code=1):
    """Check that the job failed, and that its last line, printed once, has `words`."""
    assert job.returncode != 0, job.text
    if code:
        assert job.returncode == code, job.text
    reason = job.lines[-1]
    for word in words:
        assert word in reason, job.text
    assert job.text.count(reason) == 1, job.text
    assert "Traceback" not in "\n".join(job.lines), job.text
    return job


def save_npz(directory, *, labels=40):
    """Write a small data set of four classes; 40 labels are right."""
    directory.mkdir()
    random = np.random.RandomState(0)
    np.savez(
        directory / "data.npz",
        x_train=random.randint(0, 256, (40, 8, 8)).astype("uint8"),
        y_train=np.arange(labels) % 4,
        x_test=random.randint(0, 256, (12, 8, 8)).astype("uint8"),
        y_test=np.arange(12) % 4,
    )
    return directory


def test_libraries_that_do_not_fit_are_one_line(run):
    # Others: tests/unit/test_compatibility.py. This one ends before TensorFlow loads.
    environment = {"TF_USE_LEGACY_KERAS": "1"}
    job = run([], launcher="mpirun", environment=environment, forked=False)
    job = fails_with(job, "TF_USE_LEGACY_KERAS=1", "unset TF_USE_LEGACY_KERAS")
    assert len(job.lines) == 1, job.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no_such_flag"], ["no_such_flag"]),
        (["surplus"], ["surplus"]),
        (["--learning_rate=nan"], ["--learning_rate=nan", "positive"]),
        (["--epochs=1", "--max_steps=10"], ["epochs=1", "max_steps=10"]),
    ],
)
def test_wrong_flags(run, arguments, words):
    # What can be wrong with flags: tests/unit/test_image_classifier.py.
    job = fails_with(run(arguments), *words, code=2)
    assert len(job.lines) == 1, job.text


def test_wrong_flag_on_all_ranks_is_printed_once(start):
    names = ("gloo", "mpi", "mpirun")
    jobs = [start(["--batch_size=0"], launcher=name) for name in names]
    for job in jobs:
        fails_with(job.wait(), "[1, ", code=2)
        assert len(job.lines) == 1, job.text


@pytest.mark.parametrize(
    "launcher", ["gloo", pytest.param("mpi", marks=pytest.mark.long)]
)
def test_wrong_flag_on_one_rank_is_printed_with_its_rank(run, launcher):
    script = (
        f'[ "$HOROVOD_RANK$OMPI_COMM_WORLD_RANK" = 0 ] || set -- --batch_size=0; '
        f'exec {sys.executable} -m hvdtrain.mnist --dataset=digits "$@"'
    )
    program = ["sh", "-c", script]
    job = run([], program=program, launcher=launcher)
    assert job.returncode == 2, job.text
    reasons = [line for line in job.lines if "[1, " in line]
    assert len(reasons) == 1, job.text
    assert reasons[0].startswith(f"rank 1 on {socket.gethostname()}: "), job.text


# Options of `train_and_evaluate` that differ: tests/parallel/test_resuming.py.
@pytest.mark.long
def test_flags_that_differ_between_ranks(run):
    script = (
        f'[ "$HOROVOD_RANK" = 0 ] || set -- --seed=1; '
        f'exec {sys.executable} -m hvdtrain.mnist --dataset=digits "$@"'
    )
    job = run([], program=["sh", "-c", script], launcher="gloo")
    fails_with(job, "--seed=0 on rank 0", "--seed=1 on rank 1")
    assert len(job.lines) == 1, job.text


@pytest.mark.long
def test_timeline_of_one_rank(run, tmp_path):
    path = tmp_path / "timeline.json"
    fails_with(run([f"--timeline_file={path}"]), "--timeline_file", "1 rank")
    assert not path.exists()


def test_interrupt_while_tensorflow_loads(start):
    job = start(ENDLESS)
    job.wait_for_import("tensorflow")
    os.killpg(job.process.pid, signal.SIGINT)
    fails_with(job.wait(), "Stopped by SIGINT", code=130)


@pytest.mark.long
def test_a_run_whose_output_is_not_wanted(run, tmp_path):
    program = f"{sys.executable} -m hvdtrain.mnist --dataset=digits --max_steps=20"
    script = f"exec {program} --model_dir={tmp_path / 'run'} >&- 2>&-"
    assert run([], program=["sh", "-c", script], forked=False).returncode == 0
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("launcher", "code", "reason"),
    [
        ("", 1, "Cannot write the output: Broken pipe."),
        # The code of the ranks, which horovodrun ends by SIGTERM.
        pytest.param(
            "horovodrun --gloo -np 2",
            143,
            "horovodrun: cannot write the output: Broken pipe",
            marks=pytest.mark.long,
        ),
    ],
)
def test_output_that_nobody_reads(run, launcher, code, reason):
    program = f"{launcher} {sys.executable} -m hvdtrain.mnist {' '.join(ENDLESS)}"
    job = run([], program=["bash", "-c", f"set -o pipefail; {program} | head -n 1"])
    assert job.returncode == code, job.text
    first, last = job.text.splitlines()
    assert "1,497 images" in first
    assert last == reason


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_interrupt_before_the_ranks_are_started(start, tmp_path, controller):
    # horovodrun reads this pipe until its writers have closed it.
    hostfile = tmp_path / "hosts"
    os.mkfifo(hostfile)
    launcher = ["horovodrun", f"--{controller}", "-np", "2", "--hostfile", hostfile]
    job = start(["true"], program=launcher)
    writers = []

    def opens():
        # An error until horovodrun has opened the other end.
        with contextlib.suppress(OSError):
            writers.append(os.open(hostfile, os.O_WRONLY | os.O_NONBLOCK))
        return writers

    job.wait_until(opens, "horovodrun reading its hosts")
    try:
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.wait().returncode == 130, job.text
        assert job.text == "horovodrun: stopped by SIGINT\n"
    finally:
        os.close(writers[0])


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_interrupt_while_the_ranks_are_started(start, tmp_path, launcher):
    # Under MPI horovodrun asks for the version first. This mpirun does not answer. A
    # shell that is just starting a process may lose a signal: wait for what it starts.
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\nexec sleep 2000\n")
    mpirun.chmod(0o755)
    path = f"{tmp_path}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    job = start(
        ["1000"], program=["sleep"], launcher=launcher, environment={"PATH": path}
    )
    started = {"gloo": "spawn_main", "mpi": "sleep 2000"}[launcher]
    job.wait_until(
        lambda: any(started in words for words in commands(job)),
        "the process that starts a rank, or mpirun",
    )
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait().returncode != 0, job.text
    assert "Traceback" not in job.text
    assert "does not find an installed MPI" not in job.text


def commands(job):
    for process in job.processes():
        with contextlib.suppress(psutil.Error):
            yield " ".join(process.cmdline())


@pytest.mark.parametrize(
    ("redirection", "code", "text"),
    [
        (">/dev/full", 143, "horovodrun: cannot write the output: No space left"),
        (">&-", 0, ""),  # closed on purpose: the output is not wanted
    ],
)
def test_output_of_horovodrun_that_cannot_be_written(run, redirection, code, text):
    # More than fits into a pipe.
    script = f"exec horovodrun --gloo -np 1 seq 200000 {redirection}"
    job = run([], program=["sh", "-c", script])
    assert job.returncode == code, job.text
    assert job.text.startswith(text)
    assert "Traceback" not in job.text


def test_bad_data(run, tmp_path):
    # What can be wrong with data: tests/unit/test_datasets.py.
    directory = save_npz(tmp_path / "data", labels=39)
    job = run(["--dataset=custom", f"--data_dir={directory}"])
    fails_with(job, str(directory), "39", "40")
    assert len(job.lines) == 1, job.text


@pytest.mark.long
def test_damaged_file_on_one_node(run, tmp_path):
    save_npz(tmp_path / "data0")
    damaged = save_npz(tmp_path / "data1") / "data.npz"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    script = (
        f"exec {sys.executable} -m hvdtrain.mnist --dataset=custom "
        f"--data_dir={tmp_path}/data$HOROVOD_RANK"
    )
    # Two names of this host: horovodrun takes them for two nodes with one rank each.
    hosts = ["-H", "localhost:1,127.0.0.1:1"]
    job = run([], program=[*hosts, "sh", "-c", script], launcher="gloo")
    fails_with(job, f"rank 1 on {socket.gethostname()}: ", str(damaged))
    assert len(job.lines) == 1, job.text


# Other variables: tests/unit/test_job.py.
def test_lonely_ranks(start):
    # As of srun without --mpi: processes that know their number and have no rendezvous.
    jobs = [
        start(
            ["--dataset=digits"],
            environment={"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank},
        )
        for rank in "01"
    ]
    # A worker of tf.distribute does not know that another one prints the same.
    cluster = '{"cluster": {"worker": ["", "b:1"]}, "task": {"type": "worker"}}'
    jobs.append(start(["--dataset=digits"], environment={"TF_CONFIG": cluster}))
    fails_with(jobs[0].wait(), "SLURM_STEP_NUM_TASKS of 2 processes", "HVDTRAIN_ALONE")
    # Where the variables are of another job, there is no rank 0.
    fails_with(jobs[1].wait(), "rank 1 on ", "unset SLURM_STEP_NUM_TASKS")
    fails_with(jobs[2].wait(), "of rank 0 by TF_CONFIG; expected a name")
    assert len(jobs[2].lines) == 1


@pytest.mark.long
def test_loss_that_is_not_a_number(run):
    job = run(["--dataset=digits", "--learning_rate=1e30"], launcher="mpirun")
    fails_with(job, "The loss became nan", "Lower the learning rate")
    assert "test accuracy" not in job.text


@pytest.mark.parametrize(
    ("launcher", "line"),
    [
        ("gloo", "horovodrun: stopped by SIGINT"),
        pytest.param("alone", "Stopped by SIGINT.", marks=pytest.mark.release),
        pytest.param("mpi", "horovodrun: stopped by SIGINT", marks=pytest.mark.release),
        pytest.param("mpirun", "Stopped by SIGTERM.", marks=pytest.mark.long),
    ],
)
def test_interrupt(start, launcher, line):
    job = start(ENDLESS, launcher=launcher)
    job.wait_for("samples/s")
    # As a terminal does: the signal goes to the group. Launchers send SIGTERM to ranks.
    os.killpg(job.process.pid, signal.SIGINT)
    job.wait()
    assert [each for each in job.text.splitlines() if "topped by" in each] == [line]
    # mpirun has a code of its own.
    assert launcher == "mpirun" or job.returncode == 130


def test_a_rank_that_ends_before_one_that_fails_is_named(run, tmp_path):
    # Rank 0 fails when the process that has started rank 1 has ended.
    script = f"""
        cd {tmp_path}
        if [ $HOROVOD_RANK = 1 ]; then echo $PPID >parent.new; mv parent.new parent
        else until [ -e parent ]; do sleep 0.1; done
             while kill -0 $(cat parent) 2>/dev/null; do sleep 0.1; done; exit 4; fi
    """
    job = run([], program=["sh", "-c", script], launcher="gloo")
    host = socket.gethostname()
    assert job.returncode == 4, job.text
    assert job.text.splitlines()[-1] == (
        f"horovodrun: the first rank that failed is rank 0 on {host}: exit code 4. "
        f"Rank 1 on {host} had ended before, with exit code 0."
    )


@pytest.mark.parametrize("launcher", ["gloo", "mpirun"])
def test_killed_rank_ends_the_job(start, tmp_path, launcher):
    # With a model_dir, the survivor takes the launcher's SIGTERM for a request to stop.
    job = start([*ENDLESS, f"--model_dir={tmp_path / 'run'}"], launcher=launcher)
    job.wait_for("samples/s")
    job.ranks()[1].kill()
    assert job.wait().returncode == 137
    assert "Traceback" not in "\n".join(job.lines), job.text
    assert "Another rank" not in job.text, job.text
    # mpirun's last line is a ruler.
    end = "\n".join(job.text.splitlines()[-2:])
    assert re.search(rf"rank 1 .*\b{socket.gethostname()}\b.*(KILL|9)", end), end


@pytest.mark.long
def test_bug_on_one_rank_is_shown_with_its_rank(run):
    program = [sys.executable, str(HERE / "broken_program.py")]
    job = run(["--on_rank=1"], program=program, launcher="gloo")
    assert job.returncode != 0
    assert job.lines[0].startswith(f"rank 1 on {socket.gethostname()}: Traceback")
    assert job.lines[-1] == "KeyError: 'a bug on purpose'"
    assert "Another rank" not in job.text


@pytest.mark.long
def test_mistake_on_one_rank_is_printed_with_its_rank(run):
    program = [sys.executable, str(HERE / "broken_program.py")]
    flags = ["--on_rank=1", "--error=mistake"]
    job = run(flags, program=program, launcher="mpirun")
    fails_with(job, f"rank 1 on {socket.gethostname()}: a mistake on purpose")
    assert len(job.lines) == 1, job.text
