"""Jobs whose model_dir is in S3 or in Google's store: emulators on this machine.

`scripts/test.sh stores` installs them. The store's responses are delayed, refused and
lost by a proxy before it.
"""

import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import fsspec
import pytest
from store_proxy import StoreProxy

pytestmark = [pytest.mark.stores, pytest.mark.xdist_group("stores")]
ROOT = pathlib.Path(__file__).parents[2]
WITHOUT_MATPLOTLIB = ROOT / "tests" / "commands" / "without"
ARGUMENTS = [
    *("--dataset=digits", "--batch_size=16", "--max_steps=80", "--seed=3"),
    *("--save_every_steps=10", "--steps_per_execution=5", "--evaluate_every=0"),
]
FIRST = "checkpoints/step-00000010.json"
LAST = "checkpoints/step-00000040.json"


class Emulator:
    """A store behind a proxy; `environment` is that of a job which uses it."""

    def __init__(self, bucket, variable):
        port = int(os.environ[variable].rpartition(":")[2])
        self.proxy = StoreProxy(port)
        self.address = f"{bucket}/run"
        self.environment = {
            variable: f"http://127.0.0.1:{self.proxy.port}",
            # Where the packages of stores are.
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), str(WITHOUT_MATPLOTLIB), os.environ.get("PYTHONPATH", "")]
            ),
        }

    def objects(self):
        """Return the contents of all objects below the address, by name."""
        files, path = fsspec.url_to_fs(self.address)
        files.invalidate_cache()
        found = files.find(path)
        return {name[len(path) + 1 :]: files.cat_file(name) for name in found}


@pytest.fixture
def s3(s3_bucket):
    emulator = Emulator(s3_bucket, "AWS_ENDPOINT_URL")
    yield emulator
    emulator.proxy.close()


@pytest.fixture
def gcs(gcs_bucket):
    emulator = Emulator(gcs_bucket, "STORAGE_EMULATOR_HOST")
    yield emulator
    emulator.proxy.close()


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    """The files of the uninterrupted job of two ranks on a disk."""
    directory = tmp_path_factory.mktemp("disk")
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONPATH": str(ROOT),
    }
    subprocess.run(
        [
            *("horovodrun", "--gloo", "-np", "2", sys.executable, "-m"),
            *("hvdtrain.mnist", *ARGUMENTS, f"--model_dir={directory}"),
        ],
        env=environment,
        check=True,
        capture_output=True,
        timeout=240,
    )
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def arrays_digest(files):
    """Return the digest of the arrays of the last checkpoint, which is right."""
    header = json.loads(files[LAST])
    digest = hashlib.sha256(files[f"checkpoints/{header['arrays']}"]).hexdigest()
    assert digest == header["sha256"]
    return digest


def is_put(request, text):
    return request.method == "PUT" and text in request.path


def test_a_job_killed_in_an_upload_ends_as_the_one_on_a_disk(s3, start, run, on_disk):
    address = s3.address
    arrived, ended = threading.Event(), threading.Event()

    def hold(request):
        count = sum(is_put(r, ".safetensors") for r in s3.proxy.requests)
        if is_put(request, ".safetensors") and count == 2:
            arrived.set()
            ended.wait(60)
            return "lost"
        return None

    s3.proxy.rule = hold
    arguments = [*ARGUMENTS, f"--model_dir={address}"]
    options = {"launcher": "gloo", "environment": s3.environment}
    job = start(arguments, **options)
    job.wait_until(arrived.is_set, "an upload")
    job.wait_until(lambda: 0 in job.ranks(), "rank 0")
    job.ranks()[0].kill()
    job.wait()
    ended.set()
    assert job.returncode not in (0, 75)
    names = [name for name in s3.objects() if name.startswith("checkpoints/")]
    assert [name for name in names if name.endswith(".json")] == [FIRST]
    assert len(names) == 2
    s3.proxy.rule = lambda request: None
    left = fsspec.filesystem("s3").call_s3(
        "create_multipart_upload",
        Bucket="bucket",
        Key=f"{address.removeprefix('s3://bucket/')}/checkpoints/part",
    )
    job = run(arguments, forked=False, **options)
    assert job.returncode == 0, job.text
    assert f"at step 10 from {address}/{FIRST}" in job.text
    files = s3.objects()
    assert arrays_digest(files) == arrays_digest(on_disk)
    assert {"model.keras", "summary.json", "log.jsonl"} <= files.keys()
    # Parts of uploads that a kill has left cost their owner money.
    uploads = fsspec.filesystem("s3").list_multipart_uploads("bucket")
    assert left["UploadId"] not in [upload["UploadId"] for upload in uploads]


