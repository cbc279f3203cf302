"""Each check finds what was broken on purpose, and names the remedy."""

import contextlib
import itertools
import os
import pathlib
import sys
import sysconfig
import time

import pytest
from absl import flags

from hvdtrain import addresses
from hvdtrain.doctor import __main__ as doctor
from hvdtrain.doctor import cluster, gpus, installation, machine, ranks
from hvdtrain.doctor.finding import CommandResult, Finding, run
from hvdtrain.install import compatibility, record
from hvdtrain.job import JobError


def test_a_command_that_does_not_exist_has_a_result():
    done = run(["no-such-command"], timeout_seconds=5)
    assert done.code == 127
    assert "no-such-command" in done.last_lines


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 1000 & echo $! >{child}; wait"]
    done = run(command, timeout_seconds=1)
    assert done.code == 124
    assert "1 s" in done.last_lines
    pid = int(child.read_text())
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline, "the child was left behind"


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_commands_are_no_ranks_of_the_job_around_them(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    output = run(["env"], timeout_seconds=5).output
    assert "OMPI_COMM_WORLD_RANK" not in output
    assert "OMPI_MCA_btl=tcp,self" in output


def test_a_directory_that_is_missing_is_broken(tmp_path):
    path = str(tmp_path / "missing")
    finding = machine.check_directory(path, needed_bytes=1, remedy="make it")
    assert finding.status == "broken"
    assert finding.topic == path
    assert finding.remedy == "make it"


def test_a_directory_without_room_is_broken(tmp_path):
    path = str(tmp_path)
    assert machine.check_directory(path, needed_bytes=1, remedy="").status == "fine"
    finding = machine.check_directory(path, needed_bytes=1 << 60, remedy="clean up")
    assert finding.status == "broken"
    assert finding.remedy == "clean up"
    assert not os.listdir(tmp_path)


def test_one_core_is_a_warning(monkeypatch):
    first = min(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {first})
    finding = machine.check_cores()
    assert finding.status == "warning"
    assert finding.detail.startswith("1 of ")


@pytest.mark.parametrize(("throttled", "status"), [(10, "fine"), (400, "warning")])
def test_a_quota_that_throttles_is_a_warning(monkeypatch, tmp_path, throttled, status):
    text = f"usage_usec 7\nnr_periods 1000\nnr_throttled {throttled}\n"
    (tmp_path / "cpu.stat").write_text(text)
    monkeypatch.setattr(machine, "control_groups", lambda: [tmp_path / "a", tmp_path])
    monkeypatch.setattr(machine.cores, "usable", lambda local_size: 2)
    monkeypatch.setattr(machine.cores, "quotas", lambda: [2.5])
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    finding = machine.check_cores()
    assert finding.status == status
    assert "by a control group to 2.5)" in finding.detail
    is_named = "throttled in 40% of the quota's periods" in finding.detail
    assert is_named == (status == "warning")


@pytest.mark.parametrize("variable", addresses.NETWORK_VARIABLES)
def test_an_interface_that_is_not_there_is_broken(monkeypatch, variable):
    monkeypatch.setenv(variable, "nope0")
    finding = machine.check_interfaces()
    assert finding.status == "broken"
    assert f"{variable}=nope0" in finding.detail
    assert "lo" in finding.remedy


def test_interfaces_may_be_named_by_network(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "127.0.0.0/8")
    assert machine.check_interfaces().status == "fine"


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "4"}


def test_a_slurm_job_is_described():
    finding = cluster.check_scheduler(
        {**SLURM, "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}
    )
    assert finding.status == "fine"
    assert finding.detail == "Slurm, job 7: 8 tasks on 2 nodes, 4 cores per task"


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ({"SLURM_NTASKS": "1"}, "--ntasks-per-node"),
        (
            {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"},
            "--ntasks=2 takes precedence: pass only one of the two options",
        ),
    ],
)
def test_fewer_slurm_tasks_than_asked_for_are_a_warning(more, remedy):
    finding = cluster.check_scheduler({**SLURM, **more})
    assert finding.status == "warning"
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("status", "raises"),
    [
        ("warning", contextlib.nullcontext()),
        ("broken", pytest.raises(JobError, match=r"1 broken: cores\.")),
    ],
)
def test_what_is_broken_is_an_error_and_a_warning_is_not(monkeypatch, status, raises):
    for module in (installation, machine, cluster, ranks):
        monkeypatch.setattr(module, "check", lambda *args, **options: [])
    finding = Finding("cores", status, "one core", remedy="Take another machine.")
    monkeypatch.setattr(machine, "check", lambda: [finding])
    flags.FLAGS.mark_as_parsed()
    with raises:
        doctor.main()


