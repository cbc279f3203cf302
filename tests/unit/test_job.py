"""The start and the agreement of a job, in one process."""

import contextlib
import dataclasses
import http.client
import os
import subprocess
import threading
from unittest import mock

import pytest
from horovod.runner.common.util import hosts
from horovod.runner.http.http_server import RendezvousServer

from hvdtrain import job
from hvdtrain.job import (
    JobError,
    World,
    agreement,
    backend,
    declared_size,
    launchers,
)
from hvdtrain.job.launchers import Launch


def test_world_is_a_value():
    world = World(rank=1, size=4, local_rank=1, local_size=2)
    assert not world.is_chief
    assert World().is_chief
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.rank = 0


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch("", 1, 0)),
        ({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "3"}, Launch("horovodrun", 4, 3)),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            Launch("mpirun", 2, 1),
        ),
        ({"PMI_SIZE": "8", "PMI_RANK": "0"}, Launch("mpiexec", 8, 0)),
        # In an allocation mpirun starts its daemons by srun: two tasks, eight ranks.
        (
            {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "1",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_RANK": "5",
            },
            Launch("mpirun", 8, 5),
        ),
        # A batch script of a job of four tasks is itself none of these tasks.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, Launch("", 1, 0)),
    ],
)
def test_launch_is_read_from_the_innermost_launcher(environ, expected):
    assert launchers.launch(environ) == expected


@pytest.mark.parametrize(
    ("environ", "variable", "size"),
    [
        ({"HOROVOD_SIZE": "4", "HOROVOD_RANK": "3"}, "HOROVOD_SIZE", 4),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
            "OMPI_COMM_WORLD_SIZE",
            2,
        ),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "PMI_SIZE", 2),
        (
            {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"},
            "MPI_LOCALNRANKS",
            2,
        ),
        (
            {"MV2_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_RANK": "0"},
            "MV2_COMM_WORLD_SIZE",
            3,
        ),
        (
            {"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "0"},
            "JSM_NAMESPACE_SIZE",
            6,
        ),
        ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}, "FLUX_JOB_SIZE", 2),
        (
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
            "SLURM_STEP_NUM_TASKS",
            2,
        ),
        # Of a rank alone, those before it are known.
        ({"PALS_RANKID": "3"}, "PALS_RANKID", 4),
        ({"PMIX_RANK": "1"}, "PMIX_RANK", 2),
    ],
)
def test_a_process_that_is_one_of_several_does_not_train_alone(
    monkeypatch, environ, variable, size
):
    monkeypatch.setattr(os, "environ", environ)
    assert declared_size.read(environ) == (variable, size)
    text = rf"^Received {variable} of {size} processes, .* sees jobs of 1: [^\n]*$"
    with pytest.raises(JobError, match=text):
        declared_size.check(size=1)
    declared_size.check(size=size)
    # Two jobs of some of the processes are refused too.
    with pytest.raises(JobError, match=f"sees jobs of {size - 1}:"):
        declared_size.check(size=size - 1)
    environ["HVDTRAIN_ALONE"] = "1"
    assert launchers.launch(environ) == Launch() or launchers.has_rendezvous(environ)
    declared_size.check(size=1)


def test_init_does_not_start_horovod_alone(monkeypatch):
    monkeypatch.setattr(
        os, "environ", {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    )
    monkeypatch.setattr(backend.hvd, "init", mock.Mock(side_effect=StartedError))
    monkeypatch.setattr(backend.hvd, "is_initialized", lambda: False)
    with pytest.raises(JobError, match="SLURM_STEP_NUM_TASKS of 2"):
        backend.init()
    # A communicator of some ranks is what the script asks for.
    with pytest.raises(StartedError):
        backend.init(comm=[1])
    # MPICH's ranks may form a job. Here Horovod has this rank alone.
    monkeypatch.setattr(os, "environ", {"PMI_SIZE": "2", "PMI_RANK": "0"})
    monkeypatch.setattr(backend.hvd, "init", mock.Mock())
    monkeypatch.setattr(backend.hvd, "rank", lambda: 0)
    monkeypatch.setattr(backend.hvd, "size", lambda: 1)
    with pytest.raises(JobError, match="PMI_SIZE of 2"):
        backend.init()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # A shell in an allocation, and its batch script: no part of a job of N.
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"FLUX_JOB_SIZE": "2"},
        # Rank 0 of any number; a pod that a variable counts.
        {"PMIX_RANK": "0"},
        {"JOB_COMPLETION_INDEX": "1"},
        # The innermost launcher has started one process.
        {
            "OMPI_COMM_WORLD_SIZE": "1",
            "OMPI_COMM_WORLD_RANK": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "1",
        },
    ],
)
def test_a_process_of_which_nothing_is_declared_may_be_alone(monkeypatch, environ):
    monkeypatch.setattr(os, "environ", environ)
    declared_size.check(size=1)


