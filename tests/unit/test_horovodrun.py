"""How horovodrun, with the patches of hvdtrain, starts ranks on a host."""

import errno
import multiprocessing
import os
import subprocess
from unittest import mock

import pytest
from horovod.runner import gloo_run
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.util.cache import Cache


def test_ranks_have_their_own_variables_in_place_of_another_job():
    stale = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "USER_OWN": "kept"}
    command = gloo_run._slot_info_to_command_fn("env", {**os.environ, **stale})
    slot = SlotInfo("node1", 0, 0, 0, size=2, local_size=2, cross_size=1)
    printed = subprocess.run(
        command(slot), shell=True, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {"HOROVOD_RANK=0", "HOROVOD_SIZE=2", "USER_OWN=kept"} <= {*printed}


def test_a_home_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "folder", tmp_path / "folder"):
        cache = Cache(str(folder), 60, "hosts")
        cache.put("node1", True)
        assert cache.get("node1") is True
    assert Cache(str(tmp_path / "folder"), 60, "hosts").get("node1") is True


def test_memory_that_cannot_be_written_is_one_line(monkeypatch):
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))
    context = mock.Mock(Event=mock.Mock(side_effect=error))
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    with pytest.raises(RuntimeError, match="in /dev/shm: Read-only file system"):
        gloo_run._exec_command_fn(mock.Mock())
