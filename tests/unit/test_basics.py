"""What `init` settles before Horovod starts."""

import os

import pytest

import hvdtrain.keras as hvd

LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"


@pytest.mark.parametrize(("given", "expected"), [(None, "1800"), ("7", "7")])
def test_a_lone_collective_does_not_wait_for_ever(monkeypatch, given, expected):
    monkeypatch.setenv(LIMIT, given or "")
    if given is None:
        monkeypatch.delenv(LIMIT)
    hvd.init()
    assert os.environ[LIMIT] == expected
