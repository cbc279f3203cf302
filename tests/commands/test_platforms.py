"""Jobs whose processes a platform starts, and hvdtrain.launch, on one and two hosts."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import signal
import socket
import sys

import psutil
import pytest

ROOT = pathlib.Path(__file__).parents[2]
PLATFORM = [sys.executable, str(ROOT / "tests" / "commands" / "starting_program.py")]
HOSTS = [str(ROOT / "scripts" / "hosts.sh")]
MNIST = [sys.executable, "-m", "hvdtrain.mnist"]
LAUNCH = [sys.executable, "-m", "hvdtrain.launch"]
DIGITS = ["--dataset=digits", "--max_steps=40", "--save_every_steps=20"]


def newest(directory):
    """Return step and digest of the newest checkpoint, which names no launcher."""
    *_, path = sorted(directory.glob("checkpoints/step-*.safetensors"))
    step = path.name.rpartition("-")[0]
    return step, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "way",
    ["workers", pytest.param("launch", marks=pytest.mark.release)],
)
def test_ranks_of_one_host_compute_what_those_of_horovodrun_do(run, tmp_path, way):
    job = run([*DIGITS, f"--model_dir={tmp_path / 'gloo'}"], launcher="gloo")
    assert job.returncode == 0, job.text
    program = [*LAUNCH, "--nproc_per_node=2", *MNIST[1:]]
    if way != "launch":
        program = [*PLATFORM, way, "localhost,localhost", "0", *MNIST]
    job = run([*DIGITS, f"--model_dir={tmp_path / way}"], program=program)
    assert job.returncode == 0, job.text
    assert re.search(r"ranks +2", job.text)
    assert newest(tmp_path / way) == newest(tmp_path / "gloo")


@pytest.fixture(scope="module")
def by_horovodrun(tmp_path_factory):
    """Return `of(run)`: the checkpoint of horovodrun on two hosts, trained once."""
    directory = tmp_path_factory.mktemp("horovodrun")

    def of(run):
        if not list(directory.glob("checkpoints/*")):
            network = ["-H", "host1:1,host2:1", "--network-interface", "eth0"]
            program = [*HOSTS, "horovodrun", "--gloo", "-np", "2", *network, *MNIST]
            arguments = [*DIGITS, f"--model_dir={directory}"]
            job = run(arguments, program=program, forked=False)
            assert job.returncode == 0, job.text
        return newest(directory)

    return of


RARER_KINDS = ("chief", "torch", "trainer", "vertex", "sagemaker", "kubernetes")


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")
@pytest.mark.parametrize(
    "kind",
    [
        "workers",
        *(pytest.param(kind, marks=pytest.mark.release) for kind in RARER_KINDS),
    ],
)
def test_two_hosts_of_a_platform_are_those_of_horovodrun(
    run, tmp_path, by_horovodrun, kind
):
    program = [*HOSTS, *PLATFORM, kind, "host1,host2", "0", *MNIST]
    # A fork's server is on another host.
    job = run([*DIGITS, f"--model_dir={tmp_path}"], program=program, forked=False)
    assert job.returncode == 0, job.text
    assert "TCP" in job.text
    assert newest(tmp_path) == by_horovodrun(run)


@pytest.mark.release
@pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")
def test_launch_starts_ranks_on_each_host_of_a_platform(run, tmp_path):
    network = ["-H", "host1:2,host2:2", "--network-interface", "eth0"]
    ways = {
        "horovodrun": ["horovodrun", "--gloo", "-np", "4", *network, *MNIST],
        "launch": [
            *(*PLATFORM, "workers", "host1,host2", "0"),
            *(*LAUNCH, "--nproc_per_node=2", *MNIST[1:]),
        ],
    }
    for way, program in ways.items():
        arguments = [*DIGITS, f"--model_dir={tmp_path / way}"]
        job = run(arguments, program=[*HOSTS, *program], forked=False)
        assert job.returncode == 0, job.text
        assert "2 on host1, 2 on host2" in job.text
    assert newest(tmp_path / "launch") == newest(tmp_path / "horovodrun")


def rank_of(job, index):
    """Return the process of a worker of TF_CONFIG, without its guard."""
    for process in job.processes():
        with contextlib.suppress(psutil.Error):
            config = process.environ().get("TF_CONFIG", "")
            is_rank = process.cmdline()[1:3] == MNIST[1:]
            if is_rank and json.loads(config)["task"]["index"] == index:
                return process
    return None


# As a restart policy does, the platform starts each process again by itself.
@pytest.mark.release
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.release)])
def test_a_job_goes_on_when_the_platform_restarts_its_processes(
    start, run, tmp_path, killed
):
    arguments = ["--dataset=digits", "--max_steps=2000", "--save_every_steps=100"]
    job = run([*arguments, f"--model_dir={tmp_path / 'whole'}"], launcher="gloo")
    assert job.returncode == 0, job.text
    program = [*PLATFORM, "workers", "localhost,localhost", "3", *MNIST]
    job = start([*arguments, f"--model_dir={tmp_path / 'killed'}"], program=program)
    job.wait_for("checkpoint at step 100")
    rank_of(job, killed).kill()
    job.wait()
    assert job.returncode == 0, job.text
    assert re.search(r"continues +at step [12]00 from ", job.text), job.text
    assert newest(tmp_path / "killed") == newest(tmp_path / "whole")


FAILING = """
import os, signal, sys
import hvdtrain.keras as hvd

