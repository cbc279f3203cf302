"""Requests to stop, and the end of a training that is to be continued."""

import os
import queue
import signal

import pytest

from hvdtrain import training
from hvdtrain.job import JobError, signals
from hvdtrain.training import RunConfig
from hvdtrain.training.preemption import stopping_on
from hvdtrain.training.requests import STOP, Requests

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


def test_a_limit_of_time_needs_a_place_for_the_checkpoint():
    with pytest.raises(JobError, match="max_minutes=5 without model_dir"):
        RunConfig(max_minutes=5)