@pytest.mark.parametrize(
    ("environ", "detail"),
    [
        ({}, "none, this is not a job of one"),
        ({"PBS_JOBID": "8.head"}, "PBS, job 8.head"),
    ],
)
def test_other_schedulers(environ, detail):
    finding = cluster.check_scheduler(environ)
    assert (finding.status, finding.detail) == ("fine", detail)


def test_variables_that_users_set_are_listed():
    environ = {"HOROVOD_CYCLE_TIME": "5", "HOME": "/root", "NCCL_DEBUG": "INFO"}
    environ["HOROVOD_JOB_SECRET"] = "of a job"
    detail = cluster.check_variables(environ).detail
    assert detail == "HOROVOD_CYCLE_TIME=5, NCCL_DEBUG=INFO"


@pytest.mark.parametrize(
    ("name", "value", "status", "detail", "remedy"),
    [
        ("HOROVOD_CYCLE_TIME", "-3", "broken", "expected milliseconds, 0 or more", ""),
        ("HOROVOD_FUSION_THRESHOLD", "abc", "broken", "expected bytes, 0 or more", ""),
        ("HVDTRAIN_REDUCTION", "fast", "broken", "expected one of auto, native", ""),
        ("HOROVOD_CYCLE_TIMES", "1", "warning", "HOROVOD_CYCLE_TIMES", "CYCLE_TIME?"),
        ("HVDTRAIN_REDUCE", "1", "warning", "HVDTRAIN_REDUCE", "HVDTRAIN_REDUCTION?"),
        # Horovod's C++ code reads it; and its build.
        ("HOROVOD_BATCH_D2D_MEMCOPIES", "1", "fine", "MEMCOPIES=1", ""),
        ("HOROVOD_WITHOUT_MXNET", "1", "fine", "MXNET=1", ""),
    ],
)
def test_variables_that_are_wrong_or_unknown(
    monkeypatch, name, value, status, detail, remedy
):
    monkeypatch.setenv(name, value)
    finding = cluster.check_variables({name: value})
    assert finding.status == status
    assert detail in finding.detail
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("uid", "status"), [(0, "warning"), pytest.param(1000, "fine", id="user")]
)
def test_root_needs_the_variables_of_open_mpi(monkeypatch, uid, status):
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    done = CommandResult(0, "mpirun (Open MPI) 4.1.4", "")
    monkeypatch.setattr(installation, "run", lambda *args, **options: done)
    finding = installation._check_mpirun("mpirun")
    assert finding.status == status
    assert finding.remedy == (
        "export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" if status == "warning" else ""
    )


def test_a_host_without_an_address_is_broken():
    finding = cluster.check_host("no-such-host.invalid", 22)
    assert finding.status == "broken"
    assert finding.topic == "host no-such-host.invalid"
    assert "has no address" in finding.detail


# A script in place of ssh: what a login on the other host would print and run.
@pytest.mark.parametrize(
    ("login", "status", "words"),
    [
        ('echo Welcome; shift $(($# - 1)); PATH={python}:$PATH sh -c "$1"', "fine", ""),
        ('echo Welcome; shift $(($# - 1)); PATH=/bin sh -c "$1"', "broken", "doctor"),
        ("echo hvdtrain-clock1700000000.N; echo 0.0.0", "broken", "0.0.0 there"),
        ("echo hvdtrain-clock1700000000.N", "broken", "nothing there"),
        ("echo Welcome", "broken", "ssh fails"),
        ("echo Permission denied >&2; exit 255", "broken", "Permission denied"),
    ],
)
def test_another_host(monkeypatch, tmp_path, login, status, words):
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n" + login.replace("{python}", os.path.dirname(sys.executable))
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    finding = cluster.check_host("localhost", 22)
    assert finding.status == status, finding
    assert words in finding.detail


