"""Jobs whose processes a platform starts, and hvdtrain.launch, on one and two hosts."""

import hashlib
import os
import pathlib
import re
import sys

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
    [
        "workers",
        pytest.param("launch", marks=pytest.mark.long),
    ],
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


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")
@pytest.mark.parametrize(
    "kind", ["chief", "workers", "torch", "vertex", "sagemaker", "kubernetes"]
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
