"""Each fault of a rank ends the job in bounded time, with its first cause.

The rank has started programs, and nothing of it is left: `Job.wait` looks for them. All
faults, on either rank, in each phase, under each launcher, are 90 launches. The long
tests run a few of them; HVDTRAIN_FAULT_TABLE=FILE runs all, and writes the table of
docs/preemption.md to FILE.
"""

import itertools
import json
import os
import pathlib
import re
import socket
import sys
import time

import psutil
import pytest

from hvdtrain.checkpoint.storage import CheckpointFiles

PROGRAM = [sys.executable, str(pathlib.Path(__file__).parent / "faulty_program.py")]
FAULTS = ("raise", "kill", "exit", "stop", "hang")
PHASES = ("step", "save", "evaluate")
FAULT_STEP = 25
STALL_SECONDS = 10
LAUNCHERS = ("gloo", "mpi", "mpirun")
# A killed rank is also in test_{bad_input,run}.py.
FEW = [
    ("hang", 1, "step", "mpirun"),
    ("kill", 1, "step", "hosts"),
    *(
        pytest.param(*case, marks=pytest.mark.release)
        for case in (
            ("kill", 0, "step", "mpi"),
            ("stop", 0, "save", "mpirun"),
            ("hang", 0, "step", "hosts"),
            ("kill", 0, "step", "mpirun"),
            ("raise", 1, "step", "gloo"),
            ("exit", 0, "step", "gloo"),
        )
    ),
]
TABLE = os.environ.get("HVDTRAIN_FAULT_TABLE")
ALL = list(itertools.product(FAULTS, (0, 1), PHASES, LAUNCHERS))
# The second one of the launcher "hosts".
HOST = rf"({re.escape(socket.gethostname())}|127\.0\.0\.1)"
# What names the rank, in the output.
CAUSES = {
    "raise": r"KeyError: 'a bug on purpose'",
    "kill": "",
    "exit": rf"rank {{rank}} on {HOST} (has ended with exit code 3|.*called os\._exit)",
    "stop": rf"rank {{rank}} on {HOST}: was stopped, as by SIGSTOP, for 5 s, and is k",
    "hang": r"Missing ranks:\s+{rank}\b",
}
# Of horovodrun and mpirun.
KILLED = rf"rank {{rank}} (with PID \d+ )?on (node )?{HOST}\W.*(SIGKILL|signal 9)"


@pytest.mark.long
@pytest.mark.parametrize(("fault", "rank", "phase", "launcher"), ALL if TABLE else FEW)
def test_a_fault_of_one_rank_ends_the_job(
    start, tmp_path, fault, rank, phase, launcher
):
    job = start(
        [
            *(f"--fault={fault}", f"--phase={phase}", f"--on_rank={rank}"),
            f"--step={FAULT_STEP}",
            f"--model_dir={tmp_path / 'run'}",
        ],
        program=PROGRAM,
        launcher=launcher,
        environment={
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(STALL_SECONDS),
            # Of a rank that ends by itself, nothing may be reported until it has ended.
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "3" if fault == "hang" else "6",
        },
    )
    job.wait()
    seconds = time.time() - float(re.search(r"fault at ([\d.]+)", job.text)[1])
    assert job.returncode not in (0, 75), job.text
    assert re.search(CAUSES[fault].format(rank=rank), "\n".join(job.lines)), job.text
    if fault == "raise":
        assert job.lines[-1] == CAUSES[fault], job.text
        assert job.text.count("Traceback (most recent") == 1, job.text
        report = json.loads((tmp_path / f"run/errors/rank-{rank}.json").read_text())
        assert report["error"] == CAUSES[fault]
    elif fault in ("kill", "stop"):
        # mpirun's last line is a ruler.
        end = "\n".join(job.text.splitlines()[-2:])
        assert re.search(KILLED.format(rank=rank), end), job.text
    if fault != "hang":
        assert not re.search("Another rank|Stopped by", job.text), job.text
    # The launcher needs some seconds after the limit.
    assert seconds < STALL_SECONDS + 30
    files = CheckpointFiles(tmp_path / "run" / "checkpoints")
    checkpoint = files.read(files.steps()[0])
    lost = FAULT_STEP - checkpoint.step
    assert 0 <= lost <= FAULT_STEP
    if TABLE:
        cells = fault, rank, phase, launcher, f"{seconds:.1f}", job.returncode, lost
        with open(TABLE, "a") as file:
            file.write(f"| {' | '.join(map(str, cells))} | {last_line(job)} |\n")


def last_line(job):
    """The last line of a rank."""
    spoken = [line for line in job.lines if "Traceback" not in line]
    return spoken[-1][:150]


def test_horovodrun_leaves_a_program_that_its_shell_has_started(run):
    # Without the mark by which `Job.wait` looks for what is left.
    program = "env -u HVDTRAIN_TEST_RUN sleep 3600 & echo $!"
    script = f"{program}; exec horovodrun --mpi -np 1 true"
    job = run([], program=["sh", "-c", script])
    kept = psutil.Process(int(job.lines[0]))
    try:
        assert job.returncode == 0, job.text
        assert kept.status() == psutil.STATUS_SLEEPING
    finally:
        kept.kill()