TENSORFLOW = {
    **{"version": "2.21.0", "keras": "3.15.1", "without_native": ""},
    **{"gpus": [], "built_for": []},
}
HOROVOD = {
    **{"version": "0.28.1", "mpi": True, "gloo": True, "nccl": False},
    "mpi_library": None,
}


def examine(monkeypatch, properties=TENSORFLOW, horovod=None, **installed):
    """Return the findings on an installation, by topic, and load nothing."""
    found = compatibility.Installed(
        **{
            "python": (3, 11),
            "tensorflow": True,
            "tensorflow_packages": {"tensorflow-cpu": "2.21.0"},
            "keras": "3.15.1",
            "horovods": (),
            **installed,
        }
    )
    loaded = {"tensorflow": properties, "horovod": horovod}
    broken = CommandResult(1, "", "ImportError: it is broken")
    monkeypatch.setattr(compatibility, "read_installed", lambda: found)
    monkeypatch.setattr(
        installation, "_probe", lambda library: (loaded.get(library), broken)
    )
    for load in (installation.load_tensorflow, installation.load_horovod):
        load.cache_clear()
    findings = installation.check()
    for load in (installation.load_tensorflow, installation.load_horovod):
        load.cache_clear()
    return {finding.topic: finding for finding in findings}


@pytest.mark.parametrize(("obstacle", "status"), [("", "fine"), ("gone", "warning")])
def test_missing_operations_of_hvdtrain_are_a_warning(monkeypatch, obstacle, status):
    properties = {**TENSORFLOW, "without_native": obstacle}
    finding = examine(monkeypatch, properties)["operations"]
    assert finding.status == status
    assert obstacle in finding.detail
    assert bool(obstacle) == ("slower" in finding.remedy)


@pytest.mark.parametrize(
    ("keras", "status", "topic"),
    [
        ("3.11.9", "broken", "Keras"),
        ("3.12.0", "fine", "TensorFlow"),
        ("3.15.1", "fine", "TensorFlow"),
        ("3.99.0", "warning", "Keras"),
    ],
)
def test_a_keras_outside_the_range_of_the_package(monkeypatch, keras, status, topic):
    findings = examine(monkeypatch, {**TENSORFLOW, "keras": keras})
    assert findings[topic].status == status
    assert ("Keras" in findings) == (topic == "Keras")


def test_missing_libraries_are_broken_and_the_rest_is_examined(monkeypatch):
    findings = examine(monkeypatch, tensorflow=False)
    assert findings["TensorFlow"].remedy == "run pip install 'hvdtrain[cpu]'"
    assert findings["Horovod"].remedy == "run python -m hvdtrain.install"
    assert {"Python", "GPU"} <= set(findings)


def test_two_tensorflows_are_a_warning(monkeypatch):
    both = {"tensorflow": "2.20.0", "tensorflow-cpu": "2.21.0"}
    finding = examine(monkeypatch, tensorflow_packages=both)["two TensorFlows"]
    assert finding.status == "warning"
    assert "tensorflow 2.20.0 and tensorflow-cpu 2.21.0" in finding.detail
    assert "pip uninstall tensorflow tensorflow-cpu, " in finding.remedy


# TensorFlow 2.21.0 for GPUs.
BUILT_FOR = ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]


