"""A job that is stopped or killed computes what an uninterrupted one computes."""

import os
import re
import signal
import sys

import numpy as np
import pytest

from hvdtrain.checkpoint.storage import CheckpointFiles

# Some seconds on two ranks: the runs that are stopped or killed, at one of the first
# checkpoints, end long before the last step. Windows of three steps end at few of them.
STEPS = 1050
FLAGS = [
    *("--dataset=digits", f"--max_steps={2 * STEPS}", "--optimizer=momentum"),
    *("--accumulation_steps=3", "--save_every_steps=200"),
]
STOPPED = re.compile(rf"Stopped at step (\d+) of {STEPS} by (.+); start the job again")


TIMED = ["--save_every_steps=0", "--save_every_seconds=0.2"]


def to_rank_1(job):
    job.ranks()[1].send_signal(signal.SIGUSR1)


def as_a_terminal(job):
    os.killpg(job.process.pid, signal.SIGINT)


# The launcher of the first run, how it is stopped, and what it prints. None: the job is
# only killed. The launcher sends SIGTERM to the ranks on Ctrl-C, and they name Ctrl-C;
# test_bad_input.py does this without checkpoints.
@pytest.mark.parametrize(
    ("launcher", "stop", "cause"),
    [
        (None, None, None),
        pytest.param(
            *("mpirun", to_rank_1, "SIGUSR1 on rank 1"), marks=pytest.mark.long
        ),
        pytest.param(
            *("gloo", as_a_terminal, "SIGINT on rank "), marks=pytest.mark.release
        ),
    ],
)
def test_a_job_that_is_killed_or_stopped_continues(
    start, run, tmp_path, launcher, stop, cause
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    job = run([*FLAGS, f"--model_dir={whole}"], launcher="mpirun")
    assert job.returncode == 0, job.text
    files = CheckpointFiles(parts / "checkpoints")

    def wait_for_checkpoint(job, after):
        job.wait_until(
            lambda: max(files.steps(), default=0) > after, "another checkpoint"
        )

    step = 0
    if stop:
        job = start([*FLAGS, f"--model_dir={parts}"], launcher=launcher)
        wait_for_checkpoint(job, after=0)
        stop(job)
        assert job.wait().returncode == 75, job.text
        text, by = STOPPED.search(job.lines[-1]).groups()
        assert by.startswith(cause)
        step = int(text)
        assert 0 < step < STEPS
        assert files.steps()[0] == step
    job = start([*FLAGS, *TIMED, f"--model_dir={parts}"], launcher="gloo")
    wait_for_checkpoint(job, after=step)
    job.kill()
    assert files.steps()[0] < STEPS
    job = run([*FLAGS, f"--model_dir={parts}"], launcher="mpirun")
    assert job.returncode == 0, job.text
    assert_equal(files.read(STEPS), CheckpointFiles(whole / "checkpoints").read(STEPS))


def assert_equal(found, expected):
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
    for name in ("history", "evaluations"):
        assert getattr(found.header, name) == getattr(expected.header, name)


def test_a_job_that_is_asked_to_stop_ends_with_its_own_code(start, tmp_path):
    job = start([*FLAGS, f"--model_dir={tmp_path}"])
    files = CheckpointFiles(tmp_path / "checkpoints")
    job.wait_until(files.steps, "a checkpoint")
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait().returncode == 75, job.text
    step = re.search(r"^Stopped at step (\d+) of \d+ by SIGUSR1", job.lines[-1])[1]
    assert files.steps()[0] == int(step)


POOL = """
import multiprocessing, signal, sys, time

def load(_):
    time.sleep(0.2)

if __name__ == "__main__":
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        while not received:
            pool.apply(load, (0,))
            print("a step", flush=True)
        pool.apply(load, (0,))
    print("saved", flush=True)
    sys.exit(75)
"""


def test_a_stop_leaves_a_rank_its_input_workers(start, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(POOL)
    job = start([], launcher="gloo", ranks=1, program=[sys.executable, str(program)])
    job.wait_for("a step")
    job.process.terminate()
    assert job.wait().returncode == 75, job.text
    assert job.lines[-1] == "saved"
