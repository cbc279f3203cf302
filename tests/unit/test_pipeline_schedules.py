"""The order of work in a pipeline, by hand and by its invariants."""

import itertools

import pytest

from hvdtrain.parallel.pipeline import schedules
from hvdtrain.parallel.pipeline.schedules import Backward, Exchange, Forward


def test_1f1b_of_two_stages_by_hand():
    first, last = schedules.training("1f1b", stages=2, microbatches=3)
    assert first == [
        Forward(0),
        Exchange(1, sent=0, received=None),
        Forward(1),
        Exchange(1, sent=1, received=None),
        Exchange(1, sent=None, received=0),
        Backward(0),
        Forward(2),
        # An activation and a gradient in one exchange.
        Exchange(1, sent=2, received=1),
        Backward(1),
        Exchange(1, sent=None, received=2),
        Backward(2),
    ]
    assert [each for each in last if not isinstance(each, Exchange)] == [
        *(Forward(0), Backward(0), Forward(1), Backward(1), Forward(2), Backward(2))
    ]


CASES = list(itertools.product(schedules.SCHEDULES, (1, 2, 3, 5), (1, 2, 4, 7)))


def peak_of_activations(operations):
    """The largest number of micro-batches whose activations are kept."""
    kept, peak = set(), 0
    for operation in operations:
        match operation:
            case Forward(m):
                kept.add(m)
            case Backward(m):
                kept.remove(m)
        peak = max(peak, len(kept))
    return peak


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), CASES)
def test_activations_that_are_kept(schedule, stages, microbatches):
    operations = schedules.training(schedule, stages, microbatches)
    for stage, mine in enumerate(operations):
        limit = microbatches if schedule == "gpipe" else stages - stage
        kept = peak_of_activations(mine)
        assert kept == min(limit, microbatches)


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), CASES)
def test_ranks_that_block_in_exchanges_lose_no_time(schedule, stages, microbatches):
    training = schedules.training(schedule, stages, microbatches)
    for mine in training:
        backwards = [each for each in mine if isinstance(each, Backward)]
        assert backwards == [Backward(m) for m in range(microbatches)]
    # The bubble is that of both papers: stages - 1 forward and backward passes.
    assert Ranks(training).run() == 3 * (microbatches + stages - 1)
    inference = schedules.inference(stages, microbatches)
    assert Ranks(inference).run() == microbatches + stages - 1


def test_1f1b_sends_both_ways_in_one_exchange():
    def exchanges(schedule):
        first, _ = schedules.training(schedule, stages=2, microbatches=16)
        return sum(isinstance(each, Exchange) for each in first)

    assert exchanges("gpipe") == 32
    assert exchanges("1f1b") == 18


class Ranks:
    """Ranks that execute the operations of their stages, and the time that they take.

    A forward pass takes 1, a backward pass 2, and an exchange no time. Each rank takes
    its passes one after another, and its exchanges likewise, beside its passes. An
    exchange blocks until the neighbour is in it, too.
    """

    def __init__(self, operations):
        self.waiting = [list(each) for each in operations]
        self.computed_until = [0] * len(operations)
        self.exchanged_until = [0] * len(operations)
        self.results = [{} for _ in operations]
        self.received = [{} for _ in operations]
        for m in range(len(operations[0])):
            self.received[0][Forward(m)] = self.received[-1][Backward(m)] = 0

    def run(self):
        while any(self.waiting):
            moved = [self.advance(s) for s, mine in enumerate(self.waiting) if mine]
            assert any(moved), "deadlock"
        return max(self.computed_until)

    def advance(self, stage):
        operation = self.waiting[stage][0]
        if isinstance(operation, Exchange):
            other = operation.neighbour
            theirs = Exchange(stage, sent=operation.received, received=operation.sent)
            return other > stage and self.exchange(stage, other, operation, theirs)
        start = max(self.computed_until[stage], self.received[stage][operation])
        self.computed_until[stage] = start + (2 - isinstance(operation, Forward))
        self.results[stage][operation] = self.computed_until[stage]
        return self.waiting[stage].pop(0)

    def exchange(self, stage, other, mine, theirs):
        if self.waiting[other][:1] != [theirs]:
            return False
        down = [] if mine.sent is None else [Forward(mine.sent)]
        up = [] if mine.received is None else [Backward(mine.received)]
        end = max(
            *(self.exchanged_until[rank] for rank in (stage, other)),
            *(self.results[stage][each] for each in down),
            *(self.results[other][each] for each in up),
        )
        self.exchanged_until[stage] = self.exchanged_until[other] = end
        self.received[other].update(dict.fromkeys(down, end))
        self.received[stage].update(dict.fromkeys(up, end))
        return self.waiting[stage].pop(0) and self.waiting[other].pop(0)


def test_an_unknown_schedule():
    with pytest.raises(ValueError, match="schedule='zero'; expected one of gpipe, 1f"):
        schedules.training("zero", 2, 2)