@pytest.mark.parametrize(
    ("gpu", "built_for", "status"),
    [
        # Machine code runs on later minor versions of its major version.
        ((8, 0), BUILT_FOR, "fine"),
        ((8, 6), BUILT_FOR, "fine"),
        ((7, 5), BUILT_FOR, "fine"),
        ((7, 5), ["sm_60", "sm_80", "compute_90"], "broken"),
        ((9, 0), BUILT_FOR, "fine"),
        # PTX is compiled for later major versions.
        ((10, 0), BUILT_FOR, "warning"),
        ((12, 0), BUILT_FOR, "warning"),
        ((12, 0), ["sm_80", "sm_90"], "broken"),
        ((12, 0), [*BUILT_FOR, "sm_120"], "fine"),
        ((3, 7), BUILT_FOR, "broken"),
        # A letter: code for one GPU, or for one major version.
        ((9, 0), ["sm_90a"], "fine"),
        ((12, 0), ["compute_90a"], "broken"),
        ((10, 3), ["sm_100a"], "broken"),
        ((10, 3), ["sm_100f"], "fine"),
    ],
)
def test_a_gpu_for_which_tensorflow_has_no_kernels(gpu, built_for, status):
    properties = {**TENSORFLOW, "gpus": [gpu], "built_for": built_for}
    [finding] = gpus.check_kernels(properties)
    assert finding.status == status
    assert f"is {gpu[0]}.{gpu[1]}, TensorFlow was built for {built_for[0]}" in (
        finding.detail
    )
    assert bool(finding.remedy) == (status != "fine")
    assert ("CUDA_ERROR_INVALID_HANDLE" in finding.detail) == (status == "warning")


def test_each_kind_of_gpu_has_one_finding():
    several = [[8, 0], [12, 0], [8, 0], None]
    found = gpus.check_kernels({**TENSORFLOW, "gpus": several, "built_for": BUILT_FOR})
    assert [finding.status for finding in found] == ["fine", "warning"]
    # A build for CPUs, or for AMD's GPUs, does not say.
    assert gpus.check_kernels({**TENSORFLOW, "gpus": several}) == []


@pytest.fixture
def horovods(tmp_path):
    """Directories of two Horovods that were built for this Python."""
    directories = tmp_path / "first", tmp_path / "second"
    for directory in directories:
        (directory / "tensorflow").mkdir(parents=True)
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        (directory / "tensorflow" / f"mpi_lib{suffix}").touch()
        (directory / "metadata.json").write_text('{"tensorflow": "2.21.0"}')
    return directories


def test_a_horovod_of_hvdtrain_is_named_with_its_build(monkeypatch, horovods):
    patches = pathlib.Path(compatibility.__file__).with_name("patches").glob("*.patch")
    build = record.BuildRecord(
        version="0.28.1+hvdtrain.1",
        tensorflow="2.21.3",
        compiler="g++ 12.2.0",
        mpi="Open MPI 4.1.8",
        sources={patch.name: "digest" for patch in patches},
    )
    record.write(horovods[0], build)
    findings = examine(monkeypatch, horovod=HOROVOD, horovods=horovods[:1])
    assert findings["Horovod"].status == findings["patches"].status == "fine"
    assert findings["Horovod"].detail == (
        f"0.28.1+hvdtrain.1 in {horovods[0]}, built for TensorFlow 2.21.3 with MPI, "
        "Gloo, Open MPI 4.1.8, g++ 12.2.0"
    )


def test_two_horovods_without_patches_are_warnings(monkeypatch, horovods):
    findings = examine(monkeypatch, horovod=HOROVOD, horovods=horovods)
    assert findings["two Horovods"].status == "warning"
    assert findings["Horovod"].status == "fine"
    assert findings["patches"].status == "warning"
    assert "a stalled job never ends" in findings["patches"].detail
    assert findings["patches"].remedy.endswith("hvdtrain.install --replace")
    core_only = {**HOROVOD, "gloo": False}
    findings = examine(monkeypatch, horovod=core_only, horovods=horovods)
    assert "Gloo" not in findings["patches"].detail


def test_a_horovod_that_does_not_load_is_broken(monkeypatch, horovods):
    finding = examine(monkeypatch, horovods=horovods[:1])["Horovod"]
    assert finding.status == "broken"
    assert finding.detail.endswith("cannot be loaded: ImportError: it is broken")
    assert finding.remedy == "run python -m hvdtrain.install --replace"


def test_every_patch_has_a_loss_or_is_needed_to_compile():
    patches = pathlib.Path(compatibility.__file__).with_name("patches").glob("*.patch")
    numbers = sorted(int(patch.name.split("-")[0]) for patch in patches)
    losses = [*installation.GLOO_LOSSES, *installation.LOSSES]
    named = [*itertools.chain(*losses), *installation.BUILD_ONLY]
    assert sorted(named) == numbers
