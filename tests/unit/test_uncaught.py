"""What Python prints of an error that a script does not catch."""

import sys

import keras
import pytest
import tensorflow as tf

from hvdtrain.job.failures import explain_failed_collectives

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


def test_other_errors_are_printed_as_before(printed_before, capsys):
    error = ValueError("no collective")
    leave_uncaught(error)
    assert printed_before == [error]
    assert capsys.readouterr().err == ""


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
