"""`hvdtrain.run`: what needs no engine, and Slurm with stubs of its commands."""

import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time

import cloudpickle
import psutil
import pytest

import hvdtrain
from hvdtrain.flight import member
from hvdtrain.flight.limits import Limits
from hvdtrain.runner import agent, channel, results, slurm
from hvdtrain.runner.channel import Address, Outcome

ADDRESS = Address(("127.0.0.1",), 1, b"key")
# sbatch notes the job, with its script; squeue lists the jobs of the user.
STUBS = {
    "sbatch": 'echo "7 $1" >queue; echo Submitted batch job 7',
    "squeue": 'case "$*" in *--me*) cat queue 2>/dev/null;; esac',
    "scancel": 'echo "$@" >>cancelled',
    "srun": "",
}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"function": "train"}, "function='train'; expected a function"),
        ({"args": "ab"}, "args='ab'; expected a list of arguments"),
        ({"args": 3}, "args=3; expected a list of arguments"),
        ({"kwargs": [1]}, r"kwargs=\[1\]; expected a dictionary"),
        ({"np": "2"}, "np='2'; expected a number of ranks"),
        ({"np": 2.0}, r"np=2\.0; expected a number of ranks"),
        ({"np": 0}, "np=0 and max_restarts=0; expected 1 rank or more"),
        ({"max_restarts": -1}, "np=1 and max_restarts=-1; expected .* 0 restarts"),
        ({"max_restarts": None}, "max_restarts=None; expected a number"),
        ({"on": "ray"}, "on='ray'; expected an engine, such as"),
        ({"on": slurm.Slurm}, "on=<class 'hvdtrain.runner.slurm.Slurm'>; expected an"),
    ],
)
def test_wrong_arguments_are_refused_by_the_caller(options, error):
    with pytest.raises((TypeError, ValueError), match=f"^Received {error}"):
        hvdtrain.run(**{"function": print, "np": 1} | options)


@pytest.mark.parametrize(
    ("engine", "module", "package"),
    [
        ("Ray", "ray", "ray"),
        ("Spark", "spark", "pyspark"),
        ("Slurm", "slurm", "submitit"),
    ],
)
def test_an_engine_without_its_package_names_the_remedy(
    monkeypatch, engine, module, package
):
    monkeypatch.delitem(sys.modules, f"hvdtrain.runner.{module}", raising=False)
    # An import of it raises ModuleNotFoundError.
    monkeypatch.setitem(sys.modules, package, None)
    error = f"^hvdtrain.{engine} needs {package}: pip install {package}$"
    with pytest.raises(ModuleNotFoundError, match=error):
        getattr(hvdtrain, engine)


def messages_of(function):
    """What an agent sends of a rank that calls a function."""
    payload = cloudpickle.dumps((function, (), {}))
    start = channel.StartRanks(payload, (), {0: {"HOROVOD_RANK": "0"}})
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        agent._run_ranks(theirs, start)
        messages = [ours.recv()]
        while not isinstance(messages[-1], channel.Ended):
            messages.append(ours.recv())
    return messages


def test_the_agent_sends_why_the_guard_has_ended_a_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def wait():
        limits = Limits(deadlock_seconds=1.0)
        member.join(0, 2, job="job", limits=limits)
        membership = member._Present.membership
        # As the guard of another rank, which waits for this one.
        assert membership.directories[0].request_end(membership.task.member, "Why.")
        time.sleep(3600)

    ended = messages_of(wait)[-1]
    assert (ended.exit_code, ended.reason) == (-9, "Why.")


def test_a_thread_that_does_not_end_is_killed_with_a_line(monkeypatch):
    monkeypatch.setattr(agent, "_EXIT_SECONDS", 0.5)

    def start_thread():
        print("a line without an end", end="", file=sys.stderr, flush=True)
        threading.Thread(target=time.sleep, args=[3600]).start()

    messages = messages_of(start_thread)
    assert messages[-1].exit_code == -9
    text = "".join(message.text for message in messages[:-1])
    assert text == (
        "a line without an end\n"
        "hvdtrain.run: the process is killed 0.5 s after its function has returned: "
        "a thread that is not a daemon still runs.\n"
    )


