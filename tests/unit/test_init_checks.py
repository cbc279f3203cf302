"""What `hvd.init` refuses in one line, where Horovod would abort the process."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.job import JobError, init_checks

ROOT = pathlib.Path(__file__).parents[2]
NEEDS_EAGER = "hvdtrain needs eager execution. Received a program without it: remove"


def test_a_graph_is_refused():
    with tf.Graph().as_default(), pytest.raises(JobError, match=NEEDS_EAGER):
        init_checks.check()


def test_a_timeline_that_cannot_be_written_is_refused(monkeypatch, tmp_path):
    path = tmp_path / "missing" / "timeline.json"
    error = f"Cannot write {path}: No such file.* choose another"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))
    with pytest.raises(JobError, match=f"{error} HOROVOD_TIMELINE"):
        init_checks.check()
    monkeypatch.delenv("HOROVOD_TIMELINE")
    hvd.init()
    with pytest.raises(JobError, match=f"{error} file_path"):
        hvd.start_timeline(str(path))


@pytest.fixture
def last_line():
    """Return `last_line(code, ...)`: the last line of a program that fails."""

    def last_line(code, *, command=(), **environment):
        done = subprocess.run(
            [*command, sys.executable, "-c", f"import tensorflow as tf\n{code}"],
            env={**os.environ, "PYTHONPATH": str(ROOT)} | environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        return done.stderr.splitlines()[-1]

    return last_line


INIT = "import hvdtrain.keras as hvd; hvd.init()"
ERROR = "hvdtrain.job.world.JobError: "


@pytest.mark.long
@pytest.mark.parametrize("name", ["disable_eager_execution", "disable_v2_behavior"])
def test_a_program_without_eager_execution_is_refused(last_line, name):
    line = last_line(f"tf.compat.v1.{name}()\n{INIT}")
    assert line.startswith(ERROR + NEEDS_EAGER)


@pytest.mark.long
@pytest.mark.skipif(not hvd.mpi_built(), reason="needs MPI")
def test_mpi_is_not_started_twice(last_line):
    line = last_line(f"{INIT}; hvd.shutdown(); hvd.init()")
    assert line.startswith(f"{ERROR}hvd.init() cannot start MPI again: hvd.shutdown()")


def can_rename_host():
    command = ["unshare", "--uts", "hostname", "unresolvable.invalid"]
    return (
        shutil.which("unshare")
        and not subprocess.run(
            command, capture_output=True, timeout=30, check=False
        ).returncode
    )


@pytest.mark.long
@pytest.mark.skipif(not can_rename_host(), reason="needs root and unshare")
def test_a_host_that_cannot_resolve_its_name_is_refused(last_line):
    name = "unresolvable.invalid"
    command = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"]
    gloo = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    line = last_line(INIT, command=command, **gloo)
    assert line.startswith(f"{ERROR}This host cannot resolve its own name, {name}: ")
    assert f"'127.0.1.1 {name}'" in line
    assert "HOROVOD_GLOO_IFACE" in line
