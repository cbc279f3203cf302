"""Jobs of `training.predict` that are killed, and that have many samples."""

import logging
import os
import pathlib
import re
import sys

import numpy as np
import pytest

PROGRAM = pathlib.Path(__file__).with_name("predicting_program.py")
MAX_GROWTH_MB = 64


def predict(start, out, samples, *options, ranks=2, environment=()):
    launcher = "mpirun" if ranks > 1 else "alone"
    flags = [f"--out={out}", f"--samples={samples}", *options]
    return start(
        flags,
        program=[sys.executable, str(PROGRAM)],
        launcher=launcher,
        ranks=ranks,
        environment=environment,
    )


@pytest.mark.long
def test_a_killed_job_predicts_what_is_missing(start, tmp_path):
    out, samples = tmp_path / "scores-*.npy", 1999
    sizes = ("--batch=8", "--part=16")
    job = predict(start, out, samples, *sizes, "--seconds=0.05")

    def parts():
        return list(tmp_path.glob("scores-*-of-00125.npy"))

    job.wait_until(lambda: len(parts()) > 20, "some parts")
    # kill -9 of all processes.
    job.kill()
    before = {path: path.stat().st_mtime_ns for path in parts()}
    assert 20 < len(before) < 125
    job = predict(start, out, samples, *sizes, ranks=1).wait()
    assert job.returncode == 0, job.text
    assert before == {path: path.stat().st_mtime_ns for path in before}
    found = np.concatenate([np.load(path) for path in sorted(parts())])
    np.testing.assert_array_equal(found, 2.0 * np.arange(samples))


@pytest.mark.release
def test_memory_does_not_grow_with_the_samples(start, tmp_path):
    pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    job = predict(start, tmp_path / "s/s-*.parquet", 10**7, "--batch=4096").wait()
    assert job.returncode == 0, job.text
    grown = [int(size) for size in re.findall(r"grew by (\d+) of \d+ MB", job.text)]
    assert len(grown) == 2
    assert max(grown) < MAX_GROWTH_MB
    table = parquet.read_table(tmp_path / "s")
    np.testing.assert_array_equal(table["number"], np.arange(10**7))
    np.testing.assert_array_equal(table["output"], 2.0 * np.arange(10**7))


@pytest.fixture
def bucket(monkeypatch):
    """The address of a bucket of an emulated S3."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server_of = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    filesystem = s3fs.S3FileSystem()
    filesystem.mkdir("predictions")
    yield filesystem
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.stores
def test_objects_of_a_killed_job(start, tmp_path, bucket):
    """Two ranks upload parts; after a kill, one process uploads the missing ones."""
    out, samples = "s3://predictions/run/scores-*.npy", 199
    sizes = ("--batch=8", "--part=16")
    # The packages of stores may be in a directory of their own.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    job = predict(start, out, samples, *sizes, "--seconds=0.2", environment=environment)

    def parts():
        bucket.invalidate_cache()
        return bucket.glob("predictions/run/scores-*-of-00013.npy")

    job.wait_until(lambda: len(parts()) > 3, "some parts")
    job.kill()
    before = {path: bucket.modified(path) for path in parts()}
    assert 3 < len(before) < 13
    job = predict(start, out, samples, *sizes, ranks=1, environment=environment).wait()
    assert job.returncode == 0, job.text
    assert before == {path: bucket.modified(path) for path in before}
    for path in parts():
        bucket.get_file(path, tmp_path / os.path.basename(path))
    found = np.concatenate([np.load(p) for p in sorted(tmp_path.glob("*.npy"))])
    np.testing.assert_array_equal(found, 2.0 * np.arange(samples))