def test_a_job_that_a_rank_has_submitted_lives(tmp_path):
    environment = {
        "HOROVOD_RANK": "0",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": str(tmp_path),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "1",
    }

    def leave_program():
        program = "trap ': >ended; exit' TERM; : >ready; while :; do :; done"
        subprocess.Popen(["sh", "-c", program], cwd=tmp_path, start_new_session=True)
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)

    payload = cloudpickle.dumps((leave_program, (), {}))
    ours, theirs = multiprocessing.Pipe()
    # The batch system has no variables of the rank, and its child has.
    script = 'env "$@" sleep 3600 & echo $!; wait'
    words = (f"{name}={value}" for name, value in environment.items())
    batch = subprocess.Popen(["sh", "-c", script, "sh", *words], stdout=subprocess.PIPE)
    with ours, theirs, batch:
        submitted = psutil.Process(int(batch.stdout.readline()))
        try:
            agent._run_ranks(theirs, channel.StartRanks(payload, (), {0: environment}))
            assert (tmp_path / "ended").exists()
            assert submitted.is_running()
            assert submitted.status() != psutil.STATUS_ZOMBIE
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                submitted.kill()


LATE = "rank 1 on h did not enter allreduce 5 (gradients) for 60 s."
FAILED = Outcome(
    summary="UnknownError: shut down", traceback="Traceback", is_consequence=True
)
RETURNED = Outcome(value=cloudpickle.dumps(None))


@pytest.mark.parametrize(
    ("ends", "kind", "error"),
    [
        (
            [(0, 1, dataclasses.replace(FAILED, conclusion=LATE, late_ranks=(1,)))],
            hvdtrain.RankError,
            "rank 0 on h: UnknownError: shut down\n\nrank 1 on h did not call a "
            f"collective that other ranks waited in.\n\n{LATE}",
        ),
        (
            [(1, 0, RETURNED), (0, 1, FAILED)],
            hvdtrain.RankError,
            "rank 0 on h: UnknownError: shut down\n\nrank 1 on h has returned, and "
            "other ranks waited for it in a collective.",
        ),
        (
            [(0, 1, FAILED), (1, -signal.SIGTERM, None)],
            hvdtrain.LostRankError,
            "rank 1 on h was killed by SIGTERM",
        ),
        (
            [(1, -40, None)],
            hvdtrain.LostRankError,
            "rank 1 on h was killed by signal 40",
        ),
        (
            [(0, 1, FAILED), (1, -signal.SIGKILL, LATE)],
            hvdtrain.RankError,
            f"rank 1 on h: ended by its guard. {LATE}",
        ),
        (
            [(0, 1, FAILED)],
            hvdtrain.RankError,
            "rank 0 on h: UnknownError: shut down\n\n"
            "rank 1 on h ran on 0.1 s after a collective had failed.",
        ),
    ],
    ids=["hangs", "returns", "killed", "real_time", "guard", "unknown"],
)
def test_the_error_names_the_rank_that_is_the_cause(monkeypatch, ends, kind, error):
    monkeypatch.setattr(results, "_CAUSE_SECONDS", 0.1)
    ours, theirs = multiprocessing.Pipe()
    hello = channel.Hello("hash", "h", 2, {})
    with ours, theirs:
        for rank, code, outcome in ends:
            is_guards = isinstance(outcome, str)
            pickled = b"" if is_guards or not outcome else pickle.dumps(outcome)
            reason = outcome if is_guards else ""
            theirs.send(channel.Ended(rank, code, pickled, reason))
        agent = results.Agent(ours, hello, ranks=(0, 1))
        job = results.RunningJob([agent], results.Work())
        with pytest.raises(kind) as info:
            job.results()
    assert (info.type, info.value.rank, str(info.value)) == (kind, 1, error)
    # In a notebook: IPython would print 50 lines.
    assert info.value._render_traceback_() == [f"{kind.__name__}: {error}"]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("  File\nValueError: mine\n\n", " with exit code 3: ValueError: mine"),
        ("", " with exit code 3"),
    ],
)
def test_the_error_of_a_program_has_its_last_line(capsys, text, end):
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        theirs.send(channel.Output(0, 2, text))
        theirs.send(channel.Output(0, 1, "epoch 1\n"))
        theirs.send(channel.Ended(0, 3, b""))
        agent = results.Agent(ours, channel.Hello("hash", "h", 1, {}), ranks=(0,))
        job = results.RunningJob([agent], results.Work(command=("program",)))
        with pytest.raises(
            hvdtrain.LostRankError, match=f"rank 0 on h has ended{end}$"
        ):
            job.results()


