"""What Python prints of an error that a script does not catch."""

import os
import socket
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

from hvdtrain.job.failures import explain_failed_collectives
from hvdtrain.job.world import PreemptedError

LOST = tf.errors.UnknownError(
    None, None, "Detected at node\nHorovod has been shut down"
)


@pytest.fixture
def printed_before(monkeypatch):
    """Errors that are printed as before."""
    errors = []
    monkeypatch.setattr(
        sys, "excepthook", lambda kind, error, trace: errors.append(error)
    )
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "7")
    explain_failed_collectives()
    return errors


def leave_uncaught(error):
    try:
        raise error
    except type(error):
        sys.excepthook(*sys.exc_info())


def test_the_cause_comes_before_the_line_of_the_script(printed_before, capsys):
    leave_uncaught(LOST)
    lines = capsys.readouterr().err.splitlines()
    assert "a collective failed" in lines[0]
    assert any("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=7" in line for line in lines)
    assert lines[-2:] == ["    raise error", "UnknownError: Horovod has been shut down"]
    assert printed_before == []


def test_a_network_that_is_cut_is_the_cause_without_advice(printed_before, capsys):
    reason = (
        "A collective has lost a rank: the connection to rank 1 has ended: host "
        "10.0.0.2 does not answer, since it is down or the network to it is cut"
    )
    leave_uncaught(tf.errors.AbortedError(None, None, f"Detected at node\n{reason}"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("a collective failed: another host cannot be reached.")
    assert lines[-1] == f"AbortedError: {reason}"
    assert not any("JoinCallback" in line for line in lines)


def test_other_errors_are_printed_as_before(printed_before, capsys):
    error = ValueError("no collective")
    leave_uncaught(error)
    assert printed_before == [error]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("rank", "line"), [("0", "Stopped at step 5.\n"), ("1", "")])
def test_a_preemption_is_one_line_and_the_exit_code(
    printed_before, monkeypatch, capsys, rank, line
):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    monkeypatch.setenv("HOROVOD_RANK", rank)
    # Set by Python before it calls the hook. The guard would report an exception.
    sys.last_value = None
    with pytest.raises(SystemExit) as info:
        leave_uncaught(PreemptedError("Stopped at step 5."))
    assert info.value.code == 75
    assert not hasattr(sys, "last_value")
    assert capsys.readouterr().err == line
    assert printed_before == []


def test_an_interrupt_shows_the_frames_of_the_script(printed_before, capsys):
    leave_uncaught(KeyboardInterrupt())
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == ["    raise error", "KeyboardInterrupt"]
    assert printed_before == []


def test_without_filtering_the_traceback_is_complete(printed_before, capsys):
    keras.config.disable_traceback_filtering()
    try:
        leave_uncaught(LOST)
    finally:
        keras.config.enable_traceback_filtering()
    assert printed_before == [LOST]
    assert capsys.readouterr().err == ""


def test_two_calls_are_one(printed_before):
    hook = sys.excepthook
    explain_failed_collectives()
    assert sys.excepthook is hook


# As `explain_failed_collectives`, without TensorFlow's import.
THREADS = """
import sys, threading, time
from hvdtrain.job import ending

def explain(kind, error, trace):
    sys.__excepthook__(kind, error, trace)
    ending.end_despite_threads()

sys.excepthook = explain
ending.THREAD_SECONDS = 1.0
target, args = map(eval, sys.argv[1:])
threading.Thread(target=target, args=args, name="upload").start()
raise KeyError("on purpose")
"""


def end_with_thread(target, *args, size=2):
    return subprocess.run(
        [sys.executable, "-c", THREADS, target, repr(args)],
        env=os.environ | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": str(size)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_rank_that_raises_ends_although_a_thread_runs():
    done = end_with_thread("threading.Event().wait")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "KeyError: 'on purpose'",
        f"rank 1 on {socket.gethostname()}: ends 1 s after its exception, although "
        "threads that are not daemons run: upload.",
    ]


@pytest.mark.parametrize(("size", "seconds"), [(2, 0.2), (1, 1.5)])
def test_a_thread_that_ends_is_waited_for(size, seconds):
    # Without other ranks, as long as Python waits.
    script = "lambda seconds: time.sleep(seconds) or print('done')"
    done = end_with_thread(script, seconds, size=size)
    assert (done.returncode, done.stdout) == (1, "done\n")
    assert done.stderr.splitlines()[-1] == "KeyError: 'on purpose'"


# Horovod's shutdown waits for a rank that cannot be reached.
LOST_RANK = """
import atexit, sys, threading, types
from hvdtrain.job import ending

blocked = threading.Event()
sys.modules["hvdtrain.job.backend"] = types.SimpleNamespace(
    shutdown=blocked.wait, hvd=types.SimpleNamespace(is_initialized=lambda: True)
)
atexit.register(blocked.wait)
ending.THREAD_SECONDS = 0.2
ending.end_despite_threads(has_lost_rank=True)
"""


def test_the_exit_does_not_wait_for_a_lost_rank():
    done = subprocess.run(
        [sys.executable, "-c", LOST_RANK],
        env=os.environ | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
