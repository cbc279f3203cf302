"""Jobs that are killed read on where they were, on other ranks, from files."""

import collections
import itertools
import json
import pathlib
import random
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("reading_program.py")
SAMPLES, GLOBAL_BATCH_SIZE, EPOCHS = 1200, 12, 3
STEPS = SAMPLES * EPOCHS // GLOBAL_BATCH_SIZE

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files") / "files"
    subprocess.run([sys.executable, str(PROGRAM), str(directory), "write"], check=True)
    return directory


@pytest.fixture
def folder(files, tmp_path):
    """A directory with the files, for the logs and the checkpoints of one job."""
    (tmp_path / "files").symlink_to(files)
    return tmp_path


@pytest.fixture
def train(start, monkeypatch, tmp_path):
    """Return `train(folder, sources, ranks, ...)`."""
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "cache"))

    def train(folder, sources, ranks, *flags, kill_after=None):
        program = [sys.executable, str(PROGRAM), str(folder), ",".join(sources), *flags]
        launcher = "alone" if ranks == 1 else "mpirun"
        job = start([], program=program, launcher=launcher, ranks=ranks)
        if kill_after is None:
            assert job.wait().returncode == 0, job.text
            return
        job.wait_until(
            lambda: max(read(folder, sources[-1]), default=-1) > kill_after, "the step"
        )
        job.kill()

    return train


def read(folder, source, ranks="*"):
    """Return the ids that all ranks have read, by step, in the runs of a job.

    A step that was repeated has more ids, if it has not read the same each time.
    """
    by_step = collections.defaultdict(set)
    for path in folder.glob(f"read-{source}-{ranks}-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            # The last line of a rank that was killed.
            if line.endswith("\n"):
                step, ids = json.loads(line)
                by_step[step].update(ids)
    return dict(by_step)


@pytest.mark.release
def test_a_job_that_is_killed_reads_on_with_other_ranks(train, folder):
    """The last source of a job is killed, the trainings on the others are left."""
    sources = ["formats", "parquet", "mixture"]
    whole, parts = folder / "whole", folder / "parts"
    for each in (whole, parts):
        each.mkdir()
        (each / "files").symlink_to(folder / "files")
    train(whole, sources, 2)
    first = [random.randrange(20, STEPS // 3) for _ in sources]
    second = [random.randrange(step + 20, 2 * STEPS // 3) for step in first]
    model_dir = f"--model_dir={parts}/run"
    for ranks, (*left, killed) in ((4, first), (3, second)):
        leave_at = f"--leave_at={','.join(map(str, left))}"
        train(parts, sources, ranks, model_dir, leave_at, kill_after=killed)
    train(parts, sources, 1, model_dir)
    for source in sources:
        expected = read(whole, source)
        assert read(parts, source) == expected, (source, first, second)
        # A pass over a mixture has the samples of two files.
        files = 2 if source == "mixture" else 1
        assert sorted(expected) == list(range(STEPS * files))
        for epoch in range(EPOCHS if files == 1 else 0):
            steps = range(epoch * STEPS // EPOCHS, (epoch + 1) * STEPS // EPOCHS)
            ids = itertools.chain(*(expected[step] for step in steps))
            assert sorted(ids) == list(range(SAMPLES))


@pytest.mark.release
def test_a_job_that_scales_its_batch_reads_each_sample_once(train, folder):
    flags = ["--scale_batch", f"--model_dir={folder}/run"]
    train(folder, ["formats"], 4, *flags, kill_after=30)
    train(folder, ["formats"], 2, *flags)
    steps = read(folder, "formats", 2)
    before = read(folder, "formats", 4).items()
    steps |= {step: ids for step, ids in before if step < min(steps)}
    assert {len(ids) for ids in steps.values()} == {12, 6}
    ids = list(itertools.chain(*(steps[step] for step in sorted(steps))))
    for epoch in range(EPOCHS):
        # A step of 12 ends where one of 6 does.
        of_epoch = ids[epoch * SAMPLES : (epoch + 1) * SAMPLES]
        assert sorted(of_epoch) == list(range(SAMPLES))


@pytest.mark.release
def test_an_elastic_job_reads_on_when_a_worker_is_killed(start, folder):
    discover = folder / "discover.sh"
    discover.write_text("#!/bin/sh\nprintf 'localhost:1\\n127.0.0.1:1\\n'\n")
    discover.chmod(0o755)
    launcher = [
        *("horovodrun", "--gloo", "-np", "2", "--min-np", "1", "--max-np", "2"),
        *("--network-interface", "lo", "--host-discovery-script", str(discover)),
    ]
    job = start(
        [sys.executable, str(PROGRAM), str(folder), "formats"], program=launcher
    )
    job.wait_until(lambda: max(read(folder, "formats"), default=-1) > 50, "step 50")
    job.ranks()[1].kill()
    assert job.wait().returncode == 0, job.text
    steps = read(folder, "formats")
    assert sorted(steps) == list(range(STEPS))
    for epoch in range(EPOCHS):
        of_epoch = range(epoch * STEPS // EPOCHS, (epoch + 1) * STEPS // EPOCHS)
        ids = itertools.chain(*(steps[step] for step in of_epoch))
        assert sorted(ids) == list(range(SAMPLES))