def test_the_agent_ends_when_the_caller_has_ended_the_job():
    with contextlib.closing(channel.Listener(is_local=True)) as listener:
        serving = threading.Thread(target=agent.serve, args=[listener.address])
        serving.start()
        connection, _ = listener.accept(timeout_seconds=60)
        with connection:
            environment = {"HOROVOD_RANK": "0", "HVDTRAIN_SIZE": "1"}
            command = ("sh", "-c", "echo ready; exec sleep 3600")
            connection.send(channel.StartRanks(b"", command, {0: environment}))
            assert connection.recv().text == "ready\n"
            connection.send(None)
            # Before the caller closes the connection, which waits for the agent.
            serving.join(60)
            assert not serving.is_alive()


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Return `stub(name, text)`: replaces a command of Slurm by a script."""

    def stub(name, text):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}\n")
        path.chmod(0o755)

    (tmp_path / "bin").mkdir()
    for name, text in STUBS.items():
        stub(name, text)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    monkeypatch.setenv("HOME", str(tmp_path))
    # Where the folder would be if "~" were not expanded.
    monkeypatch.chdir(tmp_path / "bin")
    return stub


@pytest.fixture
def runs(tmp_path, stub):
    return tmp_path / "runs"


def cancelled(runs):
    file = runs.parent / "cancelled"
    return file.read_text().splitlines() if file.exists() else []


def place(**options):
    return hvdtrain.Slurm(folder="~/runs", **options).place(ADDRESS, 1)


def test_the_key_of_a_job_is_private_and_deleted_after_success(runs):
    with place():
        [folder] = runs.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        [pickled] = folder.glob("*.pkl")
        assert ADDRESS.key in pickled.read_bytes()
        assert not pathlib.Path("~").exists()
    assert not list(runs.iterdir())


def test_the_folder_is_kept_after_a_failure(runs):
    with pytest.raises(OSError, match="lost"), place():
        raise OSError("lost")
    assert len(list(runs.iterdir())) == 1
    assert cancelled(runs) == ["--quiet 7"]


@pytest.mark.parametrize(
    ("text", "options", "error"),
    [
        # To the caller, which has not read the number.
        ("kill -INT $PPID; exec sleep 2", {}, KeyboardInterrupt),
        # submitit calculates with it after sbatch.
        ("echo Submitted batch job 7", {"ntasks_per_node": "1"}, TypeError),
    ],
)
def test_a_job_of_an_interrupted_submission_is_cancelled(
    runs, stub, text, options, error
):
    stub("sbatch", f'echo "7 $1" >queue; echo "8 /other/script" >>queue\n{text}')
    with pytest.raises(error), place(job_name="mine", **options):
        pass
    assert cancelled(runs) == ["--quiet 7"]
    assert not list(runs.iterdir())


def test_a_rejected_job_leaves_nothing(runs, stub):
    stub("sbatch", "echo sbatch: error: Invalid partition >&2; exit 1")
    error = r"^Slurm did not accept the job: Invalid partition\.$"
    with pytest.raises(hvdtrain.RunError, match=error), place():
        pass
    assert cancelled(runs) == []
    assert not list(runs.iterdir())


def test_a_misspelt_parameter_is_one_line(runs):
    error = r"^.*Unavailable parameter.*\['partitoin'\].* in additional_parameters\.$"
    with pytest.raises(ValueError, match=error), place(partitoin="cpu"):
        pass
    assert not list(runs.iterdir())


def test_a_host_without_slurm_is_one_line(runs, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    error = r"^Received a PATH without sbatch, .*; expected .* login node\.$"
    with pytest.raises(hvdtrain.RunError, match=error), place():
        pass


@pytest.mark.parametrize("name", ["setup", "srun_args", "teardown"])
def test_a_list_of_slurm_is_no_string(name):
    error = f"Received {name}='text'; expected a list of strings."
    with pytest.raises(TypeError, match=error):
        hvdtrain.Slurm(**{name: "text"})


@pytest.mark.parametrize(
    "options",
    [
        {"cpus_per_task": 4},
        {"additional_parameters": {"cpus-per-task": 4}},
        {"additional_parameters": {"cpus_per_task": 4}},
    ],
)
def test_the_step_has_the_cores_of_the_job(runs, options):
    with place(**options):
        [script] = runs.glob("*/*_submission.sh")
        text = script.read_text()
    assert "#SBATCH --cpus-per-task=4\n" in text
    assert " --cpus-per-task=4 " in text
    assert "wckey" not in text


STEP = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***"
LIMIT = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["no such module", STEP, "srun: error: n1: task 0: Killed"], "no such module"),
        (["no such module", STEP.replace("slurmstepd:", "[1]")], "no such module"),
        ([LIMIT, STEP, "srun: Job step aborted"], LIMIT),
    ],
)
def test_the_cause_of_an_end_is_not_its_consequence(tmp_path, lines, cause):
    (tmp_path / "7_0_log.err").write_text("\n".join(lines))
    assert slurm._SlurmJob(tmp_path)._cause() == f"{cause}. Logs: {tmp_path}"