OF_GLOO = dict.fromkeys(
    (
        *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME"),
        *("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        *("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"),
    ),
    "1",
)
OF_MPI = {"OMPI_COMM_WORLD_RANK": "0", "HOROVOD_CYCLE_TIME": "1"}


@pytest.fixture
def launched_by(monkeypatch):
    """Return `launched_by(name, environ)`: sets what the nearest launcher is."""
    with contextlib.ExitStack() as stack:

        def launched_by(name, environ):
            command = ["sleep", "3600"]
            process = stack.enter_context(subprocess.Popen(command, env=environ))
            stack.callback(process.kill)
            stat = mock.Mock()
            stat.name = name
            monkeypatch.setattr(launchers, "find_process", lambda: (process.pid, stat))

        yield launched_by


@pytest.mark.parametrize(
    ("launcher", "environ", "kept"),
    [
        ("mpirun", OF_MPI | OF_GLOO, OF_MPI),
        # Of a rank that a program under mpirun has started.
        ("mpirun", OF_MPI | OF_GLOO, None),
        # The user's choice.
        ("orted", OF_MPI | {"HOROVOD_CONTROLLER": "mpi"}, None),
        # hvdtrain.run on Ray, in an allocation of mpirun: its agents drop MPI's.
        ("mpirun", OF_GLOO, None),
        ("horovodrun", OF_GLOO | OF_MPI, None),
        ("slurmstepd", OF_GLOO | {"SLURM_PROCID": "0"}, None),
    ],
)
def test_a_rank_drops_the_variables_of_another_job(
    launched_by, monkeypatch, launcher, environ, kept
):
    launched_by(launcher, {})
    inherited = [] if kept is None else [*environ]
    monkeypatch.setattr(launchers, "read_environment", lambda pid: inherited)
    found = dict(environ)
    launchers.drop_stale(found)
    assert found == (environ if kept is None else kept)


def test_a_rank_of_a_launcher_has_nothing_of_another_job():
    assert launchers.without_launch(OF_GLOO | OF_MPI) == {"HOROVOD_CYCLE_TIME": "1"}
    chosen = {"HOROVOD_CONTROLLER": "gloo"}
    assert launchers.without_launch(chosen) == chosen


class StartedError(Exception):
    pass


@pytest.mark.parametrize(
    ("is_built", "chosen", "controller"),
    [
        (True, None, "gloo"),
        (True, "gloo", "gloo"),
        (True, "mpi", "mpi"),
        (False, None, None),
    ],
)
def test_a_rank_without_a_launcher_takes_gloo_where_it_is_built(
    monkeypatch, is_built, chosen, controller
):
    """Horovod reads the variables in its `init`, which raises here."""
    monkeypatch.setattr(os, "environ", {"HOROVOD_CONTROLLER": chosen} if chosen else {})
    monkeypatch.setattr(backend.hvd, "gloo_built", lambda: is_built)
    monkeypatch.setattr(backend.hvd, "init", mock.Mock(side_effect=StartedError))
    with pytest.raises(StartedError):
        job.start()
    assert os.environ.get("HOROVOD_CONTROLLER") == controller
    operations = "gloo" if controller == "gloo" else None
    assert os.environ.get("HOROVOD_CPU_OPERATIONS") == operations


def test_programs_have_a_shorter_stall_limit(monkeypatch):
    monkeypatch.delenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", raising=False)
    # For the end of the test: the start sets them.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(backend.hvd, "init", mock.Mock(side_effect=StartedError))
    with pytest.raises(StartedError):
        job.start()
    assert os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "60"


@pytest.mark.parametrize(
    # Horovod ignores the limit where the warning is later.
    ("given", "expected", "warning"),
    [(None, "1800", "60"), ("7", "7", "3.5"), ("0", "0", "60")],
)
def test_a_lone_collective_does_not_wait_for_ever(
    monkeypatch, given, expected, warning
):
    environ = {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": given} if given else {}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(backend.hvd, "init", mock.Mock())
    monkeypatch.setattr(backend.hvd, "rank", lambda: 1)
    monkeypatch.setattr(backend.hvd, "size", lambda: 2)
    backend.init()
    assert environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == expected
    assert environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] == warning
    assert backend.hvd.init.called


def test_elastic_jobs_may_change_size(monkeypatch):
    environ = {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "0", "HOROVOD_ELASTIC": "1"}
    monkeypatch.setattr(os, "environ", environ)
    declared_size.check(size=1)


def test_a_first_batch_that_takes_long_raises_one_warning(monkeypatch):
    is_read = threading.Event()
    seconds = iter([0.0, 59.0, 61.0])

    def gather(world, value):
        # Rank 1 is as this one, rank 2 is done at once.
        return [value, value, True] if isinstance(value, bool) else [value]

    def clock():
        now = next(seconds)
        if now > 60:
            is_read.set()
        return now

    monkeypatch.setattr(agreement, "gather", gather)
    monkeypatch.setattr(agreement, "_POLL_SECONDS", 0.01)
    with pytest.warns(UserWarning, match=r"60 s .* for a batch on rank 0, 1\."):
        agreement.on_all(World(0, 3), is_read.wait, name="a batch", clock=clock)


def test_fail_together_keeps_messages_and_the_traceback_of_bugs():
    with agreement.fail_together(World()):
        pass
    with (
        pytest.raises(JobError, match=r"^a mistake$"),
        agreement.fail_together(World(), expected=(OSError,)),
    ):
        raise OSError("a mistake")
    with (
        pytest.raises(JobError, match=r"(?s)Traceback.*KeyError: 'a bug'"),
        agreement.fail_together(World(), expected=(OSError,)),
    ):
        raise KeyError("a bug")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([("", "a"), ("no file", "b")], "rank 1 on b: no file"),
        ([("full", "a"), ("", "b")], "rank 0 on a: full"),
        ([("no file", "a"), ("no file", "b")], "no file"),
        ([("disk 1", "a"), ("disk 2", "b")], "rank 0 on a: disk 1"),
    ],
)
def test_the_rank_is_named_unless_all_fail_alike(monkeypatch, answers, message):
    monkeypatch.setattr(agreement, "gather", lambda world, value: answers)
    with pytest.raises(JobError) as caught, agreement.fail_together(World(0, 2)):
        pass
    assert str(caught.value) == message


def test_gather_alone_needs_no_horovod():
    assert agreement.gather(World(), {"a": 1}) == [{"a": 1}]


@pytest.fixture
def rendezvous():
    """Sends a request to horovodrun's server, for two ranks of one host."""
    server = RendezvousServer()
    port = server.start()
    server.init(hosts.get_host_assignments(hosts.parse_hosts("localhost:2"), 2))

    def request(method: str, path: str) -> int:
        connection = http.client.HTTPConnection("localhost", port, timeout=30)
        connection.request(method, path, body=b"address" if method == "PUT" else None)
        status = connection.getresponse().status
        connection.close()
        return status

    yield request
    server.stop()


def test_an_address_does_not_outlive_its_rendezvous(rendezvous):
    # Rank 0 is through with the next rendezvous before rank 1 reports this one's end.
    assert rendezvous("PUT", "/local_localhost/1") == 200
    for report in ("/local_localhost/0", "/cross_0/0", "/local_localhost/1"):
        assert rendezvous("GET", "/local_localhost/1") == 200
        assert rendezvous("DELETE", report) == 200
    assert rendezvous("GET", "/local_localhost/1") == 404
