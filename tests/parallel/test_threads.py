"""Collectives that several Python threads call: in one order, or an error."""

import functools
import queue
import threading

import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.collectives import transport

RANK, SIZE = hvd.rank(), hvd.size()
WAIT_SECONDS = 10

pytestmark = pytest.mark.four_ranks


class Call(threading.Thread):
    """A thread that calls `work`, and stays until it is told to end."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self._work = work
        self._has_called, self._may_end = threading.Event(), threading.Event()

    def run(self):
        try:
            self._outcome = self._work()
        except tf.errors.FailedPreconditionError as error:
            self._outcome = error
        self._has_called.set()
        assert self._may_end.wait(WAIT_SECONDS)

    def outcome(self):
        self.start()
        assert self._has_called.wait(WAIT_SECONDS)
        return self._outcome

    def end(self):
        self._may_end.set()
        if self.ident:
            self.join(WAIT_SECONDS)


class OtherCall(Call):
    """Another class, hence a thread that can be told from the first."""


@pytest.fixture
def call():
    """Returns a function that makes a `Call`; all of them end with the test."""
    made = []
    yield lambda work, kind=Call: made.append(kind(work)) or made[-1]
    for each in made:
        each.end()


@pytest.fixture(params=[tf.function, lambda function: function], ids=["graph", "eager"])
def total(request):
    """The sum over ranks; the main thread has traced it."""
    total = request.param(lambda x: hvd.allreduce(x, op=hvd.Sum, name="of_threads"))
    assert total(tf.constant(1.0)) == SIZE
    return total


def test_threads_that_wait_for_each_other(total, call):
    for _ in range(RANK):
        call(None)  # The threads of the ranks have different numbers.
    for i in range(3):
        thread = call(lambda: total(tf.constant(float(RANK))))
        assert thread.outcome() == sum(range(SIZE))
        thread.end()
        assert total(tf.constant(float(i))) == i * SIZE


def test_python_code_that_tensorflow_runs_in_its_threads(call):
    @tf.function
    def total(x):
        for _ in tf.range(5):
            x = tf.py_function(lambda x: hvd.allreduce(x, op=hvd.Sum), [x], tf.float32)
            x = tf.ensure_shape(x, [])
        return x

    assert total(tf.constant(1.0)) == SIZE**5
    assert call(lambda: total(tf.constant(2.0))).outcome() == 2 * SIZE**5


def test_threads_in_another_order_on_one_rank_fail_on_all(total, call):
    threads = [
        call(lambda: total(tf.constant(1.0))),
        call(lambda: total(tf.constant(100.0)), kind=OtherCall),
    ]
    for thread in threads if RANK == 0 else threads[::-1]:
        error = thread.outcome()
        assert isinstance(error, tf.errors.FailedPreconditionError), error
        assert "Mismatched" in str(error)
    # Nothing is left behind.
    assert total(tf.constant(1.0)) == SIZE


def test_threads_that_cannot_be_told_apart_are_refused(total, call):
    threads = [call(lambda: total(tf.constant(1.0))) for _ in range(2)]
    assert threads[0].outcome() == SIZE
    error = threads[1].outcome()
    assert isinstance(error, tf.errors.FailedPreconditionError), error
    # Within a function, Horovod's own error is all that there is.
    if transport.reduction_path() != "Horovod":
        assert "test_threads.Call, one of 2 such threads of rank 1" in str(error)
        assert "name to one that differs in more than digits" in str(error)
    assert total(tf.constant(1.0)) == SIZE


def test_names_tell_threads_apart(total, call):
    threads = [call(lambda: total(tf.constant(1.0))) for _ in range(2)]
    threads[0].name, threads[1].name = "actor-1", "critic-1"
    for thread in threads:
        assert thread.outcome() == SIZE


def test_a_thread_beside_one_that_runs_a_function_of_c(total, call):
    jobs = queue.Queue()
    # A callable without a module.
    worker = threading.Thread(target=iter(jobs.get, None).__next__, daemon=True)
    worker.start()
    assert call(lambda: total(tf.constant(1.0))).outcome() == SIZE
    jobs.put("")
    worker.join(WAIT_SECONDS)


def test_partial_functions_tell_threads_apart(total):
    outcomes, may_end = queue.Queue(), threading.Event()

    def first(value):
        outcomes.put(total(tf.constant(value)))
        assert may_end.wait(WAIT_SECONDS)

    def second(value):
        first(value)

    for function in (first, second):
        work = functools.partial(function, 1.0)
        threading.Thread(target=work, daemon=True).start()
        assert outcomes.get(timeout=WAIT_SECONDS) == SIZE
    may_end.set()
