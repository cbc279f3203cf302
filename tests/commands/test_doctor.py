"""The doctor on a machine that works, and on what was broken on purpose."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import sysconfig

import horovod
import pytest

import hvdtrain

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_SECONDS = 600


def examine(*arguments, **environment):
    """Run the doctor; return its exit code, the findings by topic, and stderr."""
    command = [sys.executable, "-m", "hvdtrain.doctor", "--json", *arguments]
    bin_directory = pathlib.Path(sys.executable).parent
    defaults = {
        "PATH": f"{bin_directory}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        command,
        env={**os.environ, **defaults, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.stdout, done.stderr
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, {f["topic"]: f for f in findings}, done.stderr


def broken(findings):
    return {topic for topic, f in findings.items() if f["status"] == "broken"}


# CI calls it here and in bare Debians: what is broken is found by the next test.
@pytest.mark.long
def test_a_machine_that_works():
    code, findings, _ = examine()
    assert broken(findings) == set()
    assert code == 0
    for controller in ("MPI", "Gloo"):
        assert "the sum is right" in findings[f"2 ranks, {controller}"]["detail"]
    assert "with MPI, Gloo" in findings["Horovod"]["detail"]
    assert findings["horovodrun"]["detail"].endswith("takes MPI without --gloo")


@pytest.mark.release
def test_several_faults_at_once(tmp_path):
    """A Horovod that does not load, no room for files, a wrong interface, no hosts."""
    (tmp_path / "horovod").mkdir()
    undefined = "raise ImportError('mpi_lib.so: undefined symbol: _ZN10tensorflow')"
    (tmp_path / "horovod" / "__init__.py").write_text(undefined)
    (tmp_path / "horovod" / "tensorflow").mkdir()
    library = f"mpi_lib{sysconfig.get_config_var('EXT_SUFFIX')}"
    (tmp_path / "horovod" / "tensorflow" / library).touch()
    with socket.socket() as closed:
        # Bound and not listening: connections are refused, and no process can bind it.
        closed.bind(("127.0.0.1", 0))
        code, findings, errors = examine(
            "--hosts=localhost,no-such-host.invalid",
            f"--ssh_port={closed.getsockname()[1]}",
            PYTHONPATH=f"{tmp_path}:{ROOT}",
            TMPDIR=str(tmp_path / "missing"),
            HOROVOD_GLOO_IFACE="nope0",
        )
    topics = {"Horovod", str(tmp_path / "missing"), "network"}
    topics |= {"host localhost", "host no-such-host.invalid"}
    if not shutil.which("ssh"):
        topics = topics - {"host localhost", "host no-such-host.invalid"} | {"ssh"}
    assert broken(findings) == topics
    assert code == 1
    assert "undefined symbol" in findings["Horovod"]["detail"]
    assert findings["Horovod"]["remedy"].endswith("hvdtrain.install --replace")
    assert all(findings[topic]["remedy"] for topic in topics)
    assert errors.strip().splitlines()[-1].startswith(f"{len(topics)} broken: ")


@pytest.mark.release
def test_a_second_horovod_and_no_mpirun(tmp_path):
    bin_directory = pathlib.Path(sys.executable).parent
    for name in ("horovodrun", "python", "python3"):
        (tmp_path / name).symlink_to(bin_directory / name)
    other = tmp_path / "packages" / "horovod"
    other.mkdir(parents=True)
    for path in pathlib.Path(horovod.__file__).parent.iterdir():
        (other / path.name).symlink_to(path)
    code, findings, _ = examine(
        PATH=f"{tmp_path}:/usr/bin:/bin", PYTHONPATH=f"{other.parent}:{ROOT}"
    )
    assert broken(findings) == set()
    assert code == 0
    assert f"in {other}, which is used, " in findings["two Horovods"]["detail"]
    assert f"in {other}, built for " in findings["Horovod"]["detail"]
    if not shutil.which("mpirun", path="/usr/bin:/bin"):
        assert findings["mpirun"]["status"] == "warning"
        assert "Gloo" in findings["mpirun"]["remedy"]
        assert "2 ranks, MPI" not in findings
    assert findings["2 ranks, Gloo"]["status"] == "fine"


def test_a_launcher_around_the_doctor_is_refused(run):
    job = run([], launcher="mpirun", program=[sys.executable, "-m", "hvdtrain.doctor"])
    assert job.returncode != 0
    assert "it starts two ranks of its own" in job.text


def test_the_version_is_all_it_prints():
    command = [sys.executable, "-m", "hvdtrain.doctor", "--version"]
    output = subprocess.check_output(command, cwd=ROOT, text=True, timeout=60)
    assert output == f"{hvdtrain.__version__}\n"
