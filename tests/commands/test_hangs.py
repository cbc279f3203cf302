"""A job that hangs, or loses a rank in native code, names the rank and its line.

All faults under each launcher are 33 launches. By default a few of them run;
HVDTRAIN_HANG_TABLE=FILE runs all, and writes the table of docs/troubleshooting.md.
"""

import itertools
import os
import pathlib
import re
import socket
import sys
import time

import pytest

PATH = pathlib.Path(__file__).parent / "hanging_program.py"
PROGRAM = [sys.executable, str(PATH)]
LAUNCHERS = ("gloo", "mpi", "mpirun")
CHECK_SECONDS, SHUTDOWN_SECONDS = 3, 12
HOST = socket.gethostname()
TABLE = os.environ.get("HVDTRAIN_HANG_TABLE")
# The phase that is named, before the line. `fit` of a script of the user's shows it.
FAULTS = {
    "input": "its input, ",
    "callback": "a callback, ",
    "py_function": "",
    "gil": "a callback, ",
    "regex": "a callback, ",
    "lock": "a callback, ",
    "stop": "",
    "order": "",
    "skip": "",
    "segfault": "",
    "memory": "",
}
ALL = list(itertools.product(FAULTS, LAUNCHERS))
FEW = [("py_function", "gloo"), ("gil", "mpirun"), ("order", "mpi"), ("stop", "gloo")]


def line(marker):
    """Return "file:line in " of the line of the program that ends in the marker."""
    lines = PATH.read_text().splitlines()
    [number] = [n for n, text in enumerate(lines, 1) if text.endswith(f"  # {marker}")]
    return f"{PATH.name}:{number} in "


def expected(fault):
    """Return what the job prints, as a regular expression."""
    rank = f"rank 1 on {re.escape(HOST)} "
    if fault == "stop":
        return rf"{rank}did not enter allreduce.*is stopped, as by SIGSTOP; the other"
    if fault == "order":
        return (
            rf"Deadlock: .*rank 0 in allreduce 1 \(first\), {line('order of rank 0')}.*; "
            rf"rank 1 in allreduce 1 \(second\), {line('order of rank 1')}"
        )
    if fault == "skip":
        return (
            rf"Deadlock: .*rank 0 in allreduce 2 \(second\), "
            rf"{line('skipped by rank 1')}.*; "
            rf"rank 1 in allreduce 2 \(third\), {line('after the skip')}"
        )
    if fault == "segfault":
        return rf"{rank}died in native code: Segmentation.*{line('segfault')}die_in"
    if fault == "memory":
        return rf"{rank}was killed by the out-of-memory killer \(.+\)"
    where = f"{FAULTS[fault]}{line(fault)}"
    return (
        rf"{rank}did not enter allreduce .* for \d+ s. It is in {where}.*; the other "
        rf"rank waits for it, {line('fit')}train"
    )


@pytest.mark.parametrize(("fault", "launcher"), ALL if TABLE else FEW)
def test_a_hang_names_its_rank_and_line(start, memory_group, fault, launcher):
    job = start(
        [fault, *([str(memory_group)] if fault == "memory" else [])],
        program=PROGRAM,
        launcher=launcher,
        environment={
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(CHECK_SECONDS),
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(SHUTDOWN_SECONDS),
            # In shared memory a difference of names is an error at once.
            **({"HVDTRAIN_REDUCTION": "horovod"} if fault in ("order", "skip") else {}),
        },
    )
    job.wait_for("fault of rank 1")
    begin = time.monotonic()
    while not re.search(expected(fault), "\n".join(job.lines)):
        assert job.process.poll() is None or job.wait(), job.text
        assert time.monotonic() - begin < 60, job.text
        time.sleep(0.1)
    seconds = time.monotonic() - begin
    job.wait()
    assert job.returncode != 0
    if TABLE:
        note(fault, launcher, seconds, job)


def note(fault, launcher, seconds, job):
    shown = next(text for text in job.lines if re.search(expected(fault), text))
    with pathlib.Path(TABLE).open("a") as file:
        file.write(f"| {fault} | {launcher} | {seconds:.1f} s | {shown} |\n")


@pytest.fixture
def memory_group(tmp_path):
    """Return a control group with a limit of memory, or None where none can be made."""
    for root, limit in (
        ("/sys/fs/cgroup", "memory.max"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    ):
        group = pathlib.Path(root, f"hvdtrain-{tmp_path.name}-{os.getpid()}")
        if not pathlib.Path(root, "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
            (group / limit).write_text(str(1 << 30))
        except OSError:
            continue
        yield group
        group.rmdir()
        return
    yield None
