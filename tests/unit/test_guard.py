"""The process beside a rank: what it prints, what it keeps, and that it ends."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

import psutil
import pytest

from hvdtrain.doctor import roll
from hvdtrain.flight import ring
from hvdtrain.flight.answer import Answer, Member, handles
from hvdtrain.flight.guard import Guard
from hvdtrain.flight.limits import Limits
from hvdtrain.flight.ring import Moment
from hvdtrain.flight.shared_directory import SharedDirectory
from hvdtrain.flight.slow_start import SlowStart
from hvdtrain.flight.step_durations import StepDurations
from hvdtrain.flight.task import Task
from hvdtrain.interruption import SIGNAL_FILE
from hvdtrain.job import JobError

ROOT = pathlib.Path(__file__).parents[2]
HOST = socket.gethostname()
LIMIT_SECONDS = 60
KILLED = "was killed by SIGKILL."
# Line 7 is the one that a stack shows.
SCRIPT = """\
import json, os, signal, sys, time
from hvdtrain.flight import limits, member

def load(seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        signal.sigtimedwait([], 1.0)

job, rank, size, seconds, ending = sys.argv[1:]
limits = limits.Limits(**json.loads(seconds))
member.join(int(rank), int(size), job=job, limits=limits)
member.record_fatal_errors()
print(member.ring_path(), flush=True)
if ending:
    sys.stdin.readline()
    exec(ending)
else:
    load()
"""


def until(condition):
    """Return what `condition` returns as soon as it is true."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, "the condition is still false"
        time.sleep(0.02)
    return result


def has_ended(pid):
    # Nobody may have reaped it.
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def launched(rank, job):
    """The variables of a rank of Open MPI."""
    return {"PMIX_NAMESPACE": job, "PMIX_RANK": str(rank)}


class Rank:
    """A process with a guard, in a job of its own in a temporary directory."""

    def __init__(self, folder, ending="", *, rank=0, size=1, **limits):
        script = folder / "script.py"
        script.write_text(SCRIPT)
        self.errors = folder / f"errors-{rank}"
        job = f"{folder.parent.name}-{folder.name}"
        seconds = {f"{name}_seconds": value for name, value in limits.items()}
        arguments = [job, str(rank), str(size), json.dumps(seconds), ending]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, script, *arguments],
                env=os.environ
                | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
                | launched(rank, job),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.ring = pathlib.Path(self.process.stdout.readline().strip())
        (self.guard,) = psutil.Process(self.process.pid).children()
        self.shared = SharedDirectory(folder / f"hvdtrain-{os.getuid()}-{job}")
        until(lambda: self.process.pid in {m.pid for m in self.shared.members()})

    def end(self):
        """Wait for both processes, and return what they have printed."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        # Before the rank is reaped: the guard reads its wait status.
        until(lambda: has_ended(self.guard.pid))
        self.process.communicate(timeout=LIMIT_SECONDS)
        return self.printed

    @property
    def printed(self):
        return self.errors.read_text()

    def close(self):
        # First: it takes a second to find out why the rank has ended.
        with contextlib.suppress(psutil.NoSuchProcess):
            self.guard.kill()
        self.process.kill()
        self.process.communicate()
        self.ring.unlink(missing_ok=True)


def has_namespaces():
    """Whether this process may make network namespaces, and has the tools for it."""
    tools = all(map(shutil.which, ("ip", "unshare")))
    command = ["unshare", "--net", "true"]
    return tools and subprocess.run(command, timeout=30, check=False).returncode == 0


@pytest.fixture
def start(tmp_path):
    """Starts ranks that have ended when the test has."""
    ranks = []

    def start(*args, **kwargs):
        ranks.append(Rank(tmp_path, *args, **kwargs))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.close()


def write_ring(
    path, *, seconds=0, name=b"gradients", operation=b"allreduce", number=1, fits=0
):
    """Write a ring whose rank has been in a collective for some time, in step 3.

    In none for no time.
    """
    entered = time.monotonic_ns() - int(seconds * 1e9)
    # One record, one collective of all ranks, the record in flight; phase "compute".
    current = int(seconds > 0)
    header = struct.pack(
        "<QQQQqQqQq", ring.FORMAT, 1, number, current, entered, 3, 0, 3, entered
    )
    header = header.ljust(25 * 8, b"\0") + struct.pack("<Q", fits)
    left = 0 if current else entered
    record = struct.pack(
        *("<QqqQQQII48s24s", 1, entered, left, 3, number, 8, 2, 3, name, operation)
    )
    data = header.ljust(ring.HEADER_BYTES, b"\0") + record
    data = data.ljust(ring.HEADER_BYTES + ring.RECORDS * ring.RECORD_BYTES, b"\0")
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


def test_the_records_of_a_killed_rank_are_kept(start):
    rank = start()
    write_ring(rank.ring, seconds=5)
    rank.process.kill()
    assert rank.end() == (
        f"rank 0 on {HOST} {KILLED} It was in step 3, allreduce 1 (gradients).\n"
        f"Records: {rank.shared.directory}\n"
    )
    (answer,) = rank.shared.answers()
    assert (answer.state, answer.step, answer.phase) == ("ended", 3, "compute")
    assert answer.in_flight == answer.collectives[0]
    assert not rank.ring.exists()
    report = roll.report(str(rank.shared.directory))
    assert report.startswith(f"rank 0 on {HOST} {KILLED} It was in step 3")


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM."),
        # Of the real-time signals only the first and the last one have a name.
        ("os.kill(os.getpid(), 40)", "was killed by signal 40."),
        (
            "os._exit(3)",
            "has ended with exit code 3, without Python's exit, as by os._exit.",
        ),
    ],
)
def test_the_signal_or_exit_code_is_named(start, ending, words):
    assert start(ending).end().startswith(f"rank 0 on {HOST} {words}\n")


def test_nothing_is_printed_of_a_rank_that_its_launcher_ends(start, monkeypatch):
    # The launcher has received Ctrl-C, and prints a line by itself.
    with os.fdopen(os.memfd_create("horovodrun-signal"), "w") as file:
        monkeypatch.setenv(SIGNAL_FILE, f"/proc/{os.getpid()}/fd/{file.fileno()}")
        file.write("SIGINT")
        file.flush()
        assert start("os.kill(os.getpid(), signal.SIGTERM)").end() == ""


def test_nothing_is_left_of_a_rank_that_exits(start):
    rank = start("pass")
    assert rank.end() == ""
    assert not rank.shared.directory.exists()


@pytest.mark.parametrize("ending", ["pass", "member.note_end(); load()"])
def test_a_rank_that_has_ended_is_named_on_ranks_that_fail_by_it(start, ending):
    fails = start("print(member.conclusion())", rank=0, size=2)
    ended = start(ending, rank=1, size=2)
    ended.process.stdin.write("\n")
    ended.process.stdin.flush()
    until(lambda: [a for a in fails.shared.answers() if a.state == "done"])
    printed, _ = fails.process.communicate("\n", timeout=LIMIT_SECONDS)
    assert printed == f"rank 1 on {HOST} has ended its script.\n"
    until(lambda: has_ended(fails.guard.pid))
    assert fails.shared.directory.exists() == (ending != "pass")


@pytest.mark.parametrize(
    ("ending", "code"),
    [("member.leave(3); os._exit(3)", 3), ("raise ValueError('broken')", 1)],
)
def test_the_records_of_a_rank_that_fails_are_kept(start, ending, code):
    rank = start(ending)
    write_ring(rank.ring, seconds=5)
    printed = rank.end()
    assert rank.process.returncode == code
    assert ("ValueError: broken" in printed) == (code == 1)
    assert "rank 0" not in printed
    (answer,) = rank.shared.answers()
    assert answer.state == "left"
    assert answer.cause == f"has ended with exit code {code}"


def test_nothing_is_left_of_a_rank_that_fails_before_any_collective(start):
    rank = start("member.leave(3); os._exit(3)")
    assert rank.end() == ""
    assert not rank.shared.directory.exists()


PROGRAMS = """
import subprocess
program = "import signal, time; signal.signal(signal.SIGTERM, {}); time.sleep(3600)"
for handler in ("signal.SIG_DFL", "signal.SIG_IGN"):
    command = [sys.executable, "-c", program.format(handler)]
    print(subprocess.Popen(command, start_new_session=True).pid, flush=True)
