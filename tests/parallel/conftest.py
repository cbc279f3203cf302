"""Every rank runs pytest itself, with the same tests in the same order.

After each test the ranks gather their results: the test fails on all ranks if it fails
on one, and rank 0 reports the failure wherever it happened. The other ranks print
nothing unless a test failed on them.
"""

import functools
import gc
import io
import os
import pathlib
import sys
import tempfile

# Before TensorFlow and MPI start. A stalled collective ends the job.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", "20")
os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "60")
# Once a cycle each rank waits for the others, under MPI by polling: on a machine with
# as many ranks as cores, cycles of 3 ms in place of Horovod's 1 ms leave the cores to
# the tests. It changes when a collective starts, not what it computes.
if "OMPI_COMM_WORLD_RANK" in os.environ:
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "3")

import keras
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd

hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
# Garbage collection then leaves out the objects of the imports, which stay: a complete
# one takes 0.02 s in place of 0.7 s.
gc.freeze()

_iterate = tf.data.Dataset.__iter__


def _iterate_without_autotuning(dataset):
    options = tf.data.Options()
    options.autotune.enabled = False
    return _iterate(dataset.with_options(options))


# The end of an iterator waits for the end of a period of tf.data's autotuning, which
# is 10 ms at first and then always twice the one before: up to as long as it lived.
tf.data.Dataset.__iter__ = _iterate_without_autotuning


if "OMPI_COMM_WORLD_RANK" in os.environ:
    from mpi4py import MPI

    # Two of them for each test: Horovod would take 9 ms for one, in cycles of 3 ms.
    gather = MPI.COMM_WORLD.allgather
else:
    gather = functools.partial(hvd.allgather_object, name="test_outcome")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if hvd.rank() > 0 and reporter:
        config.quiet_output = io.StringIO()
        reporter._tw._file = config.quiet_output


def pytest_unconfigure(config):
    output = getattr(config, "quiet_output", None)
    if output and " failed" in output.getvalue().splitlines()[-1]:
        sys.stderr.write(f"\nrank {hvd.rank()}:\n{output.getvalue()}")
    # The launcher kills the others as soon as one fails: first all have spoken.
    hvd.allgather_object(None, name="end_of_session")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "teardown":
        return report
    # A test that one rank does not even start would leave the others alone in it.
    is_missing = report.skipped and report.when == "setup"
    text = str(report.longrepr) if report.failed or is_missing else None
    failures = gather(text)
    elsewhere = [
        f"on rank {rank}:\n{failure}"
        for rank, failure in enumerate(failures)
        if failure and rank != hvd.rank()
    ]
    if elsewhere and report.passed:
        report.outcome = "failed"
        report.longrepr = "\n".join(elsewhere)
    return report


@pytest.fixture(autouse=True)
def _fresh_keras():
    yield
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session(free_memory=False)


@pytest.fixture
def float64():
    """Make models in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.fixture
def directory():
    """One that rank 0 made; the others have its name only."""
    with tempfile.TemporaryDirectory() as own:
        yield hvd.broadcast_object(str(pathlib.Path(own) / "run"), name="directory")
        hvd.allreduce(0, name="leave_directory")
