"""Requests to stop, and the end of a training that is to be continued."""

import os
import queue
import signal

import pytest

from hvdtrain import training
from hvdtrain.job import JobError, World, signals
from hvdtrain.training import RunConfig
from hvdtrain.training.preemption import stopping_on
from hvdtrain.training.requests import SAVE, STOP, Every, Requests

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


def asked(requests):
    votes = dict(zip(training.requests.NAMES, requests.votes(), strict=True))
    return {name for name, vote in votes.items() if vote}


def test_what_is_due_after_some_seconds_is_done_once():
    requests, seconds = Requests(), 0.0
    is_due = Every(
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
