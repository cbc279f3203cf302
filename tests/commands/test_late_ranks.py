"""A rank under Gloo that calls `hvd.init` long after the others."""

import sys

import pytest

PROGRAM = """
import os, sys, time

def train(seconds):
    if os.environ["HOROVOD_RANK"] == "1":
        time.sleep(seconds)
    import hvdtrain.keras as hvd

    hvd.init()
    return hvd.allgather_object(f"rank {hvd.rank()}")

if __name__ == "__main__":
    seconds, mode = float(sys.argv[1]), sys.argv[2]
    if mode == "run":
        import hvdtrain
        try:
            print(hvdtrain.run(train, args=[seconds], np=2)[0])
        except hvdtrain.LostRankError as error:
            sys.exit(f"{type(error).__name__} {error.rank}: {error}")
    else:
        print(train(seconds))
"""
# Gloo itself would wait for this long.
GLOO = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "2"}
LAUNCHERS = pytest.mark.parametrize(
    ("launcher", "mode"),
    [("gloo", "horovodrun"), pytest.param("alone", "run", marks=pytest.mark.release)],
)


@pytest.fixture
def run_late(run, tmp_path):
    """Return `run_late(seconds, launcher, mode, ...)`: rank 1 is late."""

    def run_late(seconds, launcher, mode, **environment):
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        return run(
            [str(seconds), mode],
            launcher=launcher,
            program=[sys.executable, str(program)],
            environment=GLOO | environment,
        )

    return run_late


@pytest.mark.long
@LAUNCHERS
def test_ranks_wait_for_a_late_one(run_late, launcher, mode):
    job = run_late(15, launcher, mode, HVDTRAIN_INIT_REPORT_SECONDS="1")
    assert job.returncode == 0, job.text
    assert "['rank 0', 'rank 1']" in job.lines
    line = "hvd.init: the job has waited for rank 1 for 1 s, and ends after 300 s"
    assert job.text.count(line) == 1


@pytest.mark.long
@LAUNCHERS
def test_a_rank_that_does_not_come_is_named(run_late, launcher, mode):
    job = run_late(3600, launcher, mode, HVDTRAIN_INIT_TIMEOUT_SECONDS="2")
    assert job.returncode == 1
    reason = "rank 1 did not call hvd.init within 2 s of the other ranks."
    start = {"run": "LostRankError 1: ", "horovodrun": "horovodrun: "}[mode]
    assert start + reason in job.text
    assert "first rank that failed" not in job.text
