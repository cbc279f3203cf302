"""What programs share, in programs of a few lines that load no TensorFlow."""

import fcntl
import functools
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from hvdtrain import output

TIMEOUT_SECONDS = 60
PROGRAM = """
from hvdtrain import program
from hvdtrain.job import JobError

def main():
{body}

program._PATIENCE_SECONDS = 0.1
program.run(main, page="")
"""


def start(body, *, arguments=(), environment=(), **options):
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=lines), *arguments],
        env=os.environ | dict(environment),
        **options,
    )


def full_pipe():
    """Return both ends of a pipe that has no room."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * 4096)
    return reader, writer


@pytest.mark.parametrize("streams", [["stdout"], ["stdout", "stderr"]])
def test_a_pipe_that_nobody_reads_does_not_delay_a_signal(streams):
    reader, writer = full_pipe()
    body = """\
open("/proc/self/comm", "w").write("prints")
while True:
    print("text")
"""
    with start(body, **dict.fromkeys(streams, writer)) as process:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not is_blocked_in_print(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(10) == 128 + signal.SIGTERM
        finally:
            process.kill()
    os.close(reader)
    os.close(writer)


def is_blocked_in_print(pid):
    with open(f"/proc/{pid}/stat") as file:
        name, state = file.read().split(maxsplit=3)[1:3]
    return (name, state) == ("(prints)", "S")


# A pipe of packets: each read returns what one write has written.
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_print_is_one_write(unbuffered):
    reader, writer = os.pipe2(os.O_DIRECT)
    body = """\
print("one line")
print("several", "lines\\nof one text")
print("flushed", flush=True)
"""
    environment = {"PYTHONUNBUFFERED": unbuffered}
    with start(body, environment=environment, stdout=writer):
        os.close(writer)
    packets = list(iter(lambda: os.read(reader, 4096), b""))
    os.close(reader)
    assert packets == [b"one line\n", b"several lines\nof one text\n", b"flushed\n"]


def test_a_full_disk_for_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        process = start("print('a line')", stdout=full, stderr=subprocess.PIPE)
        errors = process.communicate(timeout=TIMEOUT_SECONDS)[1]
    assert process.returncode == 1
    assert errors == b"Cannot write the output: No space left on device.\n"


@pytest.mark.parametrize(
    ("closed", "other", "expected"),
    [(1, "stderr", b"an error\n"), (2, "stdout", b"a line\n")],
)
def test_a_stream_that_the_parent_has_closed_is_not_wanted(closed, other, expected):
    body = "import sys\nprint('a line')\nprint('an error', file=sys.stderr)"
    close = functools.partial(os.close, closed)
    with start(body, preexec_fn=close, **{other: subprocess.PIPE}) as process:
        assert getattr(process, other).read() == expected
    assert process.returncode == 0


SHARED = "from hvdtrain.job.world import SharedJobError\nraise SharedJobError('why')"


@pytest.mark.parametrize(
    ("rank", "body", "flag", "code", "reason"),
    [
        (0, "raise JobError('why')", "--nohelp", 1, "why"),
        (1, "raise JobError('why')", "--nohelp", 1, "why"),
        (0, SHARED, "--nohelp", 1, "why"),
        (1, SHARED, "--nohelp", 1, ""),
        (1, "", "--wrong", 2, "Unknown command line flag 'wrong'"),
    ],
)
def test_only_a_reason_that_rank_0_prints_is_left_out(rank, body, flag, code, reason):
    environment = {"HOROVOD_SIZE": "2", "HOROVOD_RANK": str(rank)}
    process = start(
        body or "pass",
        arguments=[flag],
        environment=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors = process.communicate(timeout=TIMEOUT_SECONDS)[1]
    assert process.returncode == code
    prefix = f"rank 1 on {socket.gethostname()}: " if rank and reason else ""
    assert errors.startswith(prefix + reason)
    assert len(errors.splitlines()) == bool(reason), errors


LOSE_A_RANK = """\
import os, signal, sys, time, types
from hvdtrain.job import signals
fake = types.SimpleNamespace(
    is_collective_failure=lambda error: bool(error), network_failure=lambda error: ""
)
sys.modules["hvdtrain.job.failures"] = fake
"""
# As in a training, where it is a request to stop.
TERMINATED_BEFORE = """\
signals.subscribe([signal.SIGTERM], lambda number: True)
os.kill(os.getpid(), signal.SIGTERM)
while signals.seconds_since_last() > 60:
    time.sleep(0.01)
