"""Jobs whose processes are killed or stopped, and what is computed after it."""

import signal

import numpy as np
import pytest

from hvdtrain.training.checkpoints import CheckpointFiles

# Dropout; an accumulation window that ends at no checkpoint but by chance.
TRAIN = [
    *("--dataset=digits", "--model=cnn", "--batch_size=16", "--epochs=3"),
    *("--optimizer=momentum", "--accumulation_steps=3", "--save_every_seconds=0.2"),
]
STALL_SECONDS = 6


def checkpoint(directory):
    """The newest one, with its arrays."""
    files = CheckpointFiles(directory / "checkpoints")
    return files.read(files.steps()[0])


def assert_equal(directory, expected):
    found, wanted = checkpoint(directory), checkpoint(expected)
    assert found.step == wanted.step
    assert found.arrays.keys() == wanted.arrays.keys()
    for name, array in wanted.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
    for name in ("history", "evaluations"):
        assert found.metadata[name] == wanted.metadata[name]


def test_a_job_that_was_killed_computes_what_the_uninterrupted_one_does(
    start, run, tmp_path
):
    def flags(name):
        return [*TRAIN, f"--model_dir={tmp_path / name}"]

    expected = run(flags("whole"), launcher="gloo")
    assert expected.returncode == 0, expected.text
    job = start(flags("killed"), launcher="gloo")
    files = CheckpointFiles(tmp_path / "killed/checkpoints")
    job.wait_until(files.steps, "a checkpoint")
    job.kill()
    assert files.steps()[0] < checkpoint(tmp_path / "whole").step
    finished = run(flags("killed"), launcher="gloo")
    assert finished.returncode == 0, finished.text
    assert_equal(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(("launcher", "rank"), [("mpirun", 0), ("gloo", 1)])
def test_a_rank_that_is_stopped_ends_the_job(start, tmp_path, launcher, rank):
    job = start(
        ["--dataset=digits", "--epochs=1000000", f"--model_dir={tmp_path}"],
        launcher=launcher,
        environment={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SECONDS)},
    )
    job.wait_for("samples/s")
    job.ranks()[rank].send_signal(signal.SIGSTOP)
    job.wait()
    assert job.returncode != 0
    assert f"rank {rank} on " in job.text
    assert "was stopped, as by SIGSTOP, for 3 s, and is killed" in job.text