hvd.init()
if hvd.rank() == 1:
    if sys.argv[1] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(sys.argv[1]))
hvd.allgather_object(0)
"""


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        pytest.param(
            *("SIGKILL", 137, "was killed by SIGKILL."), marks=pytest.mark.release
        ),
        ("9", 9, "has ended with exit code 9."),
    ],
)
def test_launch_ends_as_the_first_rank_that_fails(run, tmp_path, end, code, line):
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    program = [*LAUNCH, "--nproc_per_node=2", str(script)]
    job = run([end], program=program, forked=False)
    assert job.returncode == code, job.text
    host = socket.gethostname()
    assert job.lines[-1] == f"The first rank that failed: rank 1 on {host} {line}"


@pytest.mark.parametrize(
    ("flag", "environment", "code", "error"),
    [
        (
            *("--nnodes=2", {}, 2),
            "Unknown command line flag 'nnodes' (for several hosts, start this",
        ),
        # Of another job: there is no rank 0 that prints it.
        (
            *("--nproc_per_node=2", {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"}, 1),
            f"rank 1 on {socket.gethostname()}: Received HOROVOD_SIZE of 4 processes",
        ),
    ],
)
def test_a_wrong_start_by_launch_is_one_line(run, flag, environment, code, error):
    program = [*LAUNCH, flag, "script.py"]
    job = run([], program=program, environment=environment, forked=False)
    assert (job.returncode, len(job.lines)) == (code, 1), job.text
    assert job.lines[0].startswith(error)


@pytest.mark.release
def test_launch_passes_a_request_to_stop_to_the_ranks(start, tmp_path):
    arguments = ["--dataset=digits", "--epochs=500", f"--model_dir={tmp_path}"]
    program = [*LAUNCH, "--nproc_per_node=2", *MNIST[1:]]
    job = start([*arguments, "--save_every_steps=10"], program=program)
    job.wait_for("checkpoint at step 10")
    job.process.send_signal(signal.SIGINT)
    job.wait()
    assert job.returncode == 75, job.text
    assert re.match(r"Stopped by SIGINT: rank \d on .* exit code 75.", job.lines[-1])


@pytest.mark.long
def test_ranks_that_do_not_end_at_a_signal_are_killed(start):
    ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready')"
    program = [*LAUNCH, "--nproc_per_node=2", "-m", "timeit", "-n1", "-r1", ignore]
    seconds = {"HOROVOD_TERMINATION_SECONDS": "0.5"}
    job = start(["time.sleep(600)"], program=program, environment=seconds)
    job.wait_until(lambda: job.text.count("ready") == 2, "ready")
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    assert job.returncode == 137, job.text
    assert "did not end within 0.5 s of a signal" in job.lines[-1]


# One by default: the others differ in a row of a table, which unit tests read.
@pytest.mark.parametrize(
    ("variable", "beside"),
    [
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        *(
            pytest.param(*row, marks=pytest.mark.release)
            for row in (
                ("PMI_SIZE", "PMI_RANK"),
                ("MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
                ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
                ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
                ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
                # Of a rank: it is one of two at least.
                ("PALS_RANKID", ""),
            )
        ),
    ],
)
def test_a_process_of_a_launcher_without_horovod_does_not_train(run, variable, beside):
    # Rank 0 prints for all, where the launcher says which one that is.
    environment = {variable: "2", beside: "0"} if beside else {variable: "1"}
    job = run(["--dataset=digits"], environment=environment, forked=False)
    assert job.returncode == 1, job.text
    assert re.fullmatch(
        rf"Received {variable} of 2 processes, but Horovod sees jobs of "
        r"\d: .* or set HVDTRAIN_ALONE=1 if each is to train alone, or unset .*",
        job.lines[-1],
    )


def test_launch_does_not_start_several_jobs(run):
    environment = {"PMI_SIZE": "2", "PMI_RANK": "0"}
    job = run(["train.py"], program=LAUNCH, environment=environment)
    assert job.returncode == 1
    assert job.lines[-1].startswith(
        "Received PMI_SIZE of 2 processes, but Horovod sees"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "Received no PROGRAM; expected one or more (see --help)"),
        (["--nproc_per_node=0", "train.py"], "expected a number, 1 or more, or auto"),
        (["--ranks=2", "train.py"], "Unknown command line flag 'ranks'"),
    ],
)
def test_wrong_arguments_of_launch_are_one_line(run, arguments, error):
    job = run(arguments, program=LAUNCH)
    assert job.returncode == 2
    assert error in job.lines[-1]


def test_an_evaluator_of_tf_config_leaves(run):
    environment = {
        "TF_CONFIG": json.dumps(
            {
                "cluster": {"chief": ["localhost:1"], "evaluator": ["localhost:2"]},
                "task": {"type": "evaluator", "index": 0},
            }
        )
    }
    job = run(["--dataset=digits"], environment=environment)
    assert job.returncode == 0
    [line] = job.lines
    assert line.startswith("hvd.init: This task is the evaluator of TF_CONFIG")