def test_a_job_continues_on_another_number_of_ranks_as_on_a_disk(s3, run, tmp_path):
    arguments = [*ARGUMENTS, f"--model_dir={s3.address}"]
    job = run(
        [*arguments, "--max_minutes=0.0001"],
        launcher="gloo",
        environment=s3.environment,
        forked=False,
    )
    assert job.returncode == 75, job.text
    for name, content in s3.objects().items():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for place in (s3.address, tmp_path / "copy"):
        job = run(
            [*ARGUMENTS, f"--model_dir={place}"],
            environment=s3.environment,
            forked=False,
        )
        assert job.returncode == 0, job.text
        assert f" from {place}/checkpoints/step-" in job.text
    copied = {
        path.relative_to(tmp_path / "copy").as_posix(): path.read_bytes()
        for path in (tmp_path / "copy" / "checkpoints").iterdir()
    }
    assert arrays_digest(s3.objects()) == arrays_digest(copied)


def test_a_store_that_refuses_and_cuts_changes_nothing(s3, run, on_disk):
    address = s3.address

    def fail(request):
        """Every third request fails, each time otherwise."""
        count = len(s3.proxy.requests)
        return (503, "cut", 500, "lost")[count // 3 % 4] if count % 3 == 0 else None

    s3.proxy.rule = fail
    job = run(
        [*ARGUMENTS, f"--model_dir={address}"],
        launcher="gloo",
        environment=s3.environment,
        forked=False,
    )
    assert job.returncode == 0, job.text
    assert arrays_digest(s3.objects()) == arrays_digest(on_disk)


def test_what_is_sent_is_each_array_once(s3, run, on_disk):
    address = s3.address
    job = run(
        [*ARGUMENTS, f"--model_dir={address}"],
        launcher="gloo",
        environment=s3.environment,
        forked=False,
    )
    assert job.returncode == 0, job.text
    sizes = [size for name, size in _sizes(on_disk) if name.endswith(".safetensors")]
    sent = [r.length for r in s3.proxy.requests if is_put(r, ".safetensors")]
    # The last one is written before and after the last evaluation.
    assert 2 <= len(sent) <= 5
    for length in sent:
        assert max(sizes) <= length <= max(sizes) + 1000
    report = run(
        ["--output=/dev/null", address],
        program=[*("python", "-m", "hvdtrain.report")],
        environment=s3.environment,
        forked=False,
    )
    assert "40" in report.text
    assert "productive" in report.text


def _sizes(files):
    return [(name, len(content)) for name, content in files.items()]


def test_a_second_job_at_an_address_is_refused(s3, start, run):
    address = s3.address
    arrived, ended = threading.Event(), threading.Event()

    def hold(request):
        if is_put(request, "step-00000010-"):
            arrived.set()
            ended.wait(60)
        return None

    s3.proxy.rule = hold
    arguments = [*ARGUMENTS, f"--model_dir={address}"]
    first = start(arguments, environment=s3.environment)
    first.wait_until(arrived.is_set, "an upload")
    second = run(arguments, environment=s3.environment, forked=False)
    assert second.returncode == 1, second.text
    expected = f"{address} is in use by another job (process {first.process.pid} on "
    assert second.lines[-1].startswith(expected), second.text
    ended.set()
    first.wait()
    assert first.returncode == 0, first.text


def test_a_store_that_is_down_at_the_end_is_an_error(s3, run):
    address = s3.address
    s3.proxy.rule = lambda request: 403 if is_put(request, "/checkpoints/") else None
    job = run(
        [*ARGUMENTS, f"--model_dir={address}"],
        environment=s3.environment,
        forked=False,
    )
    assert job.returncode == 1, job.text
    assert f"Cannot write {address}/checkpoints/step-" in job.lines[-1]
    assert "checkpoint at step 10 not written" in job.text


def test_a_job_continues_in_the_store_of_google(gcs, run, on_disk):
    address = gcs.address
    created = set()

    def precondition(request):
        """The emulator ignores `ifGenerationMatch=0`, the condition of a put."""
        if request.query.get("ifGenerationMatch") == "0":
            name = re.search(rb'"name": *"([^"]+)"', request.body)[1]
            if name in created:
                return 412
            created.add(name)
        return None

    gcs.proxy.rule = precondition
    options = {"launcher": "gloo", "environment": gcs.environment, "forked": False}
    arguments = [*ARGUMENTS, f"--model_dir={address}"]
    job = run([*arguments, "--max_minutes=0.0001"], **options)
    assert job.returncode == 75, job.text
    job = run(arguments, **options)
    assert job.returncode == 0, job.text
    assert " from gs://bucket/" in job.text
    assert created
    assert arrays_digest(gcs.objects()) == arrays_digest(on_disk)
