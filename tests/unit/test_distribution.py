"""`hvdtrain.distribution` before a job is started."""

import subprocess
import sys

import keras
import pytest

from hvdtrain.distribution import devices, enable
from hvdtrain.job.world import JobError, World


def test_another_backend_is_an_error(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(JobError, match="Received the backend 'jax'; expected"):
        enable.__wrapped__()


@pytest.mark.long
def test_the_import_replaces_nothing():
    code = (
        "import keras, hvdtrain.distribution; from keras.src import backend;"
        "assert not hasattr(backend.distribution_lib, 'num_processes');"
        "hvdtrain.distribution.enable(); hvdtrain.distribution.enable();"
        "assert keras.distribution.list_devices() == ['cpu:0']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
        {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1234"},
    ],
    ids=["launcher", "platform"],
)
def test_devices_before_initialize_are_an_error_in_one_of_several_processes(
    variables, monkeypatch
):
    # Other tests of this process may have started Horovod.
    monkeypatch.setattr(devices.hvd, "is_initialized", lambda: False)
    assert devices.num_processes() == 1
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match=r"of 4 processes.*initialize\(\) before"):
        devices.list_devices()
    monkeypatch.setenv("HVDTRAIN_ALONE", "1")
    assert devices.list_devices() == ["cpu:0"]


def test_arguments_of_initialize_that_are_those_of_the_job_are_accepted():
    world = World(rank=1, size=2, local_rank=1, local_size=2)
    for arguments in ((None, None, None), ("a:1,b:2", 2, 1), ("a:1", None, 1)):
        devices.check_arguments(world, *arguments)
    with pytest.raises(JobError, match=r"process_id=0 .* expected 1"):
        devices.check_arguments(world, None, 2, 0)
