"""Real signals to real processes."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from unittest import mock

import psutil
import pytest
from horovod.runner.common.util import safe_shell_exec

TIMEOUT_SECONDS = 60
# A locked mutex, locked again: signals do not interrupt it, so that the main thread
# never runs a Python handler.
HEAD = """
import ctypes, os, signal, time
from hvdtrain.job import signals

def write(text):
    os.write(1, f"{text}\\n".encode())

def block():
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    write("ready")
    libc.pthread_mutex_lock(mutex)
"""


def start(script, **options):
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def signalled(script, *numbers):
    """Return exit code and output of a script that got these signals, one by one."""
    with start(script) as process:
        timer = threading.Timer(TIMEOUT_SECONDS, process.kill)
        timer.start()
        output = process.stdout.readline()
        for number in numbers:
            process.send_signal(number)
            output += process.stdout.readline()
        output += process.stdout.read()
        errors = process.stderr.read()
    timer.cancel()
    return process.returncode, output.split(), errors


def test_a_callback_gets_the_signal_of_a_blocked_main_thread():
    script = """
signals.subscribe([signal.SIGTERM], lambda number: write(number))
block()
"""
    code, lines, _ = signalled(script, signal.SIGTERM)
    assert lines == ["ready", "15"]
    assert code == 128 + signal.SIGTERM


def test_the_newest_subscriber_may_postpone_the_end():
    script = """
signals.subscribe([signal.SIGTERM, signal.SIGINT], lambda number: write("old"))
requests = []

def postpone(number):
    requests.append(number)
    write(f"request-{len(requests)}")
    return len(requests) == 1

signals.subscribe([signal.SIGTERM], postpone)
block()
"""
    code, lines, _ = signalled(script, signal.SIGTERM, signal.SIGTERM)
    assert lines == ["ready", "request-1", "request-2", "old"]
    assert code == 128 + signal.SIGTERM
    # Of another signal the newest is not called.
    assert signalled(script, signal.SIGINT)[:2] == (130, ["ready", "old"])


def test_an_error_in_a_callback_does_not_make_the_process_deaf():
    script = """
signals.subscribe([signal.SIGTERM], lambda number: write("old"))
signals.subscribe([signal.SIGTERM], lambda number: 1 / 0)
block()
"""
    code, lines, errors = signalled(script, signal.SIGTERM)
    assert lines == ["ready", "old"]
    assert "ZeroDivisionError" in errors
    assert code == 128 + signal.SIGTERM


def test_the_former_handler_returns_after_the_last_subscriber():
    script = """
def callback(number):
    return True

signals.subscribe([signal.SIGTERM], callback)
signals.unsubscribe(callback)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
block()
"""
    assert signalled(script, signal.SIGTERM)[0] == -signal.SIGTERM


@pytest.mark.parametrize("is_over", [True, False])
def test_a_signal_is_delivered_beside_an_asyncio_loop(is_over):
    script = f"""
import asyncio
signals.subscribe([signal.SIGTERM], lambda number: write(number))
loop = asyncio.new_event_loop()
loop.add_signal_handler(signal.SIGUSR1, lambda: write("theirs"))
if {is_over}:
    loop.remove_signal_handler(signal.SIGUSR1)
write("ready")
loop.run_until_complete(asyncio.sleep(10))
"""
    numbers = [signal.SIGTERM] if is_over else [signal.SIGUSR1, signal.SIGTERM]
    code, lines, _ = signalled(script, *numbers)
    assert lines == (["ready", "15"] if is_over else ["ready", "theirs", "15"])
    assert code == 128 + signal.SIGTERM


def test_another_loop_gets_its_signals_after_one_of_ours():
    script = """
import asyncio
def postpone(number):
    write(f"ours-{number}")
    return number == signal.SIGTERM

signals.subscribe([signal.SIGTERM, signal.SIGINT], postpone)
loop = asyncio.new_event_loop()
loop.add_signal_handler(signal.SIGUSR1, lambda: write("theirs"))
write("ready")
loop.run_until_complete(asyncio.sleep(10))
"""
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    code, lines, _ = signalled(script, *numbers)
    assert lines == ["ready", "ours-15", "theirs", "ours-2"]
    assert code == 128 + signal.SIGINT


def test_a_forked_child_may_subscribe():
    script = """
