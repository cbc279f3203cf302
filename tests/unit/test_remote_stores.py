"""Sources of files in emulated stores of Amazon and of Google, and their failures."""

import os

import fsspec
import numpy as np
import pytest
import remote_data
from store_proxy import StoreProxy

from hvdtrain import data
from hvdtrain.data.formats import DataError
from hvdtrain.stores import object_store
from hvdtrain.stores.object_store import ObjectStore

pytestmark = pytest.mark.stores


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(params=["s3_bucket", "gcs_bucket"])
def bucket(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(params=remote_data.WRITERS)
def both(request, bucket, tmp_path):
    """Functions that return a source of files on a disk, and in the store."""
    (tmp_path / "files").mkdir()
    pattern = remote_data.WRITERS[request.param](tmp_path / "files")
    filesystem, path = fsspec.url_to_fs(bucket)
    filesystem.put(f"{tmp_path}/files/", f"{path}/files/", recursive=True)
    make = getattr(data, request.param)
    return [
        lambda root=root: make(f"{root}/{pattern}".rstrip("/"))
        for root in (tmp_path / "files", f"{bucket}/files")
    ]


def test_samples_and_their_order_are_those_of_local_files(both):
    local, remote = (make() for make in both)
    assert remote.fingerprint() == local.fingerprint()
    remote_data.assert_equal(
        remote_data.read(remote, rank=1, size=2),
        remote_data.read(local, rank=1, size=2),
    )


def test_a_file_that_changes_is_an_error(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(data.sources.remote_files, "CHECK_SECONDS", -1.0)
    remote_data.write_records(tmp_path)
    filesystem, path = fsspec.url_to_fs(bucket)
    filesystem.put(f"{tmp_path}/part-*", f"{path}/")
    source = data.TFRecord(f"{bucket}/part-*")
    source.read(np.array([0, 9]))
    content = filesystem.cat_file(f"{path}/part-1")
    filesystem.pipe_file(f"{path}/part-1", content[:100] + b"x" + content[101:])
    with pytest.raises(DataError, match=f"Received {bucket}/part-1, which has changed"):
        source.read(np.array([0, 9]))


@pytest.fixture
def proxy(s3_bucket, monkeypatch, tmp_path):
    s3fs = pytest.importorskip("s3fs")

    remote_data.write_records(tmp_path)
    s3fs.S3FileSystem().put(f"{tmp_path}/part-*", "bucket/")
    # The provider's library repeats requests as well, after seconds.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(object_store, "_RETRY_SECONDS", (0.0, 0.0))
    server = StoreProxy(int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2]))
    server.failures = []
    server.rule = lambda request: (
        server.failures.pop() if server.failures and is_object(request) else None
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    server.close()


def is_object(request):
    return request.path.startswith("/bucket/") and not request.query


@pytest.mark.parametrize("failures", [[503], [500, 503], ["lost"]])
def test_temporary_errors_are_repeated(proxy, tmp_path, failures):
    source = data.TFRecord("s3://bucket/part-*")
    expected = data.TFRecord(tmp_path / "part-*").read(np.arange(remote_data.SAMPLES))
    numbers = np.array([20, 3])
    proxy.failures += failures
    np.testing.assert_array_equal(source.read(numbers), expected[numbers])
    assert not proxy.failures


@pytest.mark.parametrize(
    ("failure", "text"),
    [(503, "Service Unavailable"), (403, "PermissionError"), ("lost", "Connection")],
)
def test_a_store_that_does_not_respond_is_an_error(proxy, failure, text):
    source = data.TFRecord("s3://bucket/part-*")
    proxy.failures += [failure] * 20
    with pytest.raises(DataError) as caught:
        source.read(np.array([20]))
    message = str(caught.value)
    assert message.startswith("Cannot read s3://bucket/part-2: ")
    assert message.endswith(
        "; expected a store that responds, and credentials that may read it."
    )
    assert text in message
    assert "\n" not in message


def test_parts_that_a_killed_job_has_left_are_aborted(s3_bucket):
    """S3 bills them. Later ones are of a copy in progress."""
    store = ObjectStore(f"{s3_bucket}/run")
    files = fsspec.filesystem("s3")
    for key in ("run/checkpoints/a", "other/a"):
        files.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    (started, _) = (u["Initiated"] for u in files.list_multipart_uploads("bucket"))
    for seconds, left in ((-1, ["other/a", "run/checkpoints/a"]), (1, ["other/a"])):
        store.abort_uploads(before=started.timestamp() + seconds)
        uploads = files.list_multipart_uploads("bucket")
        assert sorted(upload["Key"] for upload in uploads) == left


def sent(proxy):
    """Return the bytes of the objects that were read."""
    gets = [r for r in proxy.requests if r.method == "GET" and is_object(r)]
    return sum(request.answered for request in gets)


def test_a_rank_reads_its_own_records_only(proxy):
    data.TFRecord("s3://bucket/part-*")
    size = remote_data.RECORD_BYTES + remote_data.FRAME
    # The scan.
    assert sent(proxy) == remote_data.SAMPLES * size
    for rank in range(2):
        proxy.requests.clear()
        source = data.TFRecord("s3://bucket/part-*")
        remote_data.read(source, rank, size=2, epochs=1)
        # The first sample is read once more, for its types.
        assert sent(proxy) == (remote_data.SAMPLES // 2 + 1) * size


def test_a_missing_bucket_is_an_error(bucket):
    other = bucket.replace("bucket", "other")
    with pytest.raises(
        DataError, match=f"Received {other}/a-.*, which matches no file"
    ):
        data.TFRecord(f"{other}/a-*")
    with pytest.raises(DataError, match=f"Received {other}, which does not exist"):
        data.ImageFolder(other)