raise RuntimeError("of Horovod")
"""
TERMINATED_AFTER = """\
try:
    raise RuntimeError("of Horovod")
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("body", "code"), [(TERMINATED_BEFORE, 1), (TERMINATED_AFTER, 143)]
)
def test_a_rank_that_the_launcher_ends_after_another_prints_nothing(body, code):
    process = start(LOSE_A_RANK + body, stderr=subprocess.PIPE, text=True)
    assert process.communicate(timeout=TIMEOUT_SECONDS)[1] == ""
    assert process.returncode == code


REMOVE_FILES = """\
import os, signal, threading, time
from hvdtrain.job import signals
removed = threading.Event()

def remove(number):
    removed.set()
    deadline = time.monotonic() + 1
    while not program._exit_codes and time.monotonic() < deadline:
        time.sleep(0.01)
    return False

signals.subscribe([signal.SIGTERM], remove)
os.kill(os.getpid(), signal.SIGTERM)
removed.wait()
raise FileNotFoundError("a consequence")
"""


def test_an_error_that_a_signal_has_caused_is_not_printed():
    process = start(REMOVE_FILES, stderr=subprocess.PIPE, text=True)
    errors = process.communicate(timeout=TIMEOUT_SECONDS)[1]
    assert (errors, process.returncode) == ("Stopped by SIGTERM.\n", 143)


def test_a_warning_is_one_line():
    body = 'import warnings\nwarnings.warn("not so")\n'
    process = start(body, stderr=subprocess.PIPE, text=True)
    assert process.communicate(timeout=TIMEOUT_SECONDS)[1] == "WARNING: not so\n"
    assert process.returncode == 0


def test_a_lost_rank_is_one_line():
    body = f'{LOSE_A_RANK}raise RuntimeError("of Horovod")\n'
    process = start(body, stderr=subprocess.PIPE, text=True)
    errors = process.communicate(timeout=TIMEOUT_SECONDS)[1]
    assert process.returncode == 1
    assert errors == (
        "Another rank has left the job, or has not called a collective within "
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.\n"
    )


def test_noise_is_dropped_and_errors_are_written(capfd):
    with output.without_noise():
        os.write(2, b"I0000 a message of TensorFlow\na warning\n")
        output.write_error("an error\n", timeout_seconds=1)
    os.write(2, b"I0000 afterwards\n")
    *filtered, last = sorted(capfd.readouterr().err.splitlines(), key=str.lower)
    assert (filtered, last) == (["a warning", "an error"], "I0000 afterwards")


def test_a_user_may_keep_the_noise(capfd, monkeypatch):
    monkeypatch.setenv(output.LOG_LEVEL, "0")
    with output.without_noise():
        os.write(2, b"I0000 a message of TensorFlow\n")
    assert capfd.readouterr().err == "I0000 a message of TensorFlow\n"


def test_only_messages_of_tensorflow_are_dropped():
    noise = (
        b"WARNING: All log messages before absl::InitializeLog() is called\n"
        b"I0000 00:00:1795715708.301419   30331 port.cc:153] oneDNN is on.\n"
    )
    kept = b"\xff oneDNN\nE0000 00:00:1795715708.3 1 cuda.cc:1] an error\n"
    assert output.drop_noise(noise + kept + noise) == kept


def test_the_reason_of_an_abort_is_written():
    script = """
import os, signal
from hvdtrain import output
with output.without_noise():
    os.write(2, b"I0000 noise\\nF0000 no AVX\\nthe last line")
    os.killpg(0, signal.SIGTERM) if os.environ.get("GROUP") else os.abort()
"""
    for group, number in {"": signal.SIGABRT, "1": signal.SIGTERM}.items():
        process = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"GROUP": group},
            capture_output=True,
            start_new_session=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert process.returncode == -number
        assert process.stderr == b"F0000 no AVX\nthe last line"


def test_a_long_error_is_written_in_whole_lines(monkeypatch):
    reader, writer = os.pipe2(os.O_DIRECT)
    monkeypatch.setattr(output, "_real_stderr", writer)
    output.write_error("x" * 4000 + "\n" + "y" * 4000 + "\n", timeout_seconds=1)
    os.close(writer)
    packets = list(iter(lambda: os.read(reader, 8192), b""))
    os.close(reader)
    assert packets == [b"x" * 4000 + b"\n", b"y" * 4000 + b"\n"]
