"""A job that hangs, or loses a rank, names the rank and its line, and ends.

All faults under each launcher are 250 launches. The long tests run a few of them;
HVDTRAIN_HANG_TABLE=FILE runs all, and writes the tables of docs/troubleshooting.md.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import sys
import time
from collections import Counter

import pytest

pytestmark = pytest.mark.long

PATH = pathlib.Path(__file__).parent / "hanging_program.py"
PROGRAM = [sys.executable, str(PATH)]
LAUNCHERS = ("gloo", "mpi", "mpirun")
CHECK_SECONDS, SHUTDOWN_SECONDS = 3, 12
LIMIT_SECONDS = 60
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
    "left": "",
    "segfault": "",
    "memory": "",
}
ALL = list(itertools.product(FAULTS, LAUNCHERS))
FEW = [
    ("py_function", "gloo"),
    *(
        pytest.param(*case, marks=pytest.mark.release)
        for case in (
            ("gil", "mpirun"),
            ("order", "mpi"),
            ("stop", "gloo"),
            ("lock", "hosts"),
        )
    ),
]


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
            rf"Deadlock: .*rank 0 in allreduce \d+ \(first\), "
            rf"{line('order of rank 0')}.*; "
            rf"rank 1 in allreduce \d+ \(second\), {line('order of rank 1')}"
        )
    if fault == "skip":
        return (
            rf"Deadlock: .*rank 0 in allreduce \d+ \(second\), "
            rf"{line('skipped by rank 1')}.*; "
            rf"rank 1 in allreduce \d+ \(third\), {line('after the skip')}"
        )
    if fault == "left":
        return (
            rf"{rank}did not enter allreduce .* It is in {line('after the fit')}.* "
            r"rank 1 has already ended its fit\..*hvd\.callbacks\.StopTogetherCallback"
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
    if fault == "memory" and not memory_group:
        pytest.skip("needs a control group of its own, as root has")
    job = start(
        [fault, *(["step", str(memory_group)] if fault == "memory" else [])],
        program=PROGRAM,
        launcher=launcher,
        environment={
            "HOROVOD_STALL_CHECK_TIME_SECONDS": str(CHECK_SECONDS),
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(SHUTDOWN_SECONDS),
            "HVDTRAIN_DEADLOCK_SECONDS": "6",
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
        note(fault, launcher, seconds, job, expected(fault))


def note(fault, launcher, seconds, job, pattern):
    lines = [*job.lines, *job.text.splitlines()]
    shown = next(text for text in lines if re.search(pattern, text))
    with pathlib.Path(TABLE).open("a") as file:
        file.write(f"| {fault} | {launcher} | {seconds:.1f} s | {shown} |\n")


LIMITS = {
    "HOROVOD_STALL_CHECK_TIME_SECONDS": str(CHECK_SECONDS),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(SHUTDOWN_SECONDS),
    "HVDTRAIN_DEADLOCK_SECONDS": "10",
    "HVDTRAIN_INIT_TIMEOUT_SECONDS": "10",
}
ENDS = (
    *("kill", "segfault", "stop", "raise", "thread", "exit_thread", "child", "exit"),
    *("return", "terminate", "exec", "callback", "gil", "regex", "lock"),
)
WORKS_OR_RETURNS = ("return", "exit_thread", "callback", "gil", "regex", "lock")
ALL_ENDS = [
    (fault, phase, launcher)
    for fault in ENDS
    for phase in ("init", "first", "step", "end")
    for launcher in (*LAUNCHERS, "hosts", "run")
    # At the end the other rank needs none that works or returns.
    if phase != "end" or fault not in WORKS_OR_RETURNS
    # Before `hvd.init` a rank has no guard, which would end what it has started.
    if (fault, phase) != ("child", "init")
]
FEW_ENDS = [
    ("exec", "step", "gloo"),
    ("return", "step", "hosts"),
    *(
        pytest.param(*case, marks=pytest.mark.release)
        for case in (
            ("stop", "init", "mpirun"),
            ("exec", "end", "mpirun"),
            ("thread", "first", "gloo"),
            ("exit_thread", "step", "mpi"),
            ("gil", "first", "mpi"),
            ("child", "step", "mpirun"),
        )
    ),
]
# In a line of a guard, of a rank, or of a launcher.
NAMED = (
    r"[Rr]ank 1 (on|is|with|has|did)\b|Missing ranks:\s+1\b|KeyError: 'on purpose'|"
    r"Process name: \[\[\d+,1\],1\]"
)


@pytest.mark.parametrize(
    ("fault", "phase", "launcher"), ALL_ENDS if TABLE else FEW_ENDS
)
def test_a_fault_ends_the_job(start, fault, phase, launcher):
    # Of earlier jobs, in which no process was left to remove them: a number of a
    # process is used again.
    before = set(rings("*"))
    job = start([fault, phase], program=PROGRAM, launcher=launcher, environment=LIMITS)
    job.wait()
    begin = float(re.search(r"fault of rank 1 at ([\d.]+)", job.text)[1])
    seconds = time.time() - begin
    assert job.returncode != 0, job.text
    assert re.search(NAMED, job.text), job.text
    assert seconds < LIMIT_SECONDS, job.text
    processes = re.findall(r"this is process (\d+)", job.text)
    # A fault before `hvd.init` may end the job before the other rank prints its own.
    assert len(processes) == 2 or (processes and phase == "init")
    until(
        lambda: not any(set(rings(process)) - before for process in processes),
        LIMIT_SECONDS,
    )
    if TABLE:
        note(f"{fault}, {phase}", launcher, seconds, job, NAMED)


def rings(process):
    """Return the files of a rank's records."""
    return list(pathlib.Path("/dev/shm").glob(f"hvdtrain-*-{process}.ring"))


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# The cause that is named for each reason, and the share of the time from which on.
CAUSES = {"sleep": "callbacks", "input": "input", "throttling": "throttling"}
SLOW = list(itertools.product(CAUSES, LAUNCHERS))


