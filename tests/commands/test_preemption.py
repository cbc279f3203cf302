"""A job that is stopped under each launcher continues from where it was stopped."""

import os
import re
import signal

import safetensors.numpy

# Some seconds of training on two ranks: 12,000 steps.
FLAGS = ["--dataset=digits", "--max_steps=24000", "--save_every_seconds=0"]
STOPPED = re.compile(r"Stopped at step (\d+) of 12000 by (.+); start the job again")


def to_rank_1(job):
    job.ranks()[1].send_signal(signal.SIGUSR1)


def to_the_launcher(job):
    job.process.send_signal(signal.SIGTERM)


def as_a_terminal(job):
    os.killpg(job.process.pid, signal.SIGINT)


def checkpoint(directory, step):
    return safetensors.numpy.load_file(
        directory / "checkpoints" / f"step-{step:08}.safetensors"
    )


def test_a_job_that_is_stopped_continues(start, run, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job = run([*FLAGS, f"--model_dir={whole}"], launcher="mpirun")
    assert job.returncode == 0, job.text
    before = 0
    for launcher, stop, cause in (
        ("mpirun", to_rank_1, "SIGUSR1 on rank 1"),
        ("gloo", as_a_terminal, "SIGTERM on rank "),
        ("mpi", to_the_launcher, "SIGUSR1 on rank "),
    ):
        job = start([*FLAGS, f"--model_dir={parts}"], launcher=launcher)
        job.wait_for("samples/s")
        stop(job)
        assert job.wait().returncode == 75, job.text
        step, by = STOPPED.search(job.lines[-1]).groups()
        assert by.startswith(cause)
        assert before < int(step) < 12000
        assert checkpoint(parts, int(step))
        before = int(step)
    job = run([*FLAGS, f"--model_dir={parts}"], launcher="mpirun")
    assert job.returncode == 0, job.text
    expected, found = checkpoint(whole, 12000), checkpoint(parts, 12000)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name