before = signal.getsignal(signal.SIGINT)  # Ignored, in a background job of a shell.
signals.subscribe([signal.SIGTERM, signal.SIGINT], lambda number: write("parent's"))
child = os.fork()
if child:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    write(f"code-{code}")
    os._exit(0)
signals.subscribe([signal.SIGTERM], lambda number: write("child's"))
assert signal.getsignal(signal.SIGINT) == before
os.kill(os.getpid(), signal.SIGTERM)
block()
"""
    code, lines, _ = signalled(script)
    assert (code, lines[-1]) == (0, "code-143")
    assert [line for line in lines if line != "ready"] == ["child's", "code-143"]


def test_a_signal_to_a_forked_child_is_not_ours():
    script = """
signals.subscribe([signal.SIGTERM], lambda number: write("ours"))
reader, writer = os.pipe()
child = os.fork()
if not child:
    os.write(writer, b"x")
    time.sleep(60)
    os._exit(1)
os.read(reader, 1)
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM
block()
"""
    assert signalled(script, signal.SIGTERM)[1] == ["ready", "ours"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_signals_of_others_are_left_alone(number):
    script = """
signals.subscribe([signal.SIGTERM], lambda number: write("ours"))
signal.signal(signal.SIGUSR1, lambda *_: write("theirs"))
signal.signal(signal.SIGINT, lambda *_: write("theirs"))
write("ready")
time.sleep(1000)
"""
    code, lines, _ = signalled(script, number, signal.SIGTERM)
    assert lines == ["ready", "theirs", "ours"]
    assert code == 128 + signal.SIGTERM


def test_a_hangup_that_nohup_ignores_stays_ignored():
    script = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signals.subscribe([signal.SIGHUP, signal.SIGTERM], lambda number: write(number))
os.kill(os.getpid(), signal.SIGHUP)
block()
"""
    assert signalled(script, signal.SIGTERM)[1] == ["ready", "15"]


# A module that takes long to import, where Python ignores exceptions.
SLOW = """
import time

class Slow:
    def __del__(self):
        print("ready", flush=True)
        time.sleep(60)

Slow()
"""
OWN = [sys.executable, "-m", "hvdtrain.mnist"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(
    ("command", "module", "line"),
    [
        (OWN, "absl", "Stopped by {}.\n"),
        (["horovodrun", "-np", "2", *OWN], "yaml", "horovodrun: stopped by {}\n"),
    ],
)
def test_a_signal_in_an_import_ends_a_program(tmp_path, command, module, line, number):
    (tmp_path / f"{module}.py").write_text(SLOW)
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    ) as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        _, errors = program.communicate(timeout=TIMEOUT_SECONDS)
    assert errors == line.format(number.name)
    assert program.returncode == 128 + number


END = """
import subprocess
from horovod.runner.common.util import safe_shell_exec

safe_shell_exec.GRACEFUL_TERMINATION_TIME_S = 0.2
print(subprocess.Popen(["sleep", "3600"]).pid, flush=True)
input()
safe_shell_exec.end_children({})
print("returned")
"""
PTRACE_SEIZE = 0x4206


def test_the_launcher_ends_although_a_child_does_not():
    with subprocess.Popen(
        [sys.executable, "-c", END],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        child = int(launcher.stdout.readline())
        try:
            # Until this process waits for it, its parent does not see its end.
            libc = ctypes.CDLL(None, use_errno=True)
            traced = libc.ptrace(PTRACE_SEIZE, child, None, None)
            assert traced == 0, os.strerror(ctypes.get_errno())
            printed = launcher.communicate("\n", timeout=TIMEOUT_SECONDS)[0]
            assert printed == "returned\n"
        finally:
            launcher.kill()
            os.kill(child, signal.SIGKILL)
            while not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
                pass


def test_a_process_that_is_being_started_is_no_rank_of_the_launcher():
    # Between two programs, `exec` shows no words of either.
    process = mock.Mock(spec=psutil.Process, cmdline=lambda: [], pid=os.getpid())
    assert not safe_shell_exec.is_rank(process)
