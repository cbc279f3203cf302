"""What tests of all tiers share."""

import os
import pathlib
import urllib.request

import pytest

from hvdtrain.data import default_cache_dir

# Before gcsfs is imported: it asks Google for the kind of a bucket otherwise.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


@pytest.fixture(scope="session")
def real_mnist():
    """The directory of the real MNIST, which the project does not ship."""
    given = os.environ.get("HVDTRAIN_MNIST_DIR")
    directory = pathlib.Path(given or default_cache_dir())
    if not (directory / "mnist.npz").is_file():
        pytest.skip("no real MNIST: set HVDTRAIN_MNIST_DIR to the folder of mnist.npz")
    return directory


@pytest.fixture
def s3_bucket(monkeypatch):
    """The address of a bucket of an S3 that is emulated in this process."""
    server = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    emulator = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    emulator.start()
    host, port = emulator.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    # All emulators of a process have the same objects.
    urllib.request.urlopen(f"{endpoint}/moto-api/reset", data=b"").close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # fsspec keeps file systems with the variables of their time.
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield "s3://bucket"
    s3fs.S3FileSystem.clear_instance_cache()
    emulator.stop()


@pytest.fixture
def gcs_bucket(monkeypatch):
    """The address of a bucket of a Google store that is emulated in this process."""
    server = pytest.importorskip("gcp_storage_emulator.server")
    gcsfs = pytest.importorskip("gcsfs")
    emulator = server.create_server("127.0.0.1", 0, in_memory=True)
    emulator.start()
    host, port = emulator._api._httpd.server_address
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}:{port}")
    gcsfs.GCSFileSystem.clear_instance_cache()
    gcsfs.GCSFileSystem().mkdir("bucket")
    yield "gs://bucket"
    gcsfs.GCSFileSystem.clear_instance_cache()
    emulator.stop()