# Beside other tests, a rank also waits for its core: the report names stolen time.
@pytest.mark.alone
@pytest.mark.parametrize(
    ("reason", "launcher"), SLOW if TABLE else [("throttling", "gloo")]
)
def test_a_slow_rank_is_named_with_its_cause(
    start, tmp_path, cpu_group, reason, launcher
):
    if reason == "throttling" and not cpu_group:
        pytest.skip("needs a control group of its own, as root has")
    job = start(
        [f"--reason={reason}", f"--model_dir={tmp_path}", f"--group={cpu_group}"],
        program=[sys.executable, str(PATH.with_name("slow_program.py"))],
        launcher=launcher,
    ).wait()
    assert job.returncode == 0, job.text
    lines = [json.loads(text) for text in (tmp_path / "log.jsonl").open()]
    found = [line["straggler"] for line in lines if line.get("straggler")]
    # A report may see another cause, where other processes use the machine.
    delay_by_cause = Counter()
    for straggler in found:
        delay_by_cause[straggler["rank"], straggler["cause"]] += straggler["delay"]
    [(worst, delay)] = delay_by_cause.most_common(1)
    assert worst == (1, CAUSES[reason]), found
    assert delay > 0.1
    if TABLE:
        with pathlib.Path(TABLE).open("a") as file:
            file.write(f"| {reason} | {launcher} | {worst} | {delay:.2f} |\n")


# SIGQUIT and the answers of all ranks: tests/unit/test_guard.py.
@pytest.mark.release
def test_a_person_asks_where_the_ranks_are(start, run, tmp_path):
    model_dir = tmp_path / "run"
    job = start(
        [
            "--model=mlp",
            "--epochs=1000",
            "--dataset=synthetic",
            f"--model_dir={model_dir}",
        ],
        launcher="gloo",
    )
    job.wait_for("samples/s")
    job.process.send_signal(signal.SIGQUIT)
    job.wait_for(f"Stacks of all ranks: {model_dir}/errors/stacks-step-")
    [stacks] = (model_dir / "errors").glob("stacks-step-*.txt")
    assert re.findall(
        r"^rank (\d) on .*, process \d+: is in ", stacks.read_text(), re.M
    )
    doctor = [sys.executable, "-m", "hvdtrain.doctor", f"--job={model_dir}"]
    asked = run([], program=doctor)
    assert asked.returncode == 0
    assert re.search(r"rank 0 on .*, process \d+: is in .*\n.*Thread 0x", asked.text)
    ranks = job.ranks()
    ranks[1].kill()
    job.wait()
    killed = rf"rank 1 on {HOST} was killed by (a signal such as )?SIGKILL"
    assert re.search(killed, job.text)
    asked = run([], program=doctor)
    assert re.search(killed, asked.text)
    assert "The records of all ranks agree" in asked.text or "differ" in asked.text


def control_group(tmp_path, controller, limits):
    """Yield a new control group, or None where none can be made."""
    roots = [pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/sys/fs/cgroup", controller)]
    for root, files in zip(roots, limits, strict=True):
        group = root / f"hvdtrain-{tmp_path.name}-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if all((group / name).exists() for name in files):
                for name, text in files.items():
                    (group / name).write_text(text)
                yield group
                return
        except OSError:
            continue
        finally:
            # Processes of a test that has failed are killed later.
            with contextlib.suppress(OSError):
                group.rmdir()
    yield None


@pytest.fixture
def memory_group(tmp_path):
    limit = str(1 << 30)
    limits = ({"memory.max": limit}, {"memory.limit_in_bytes": limit})
    yield from control_group(tmp_path, "memory", limits)


@pytest.fixture
def cpu_group(tmp_path):
    # A fifth of a core.
    limits = (
        {"cpu.max": "20000 100000"},
        {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "20000"},
    )
    yield from control_group(tmp_path, "cpu", limits)
