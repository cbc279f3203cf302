"""Runs real programs under real launchers, and leaves no process behind."""

import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import uuid

import psutil
import pytest

ROOT = pathlib.Path(__file__).parents[2]
WITHOUT_MATPLOTLIB = ROOT / "tests" / "commands" / "without"
FORKING = ROOT / "tests" / "commands" / "forking"
MNIST = [sys.executable, "-m", "hvdtrain.mnist"]
# Long, since machines that test are busy; nothing is expected to come near.
TIMEOUT_SECONDS = 240
_MARK = "HVDTRAIN_TEST_RUN"
# Calls a program as `hvdtrain.run` calls a function: NUMBER_OF_RANKS PYTHON SCRIPT ...
_RUN = """
import runpy, sys
import hvdtrain
def script(words):
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
hvdtrain.run(script, args=[sys.argv[3:]], np=int(sys.argv[1]))
"""
_LAUNCHERS = {
    "alone": lambda ranks: [],
    "gloo": lambda ranks: ["horovodrun", "--gloo", "-np", str(ranks)],
    # On two hosts: two names of this one.
    "hosts": lambda ranks: [
        *("horovodrun", "--gloo", "-np", str(ranks)),
        *("-H", f"localhost:{ranks // 2},127.0.0.1:{ranks // 2}"),
    ],
    "mpi": lambda ranks: ["horovodrun", "--mpi", "-np", str(ranks)],
    "mpirun": lambda ranks: ["mpirun", "-np", str(ranks)],
    "run": lambda ranks: [sys.executable, "-c", _RUN, str(ranks)],
}
# mpirun tags each piece that it reads, also in the middle of a line.
_TAG = re.compile(r"\[(?:1,)?\d+\]<(?:stdout|stderr)>:")
# What launchers say about themselves.
_LAUNCHER_SPEECH = re.compile(
    r"^(Process \d+ exit|Process name|Exit code|Terminating remaining|Primary job|"
    r"a non-zero exit code|mpirun|the job to be terminated|  Process name|-{20,}|"
    r"  Exit code|horovodrun: |Terminated)"
)


@dataclasses.dataclass
class Job:
    """A program under a launcher; `server` is the parent of its forks, if any."""

    process: subprocess.Popen
    output: pathlib.Path
    mark: str
    server: psutil.Process | None

    def wait(self):
        """Wait for the launcher's end, then for the end of all ranks."""
        try:
            self.process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end after {TIMEOUT_SECONDS} s:\n{self.text}")
        # Not until each has been reaped, which may take seconds: a process that has
        # ended has no environment.
        deadline = time.monotonic() + 20
        while alive := self.processes():
            assert time.monotonic() < deadline, f"left behind: {alive}\n{self.text}"
            time.sleep(0.02)
        return self

    @property
    def returncode(self):
        return self.process.returncode

    @property
    def text(self):
        return self.output.read_text(errors="replace")

    @property
    def lines(self):
        """What the ranks wrote, without tags and without the launchers' speech."""
        lines = [_TAG.sub("", line).rstrip() for line in self.text.splitlines()]
        return [line for line in lines if line and not _LAUNCHER_SPEECH.match(line)]

    def processes(self):
        """The processes of this job that are alive."""
        marked = [p for p in psutil.process_iter() if _mark_of(p) == self.mark]
        # A fork has the environment of its server in /proc.
        forks = []
        with contextlib.suppress(psutil.NoSuchProcess):
            forks = self.server.children(recursive=True) if self.server else []
        return marked + [p for p in forks if _is_alive(p)]

    def ranks(self):
        """The processes of the ranks, by rank."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                environ, words = process.environ(), process.cmdline()
                rank = environ.get("HOROVOD_RANK", environ.get("OMPI_COMM_WORLD_RANK"))
                # -I: the guard of a rank.
                is_rank = words[:1] == [sys.executable] and words[1:2] != ["-I"]
                if rank is not None and is_rank:
                    found[int(rank)] = process
        return found

    def wait_for(self, text):
        """Wait until `text` is in the output."""
        self.wait_until(lambda: text in self.text, text)

    def wait_for_import(self, library):
        """Wait until this process has files of `library` open or mapped."""
        maps = pathlib.Path(f"/proc/{self.process.pid}/maps")
        self.wait_until(lambda: f"/{library}/" in maps.read_text(), library)

    def wait_until(self, is_true, name):
        """Wait until `is_true()`; fail with `name` if the launcher ends before."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not is_true():
            assert self.process.poll() is None, f"ended early:\n{self.text}"
            assert time.monotonic() < deadline, f"{name} did not come:\n{self.text}"
            time.sleep(0.02)

    def kill(self):
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(TIMEOUT_SECONDS)
        if self.server:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.server.kill()


def _is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _mark_of(process):
    try:
        return process.environ().get(_MARK)
    except psutil.Error:
        return None


@pytest.fixture(scope="session")
def fork_server():
    """Return a function that starts the server of a job's forks on a socket."""
    process = subprocess.Popen(
        [sys.executable, str(FORKING / "server.py")],
        # The level that `program.run` sets before it imports TensorFlow.
        env=_environment("") | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def serve(name):
        print(name, file=process.stdin, flush=True)
        return psutil.Process(int(process.stdout.readline()))

    yield serve
    process.kill()
    process.communicate()


@pytest.fixture
def start(tmp_path, request):
    """Return `start(arguments, ...)`: starts a `Job` that is killed in the end.

    With `forked`, its programs in Python are forks of a process that has imported
    TensorFlow: for a job that a test only waits for.
    """
    jobs = []

    def start(
        arguments,
        *,
        launcher="alone",
        ranks=2,
        program=MNIST,
        environment=(),
        forked=False,
    ):
        mark = uuid.uuid4().hex
        output = pathlib.Path(tempfile.mkstemp(dir=tmp_path, suffix=".log")[1])
        environment = _environment(mark) | dict(environment)
        server = None
        if forked:
            server = request.getfixturevalue("fork_server")(mark)
            environment["HVDTRAIN_TEST_SERVER"] = mark
            environment["PYTHONPATH"] += f"{os.pathsep}{FORKING}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*_LAUNCHERS[launcher](ranks), *program, *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        jobs.append(Job(process, output, mark, server))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture
def run(start):
    """Return `run(arguments, ...)`: `start`, and wait for the end."""

    def run(arguments, *, forked=True, **options):
        return start(arguments, forked=forked, **options).wait()

    return run


def _environment(mark):
    """The environment of a user who has set nothing of ours."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HOROVOD_", "OMPI_", "PMI", "SLURM_", "TF_"))
    }
    return kept | {
        _MARK: mark,
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{WITHOUT_MATPLOTLIB}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        # Another process of pytest runs its jobs on the same cores.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
