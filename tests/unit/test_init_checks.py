"""What `hvd.init` refuses in one line, where Horovod would abort the process."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import addresses
from hvdtrain.job import JobError, init_checks, launchers, rendezvous

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


@pytest.fixture
def gloo(monkeypatch):
    """Choose Gloo, and return the patch of the environment."""
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        monkeypatch.setenv(name, "gloo")
    for name in launchers.GLOO_RENDEZVOUS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    names = {"lo": ["127.0.0.1"], "eth0": ["10.77.0.4"]}
    monkeypatch.setattr(addresses, "by_interface", lambda: names)
    monkeypatch.setattr(addresses, "reached_by_others", lambda: "10.77.0.4")
    monkeypatch.setattr(socket, "gethostname", lambda: "pod4")
    return monkeypatch


JOB = dict.fromkeys(launchers.GLOO_RENDEZVOUS, "1")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "lo"),
        (JOB, "eth0"),
        (JOB | {"HOROVOD_GLOO_IFACE": "lo"}, "lo"),
    ],
)
def test_gloo_has_an_interface_without_the_name_of_the_host(gloo, variables, expected):
    for name, value in variables.items():
        gloo.setenv(name, value)
    init_checks.check()
    with init_checks.interface_of_gloo():
        assert os.environ["HOROVOD_GLOO_IFACE"] == expected
    assert os.environ.get("HOROVOD_GLOO_IFACE") == variables.get("HOROVOD_GLOO_IFACE")


def test_an_interface_of_gloo_without_an_address_is_one_line(gloo):
    gloo.setenv("HOROVOD_GLOO_IFACE", "eth1")
    error = "Received HOROVOD_GLOO_IFACE=eth1; expected a network interface of pod4 "
    with pytest.raises(JobError, match=error) as raised:
        init_checks.check()
    assert str(raised.value).endswith(": lo 127.0.0.1, eth0 10.77.0.4.")


@pytest.mark.parametrize(
    ("resolved", "error"),
    [(["10.77.0.4"], ""), (["127.0.1.1"], ""), (["10.9.9.9"], "resolves to 10.9.9.9")],
)
def test_a_horovod_without_patches_needs_the_name_of_the_host(gloo, resolved, error):
    gloo.setattr(rendezvous, "has_patches", lambda: False)
    gloo.setattr(addresses, "resolve", lambda name: resolved)
    if not error:
        init_checks.check()
        return
    with pytest.raises(JobError, match=f"pod4 {error}, and the interfaces are lo 127"):
        init_checks.check()
