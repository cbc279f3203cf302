"""Requests to stop, and the end of a training that is to be continued."""

import itertools
import os
import queue
import signal

import pytest

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import JobError, World, signals
from hvdtrain.training import Plan, RunConfig
from hvdtrain.training.due import (
    SAVE,
    STOP,
    Interval,
    Requests,
    Votes,
    stopping_on,
)

TIMEOUT_SECONDS = 60


@pytest.fixture
def before():
    """Signals that the subscriber before `stopping_on` got."""
    got = queue.Queue()

    def take(number):
        got.put(number)
        return True

    signals.subscribe([signal.SIGUSR1, signal.SIGUSR2], take)
    yield got
    signals.unsubscribe(take)


def test_the_first_signal_asks_and_a_later_one_ends(before):
    seconds = queue.Queue()
    requests = Requests()

    def clock():
        return seconds.get(timeout=TIMEOUT_SECONDS)

    with stopping_on([signal.SIGUSR1], requests, rank=3, clock=clock):
        os.kill(os.getpid(), signal.SIGUSR2)
        assert before.get(timeout=TIMEOUT_SECONDS) == signal.SIGUSR2
        assert STOP not in asked(requests)
        # The second one is the same request, sent twice.
        for second in (10.0, 10.9, 11.1):
            assert before.empty()
            os.kill(os.getpid(), signal.SIGUSR1)
            seconds.put(second)
        assert before.get(timeout=TIMEOUT_SECONDS) == signal.SIGUSR1
        assert before.empty()
    assert STOP in asked(requests)
    assert requests.stop_reason == "SIGUSR1 on rank 3"
    # After the training it is held for the next one.
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert before.get(timeout=TIMEOUT_SECONDS) == signal.SIGUSR2
    with stopping_on([signal.SIGUSR1], requests := Requests(), rank=0):
        assert requests.stop_reason == "SIGUSR1 on rank 0"
    assert before.empty()


def test_a_launcher_that_is_to_end_is_not_held_after_a_training(before, monkeypatch):
    file = os.memfd_create("launcher")
    os.write(file, b"SIGINT")
    monkeypatch.setenv("HVDTRAIN_LAUNCHER_SIGNAL", f"/proc/self/fd/{file}")
    with stopping_on([signal.SIGUSR1], Requests(), rank=0):
        pass
    os.kill(os.getpid(), signal.SIGUSR1)
    assert before.get(timeout=TIMEOUT_SECONDS) == signal.SIGUSR1
    os.close(file)


def test_a_handler_of_the_user_is_called_after_a_training():
    got = []
    signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        with stopping_on([signal.SIGUSR1], Requests(), rank=0):
            pass
        signal.raise_signal(signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
    finally:
        # Not what was there before: a subscription of an earlier test, whose thread may
        # not have read this signal yet.
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def asked(requests):
    votes = dict(zip(training.due.NAMES, requests.votes(), strict=True))
    return {name for name, vote in votes.items() if vote}


def test_what_is_due_after_some_seconds_is_done_once():
    requests, seconds = Requests(), 0.0
    is_due = Interval(
        SAVE,
        requests,
        steps=0,
        seconds=10,
        world=World(),
        start_step=0,
        clock=lambda: seconds,
    )
    done = []
    # A report of progress, which agrees on the requests, in each second.
    for step in range(1, 40):
        seconds = float(step)
        requests.agree(requests.votes())
        if is_due(step):
            done.append(step)
    # Agreed on by the report after the ten seconds.
    assert done == [11, 22, 33]


def test_a_request_to_stop_stays_until_the_job_ends():
    requests = Requests()
    requests.stop("SIGTERM on rank 0")
    requests.ask(SAVE)
    requests.agree(requests.votes())
    assert asked(requests) == {STOP}


def test_a_limit_of_time_needs_a_place_for_the_checkpoint():
    with pytest.raises(JobError, match="max_minutes=5 without model_dir"):
        RunConfig(max_minutes=5)


def votes_of(step_seconds, *, max_steps=10_000, steps_per_execution=20):
    """Train on one rank, where each step takes `step_seconds(step)`.

    Returns the steps and the seconds of the votes.
    """
    plan = Plan(
        max_steps=max_steps,
        epochs=10,
        fit_epoch_steps=1005,
        steps_per_execution=steps_per_execution,
        global_batch_size=32,
    )
    seconds, step, found = 0.0, 0, []
    votes = Votes(Requests(), plan, World(), start_step=0, clock=lambda: seconds)
    while step < max_steps:
        end = min(votes.next_step, plan.execution(step)[1])
        seconds += sum(map(step_seconds, range(step, end)))
        step = end
        votes(step)
        found.append((step, seconds))
    return found


def test_slow_steps_are_voted_on_one_by_one():
    found = votes_of(lambda step: 4.0, max_steps=50)
    assert [step for step, _ in found] == list(range(1, 51))


def test_fast_steps_are_voted_on_after_whole_executions():
    found = [step for step, _ in votes_of(lambda step: 0.0005)]
    # Four times as many as before, until an execution is whole.
    assert found[:5] == [1, 2, 6, 20, 40]
    # The last execution of an epoch is short.
    assert found[51:56] == [980, 1000, 1005, 1025, 1045]


def test_steps_that_become_slow_are_voted_on_after_one_execution():
    found = votes_of(lambda step: 0.0005 if step < 500 else 1.0, max_steps=600)
    late = [seconds for step, seconds in found if step >= 500]
    pauses = [after - before for before, after in itertools.pairwise(late)]
    assert max(pauses) <= 20
    assert pauses[1:] == [1.0] * (len(pauses) - 1)


def test_a_vote_that_is_slow_is_rare():
    """Through Horovod, one of 1 ms takes 1/500 of the time."""
    plan = Plan(
        max_steps=10_000,
        epochs=1,
        fit_epoch_steps=10_000,
        steps_per_execution=20,
        global_batch_size=32,
    )
    seconds = 0.0

    def clock():
        nonlocal seconds
        seconds += 0.001
        return seconds

    hvd.init()
    votes = Votes(Requests(), plan, World(size=2), start_step=0, clock=clock)
    found = []
    for step in range(1, 2001):
        seconds += 0.001
        before = votes.next_step
        votes(step)
        if step == before:
            found.append(step)
    pauses = {after - before for before, after in itertools.pairwise(found)}
    assert max(pauses) == 480