"""


def test_programs_of_a_rank_end_with_it(start, tmp_path):
    job = f"{tmp_path.parent.name}-{tmp_path.name}"
    # Of a script that has started the rank: an orphan, with the variables of the rank.
    script = subprocess.run(
        ["sh", "-c", "sleep 3600 >/dev/null & echo $!"],
        env=os.environ | launched(0, job),
        stdout=subprocess.PIPE,
        check=True,
    )
    kept = psutil.Process(int(script.stdout))
    rank = start(PROGRAMS + "os._exit(3)")
    try:
        printed = rank.process.communicate("\n", timeout=LIMIT_SECONDS)[0]
        programs = [int(pid) for pid in printed.split()]
        assert len(programs) == 2
        until(lambda: has_ended(rank.guard.pid))
        assert all(map(has_ended, programs))
        assert not has_ended(kept.pid)
    finally:
        kept.kill()


def test_a_fatal_error_is_printed_with_its_stack(start):
    rank = start("os.abort()")
    printed = rank.end()
    assert printed.startswith("Fatal Python error: Aborted")
    assert f"rank 0 on {HOST} died in native code: Aborted. It was in " in printed


def test_a_rank_that_was_killed_is_reported_before_those_that_fail_by_it(start):
    killed, fails = (
        start("time.sleep(0.3); member.leave(1); os._exit(1)", rank=rank, size=2)
        for rank in (0, 1)
    )
    for rank in (killed, fails):
        write_ring(rank.ring, seconds=5)
    killed.process.kill()
    # Less than the search for the cause takes.
    assert fails.end() == ""
    assert killed.end().startswith(f"rank 0 on {HOST} {KILLED}")


def test_a_forked_process_is_not_taken_for_the_rank(start):
    fork = "child = os.fork(); child or os.abort(); os.waitpid(child, 0)"
    rank = start(f"{fork}; os.kill(os.getpid(), signal.SIGKILL)")
    assert rank.end().startswith(f"rank 0 on {HOST} {KILLED}")


def test_a_rank_uses_a_directory_twice(start, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    use = f"member.use_directory('{folder}')"
    rank = start(f"{use}; {use}; print('used', flush=True); load()")
    rank.process.stdin.write("\n")
    rank.process.stdin.flush()
    assert rank.process.stdout.readline() == "used\n"
    shared = SharedDirectory(folder / "flight")
    until(lambda: not rank.shared.directory.exists())
    until(lambda: psutil.Process(rank.process.pid).status() == psutil.STATUS_SLEEPING)
    rank.process.send_signal(signal.SIGQUIT)
    stacks = folder / "errors" / "stacks-step-0.txt"
    until(lambda: "Stacks of all ranks" in rank.printed)
    assert "line 7 in load" in stacks.read_text()
    assert [member.pid for member in shared.members()] == [rank.process.pid]


def test_a_roll_call_does_not_end_a_rank_without_a_handler(start):
    end = "signal.signal(signal.SIGQUIT, signal.SIG_DFL); print('now'); load()"
    waits, late = start(rank=0, size=2, check=1.0), start(end, rank=1, size=2)
    late.process.stdin.write("\n")
    late.process.stdin.flush()
    until(lambda: not handles(late.process.pid, signal.SIGQUIT))
    write_ring(waits.ring, seconds=5)
    until(lambda: "It does not respond" in waits.printed)
    assert late.process.poll() is None


@pytest.mark.release
def test_a_roll_call_interrupts_no_system_call(start):
    sleep = "import ctypes; print('now', flush=True); print(ctypes.CDLL(None).sleep(3))"
    waits = start(rank=0, size=2, check=1.0)
    sleeps = start(sleep, rank=1, size=2, check=1.0)
    sleeps.process.stdin.write("\n")
    sleeps.process.stdin.flush()
    assert sleeps.process.stdout.readline() == "now\n"
    write_ring(waits.ring, seconds=5)
    # `sleep` returns the seconds that are left if a signal has interrupted it.
    assert sleeps.process.stdout.readline() == "0\n"
    assert "It is in script.py" in waits.printed
    assert "threading.py" not in waits.printed


def test_a_rank_that_is_stopped_is_killed(start):
    rank = start(shutdown=1.0)
    rank.process.send_signal(signal.SIGSTOP)
    printed = rank.end()
    assert rank.process.returncode == -signal.SIGKILL
    assert printed == (
        f"rank 0 on {HOST}: was stopped, as by SIGSTOP, for 0.5 s, and is killed, "
        "since the other ranks wait for it.\n"
    )


EXEC = "os.execv('/bin/sleep', ['sleep', '100'])"


def test_another_program_in_the_place_of_a_rank_is_killed(start):
    rank = start(EXEC, size=2, check=1.0)
    printed = rank.end()
    assert rank.process.returncode == -signal.SIGKILL
    assert printed == (
        f"rank 0 on {HOST}: has replaced its program by 'sleep 100' (exec), and is "
        "killed, since the other ranks wait for it.\n"
    )


@pytest.mark.parametrize(
    ("ending", "size"), [(EXEC, 1), (f"member.note_shutdown(); {EXEC}", 2)]
)
def test_another_program_goes_on_where_no_rank_waits_for_it(start, ending, size):
    rank = start(ending, size=size, check=1.0)
    rank.process.stdin.write("\n")
    rank.process.stdin.flush()
    until(lambda: psutil.Process(rank.process.pid).name() == "sleep")
    # The guard looks at the program of the rank between two answers.
    for _ in range(2):
        call = rank.shared.start_roll_call()
        until(lambda call=call: rank.shared.answers(call))
        rank.shared.end_roll_call()
    assert rank.process.poll() is None
    assert rank.printed == ""


def test_a_rank_that_waits_beyond_the_limit_of_init_is_killed(start):
    rank = start(size=2, init=0.5, grace=0.25)
    write_ring(rank.ring, seconds=5, name=b"hvd.init", operation=b"init", number=0)
    printed = rank.end()
    assert rank.process.returncode == -signal.SIGKILL
    assert re.fullmatch(
        r"rank 1 is late, on another host, or not started: rank 0 has been in init "
        r"\(hvd.init\) for \d+ s, script.py:7 in load. "
        r"HVDTRAIN_INIT_TIMEOUT_SECONDS=0.5\n",
        printed,
    )


def test_one_line_is_printed_where_all_ranks_wait_beyond_the_limit(start):
    *ranks, late = [
        start(rank=rank, size=3, check=0.5, shutdown=1.0, grace=0.5)
        for rank in range(3)
    ]
    for rank in ranks:
        write_ring(rank.ring, seconds=5)
    printed = [rank.end() for rank in ranks]
    ends = [text.count("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=1") for text in printed]
    assert sorted(ends) == [0, 1]
    assert [rank.process.returncode for rank in ranks] == [-signal.SIGKILL] * 2
    assert late.process.poll() is None


@pytest.mark.long
def test_a_collective_in_which_all_ranks_are_goes_on(start):
    ranks = [
        start(rank=rank, size=2, check=1.0, shutdown=1.0, grace=0.5) for rank in (0, 1)
    ]
    for rank in ranks:
        write_ring(rank.ring, seconds=5)
    # Of the guards: the limit is 2.5 s.
    time.sleep(5)
    assert [rank.process.poll() for rank in ranks] == [None] * 2
    assert "are late" not in "".join(rank.printed for rank in ranks)


def test_a_process_that_is_not_the_parent_is_not_killed(tmp_path):
    # As after a roll call in which the rank has ended, and its PID was used again.
    other = subprocess.Popen(["sleep", "3600"])
    try:
        rank = Member(0, 2, HOST, other.pid, str(tmp_path / "ring"))
        task = Task(rank, str(tmp_path), stacks=0, thread=0, limits=Limits())
        Guard(task)._kill("was stopped")
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
    finally:
        other.kill()
        other.wait()


# In a network namespace of its own, whose interface is then down.
CUT = """
import ctypes, socket, subprocess
assert not ctypes.CDLL(None).unshare(0x40000000)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
client.sendall(b"data")
load()
"""


@pytest.mark.long
@pytest.mark.skipif(not has_namespaces(), reason="needs root and iproute2")
def test_a_rank_whose_network_is_cut_is_killed(start):
    rank = start(CUT, size=2, check=1.0, shutdown=2.0, grace=0.5)
    write_ring(rank.ring, seconds=5)
    printed = rank.end()
    assert rank.process.returncode == -signal.SIGKILL
    assert re.search(
        rf"^rank 0 on {HOST} has been in allreduce 1 \(gradients\) for \d+ s, "
        r"script.py:7 in load: its connection to another host is lost. "
        r"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=2$",
        printed,
        re.M,
    )


def test_a_rank_that_has_left_the_training_of_the_others_is_killed(start):
    waits, left = (start(rank=rank, size=2, deadlock=1.0) for rank in (0, 1))
    write_ring(waits.ring, seconds=5)
    write_ring(left.ring, number=0, fits=1)
    left.end()
    assert left.process.returncode == -signal.SIGKILL
    assert left.printed == ""
    assert re.fullmatch(
        rf"rank 1 on {HOST} did not enter allreduce 1 \(gradients, step 3\) for .*\. "
        r"rank 1 has already ended its fit\. .* HVDTRAIN_DEADLOCK_SECONDS=1\n",
        waits.printed,
    )
    assert waits.process.poll() is None


def test_sigquit_makes_a_roll_call(start):
    rank = start()
    # The guard adds its rank before the process is in `load`.
    until(lambda: psutil.Process(rank.process.pid).status() == psutil.STATUS_SLEEPING)
    rank.process.send_signal(signal.SIGQUIT)
    until(lambda: "line 7 in load" in rank.printed)
    place = "is in script.py:7 in load"
    lines = rank.printed.splitlines()
    assert lines[0] == f"rank 0 {place}."
    assert lines[1] == f"rank 0 on {HOST}, process {rank.process.pid}: {place}"
    # Kept only if a rank was late.
    assert rank.shared.conclusion(within_seconds=LIMIT_SECONDS) == ""
    assert rank.process.poll() is None


def test_a_long_wait_in_a_collective_makes_a_roll_call(start):
    waits, late = (start(rank=rank, size=2, check=2.0) for rank in (0, 1))
    write_ring(waits.ring, seconds=5)
    until(lambda: "line 7 in load" in waits.printed)
    first = waits.printed.splitlines()[0]
    assert first.startswith(
        f"rank 1 on {HOST} did not enter allreduce 1 (gradients, step 3) for "
    )
    assert first.endswith(
        " s. It is in script.py:7 in load; the other rank waits for it, "
        "script.py:7 in load."
    )
    assert late.printed == ""
    late.process.kill()
    assert f"rank 1 on {HOST} {KILLED}" in late.end()


def test_a_roll_call_gives_a_launcher_time_to_end_a_job_that_has_failed(start):
    fails = start("raise ValueError('broken')", rank=1, size=2)
    write_ring(fails.ring, seconds=1)
    fails.end()
    waits = start(rank=0, size=2, check=0.5)
    started = time.monotonic()
    write_ring(waits.ring, seconds=0.5)
    until(lambda: f"rank 1 on {HOST} has ended with exit code 1." in waits.printed)
    assert time.monotonic() - started >= 0.5


def test_a_step_is_slow_by_the_steps_before():
    def moment(step, phase="compute", phase_seconds=0.0):
        entered = 100.0 + step
        return Moment(
            phase=phase,
            phase_entered=entered + phase_seconds,
            step=step,
            step_entered=entered,
            entered=None,
        )

    def after_steps(count, *, least_seconds=10.0):
        steps = StepDurations(least_seconds)
        for step in range(1, count + 1):
            assert steps.slow(moment(step), 100.0 + step) is None
        return steps

    # Five steps of 1 s: the sixth one, of 106 s, is slow from 20 s on.
    steps = after_steps(6)
    assert steps.slow(moment(6), 125.9) is None
    assert steps.slow(moment(6), 126.0) == 106.0
    assert steps.slow(moment(6, "evaluation"), 126.0) is None
    # An evaluation of 50 s in the step is no reason.
    assert steps.slow(moment(6, "callbacks", 50.0), 175.9) is None
    assert steps.slow(moment(6, "callbacks", 50.0), 176.0) == 156.0
    assert after_steps(5).slow(moment(5), 1000.0) is None
    least = after_steps(6, least_seconds=60.0)
    assert least.slow(moment(6), 165.9) is None
    assert least.slow(moment(6), 166.0) == 106.0


def test_a_slow_start_is_described_once(tmp_path):
    def line(phase, *, waited=0.0, seconds=0.0, operation=b"allgather"):
        write_ring(path, seconds=seconds, name=b"gather", operation=operation)
        moment = ring.read_moment(path)
        return slow.line(path, dataclasses.replace(moment, phase=phase, waited=waited))

    path, slow = tmp_path / "ring", SlowStart()
    assert line("script", seconds=9.0, operation=b"init") == ""
    # A collective of a script has the stall limits.
    assert line("script", seconds=11.0) == ""
    assert line("script", seconds=11.0, operation=b"init") == (
        "hvd.init has taken 11 s: another rank has not called it, or the network "
        "between hosts is slow.\n"
    )
    assert line("script", seconds=12.0, operation=b"init") == ""
    assert line("start", waited=9.0) == line("compute", waited=30.0) == ""
    # Each of the collectives is short; those before this start do not count.
    assert line("start", waited=39.0, seconds=2.0) == (
        "The start of the training has waited for 11 s in collectives, now in "
        "allgather 1 (gather): another rank is slow, or the network between hosts is.\n"
    )
    assert line("start", waited=12.0) == ""


def test_the_report_of_a_job_that_has_ended(tmp_path):
    shared = SharedDirectory(tmp_path / "flight")
    member = Member(1, 2, "node1", 1 << 30, "/no.ring")
    stacks = 'Thread 0x1 (most recent call first):\n  File "a.py", line 5 in f\n'
    shared.add(member)
    shared.write_answer(
        "", Answer(member, "ended", "was killed", step=3, stacks=stacks)
    )
    assert roll.report(str(tmp_path)) == (
        "rank 1 on node1 was killed. It was in step 3, a.py:5 in f.\n"
        "The records have no collectives of all ranks to compare.\n"
        "No records here of rank 0.\n"
        f"rank 1 on node1, process {1 << 30}: was killed\n{stacks.rstrip()}"
    )


def test_a_directory_without_records_is_an_error(tmp_path):
    with pytest.raises(JobError) as error:
        roll.report(str(tmp_path))
    assert str(error.value) == (
        f"Received --job={tmp_path}; expected the model_dir of a job that runs under a "
        "launcher or has failed, or the directory that it has printed."
    )
