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


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), CASES)
def test_activations_that_are_kept(schedule, stages, microbatches):
    operations = schedules.training(schedule, stages, microbatches)
    for stage, mine in enumerate(operations):
        limit = microbatches if schedule == "gpipe" else stages - stage
        kept = schedules.peak_of_activations(mine)
        assert kept == min(limit, microbatches)


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), CASES)
def test_ranks_that_block_in_exchanges_compute_every_microbatch(
    schedule, stages, microbatches
):
    training = schedules.training(schedule, stages, microbatches)
    run(training)
    for mine in training:
        backwards = [each for each in mine if isinstance(each, Backward)]
        assert backwards == [Backward(m) for m in range(microbatches)]
    run(schedules.inference(stages, microbatches))


def run(operations):
    """Runs the stages as ranks do: an exchange blocks until the neighbour is in it."""
    places = [0] * len(operations)
    available = [{(Forward, m) for m in range(len(operations[0]))}]
    available += [set() for _ in operations[1:]]
    available[-1] |= {(Backward, m) for m in range(len(operations[0]))}
    done = [set() for _ in operations]

    def current(stage):
        mine = operations[stage]
        return mine[places[stage]] if places[stage] < len(mine) else None

    while any(map(current, range(len(operations)))):
        before = list(places)
        for stage in range(len(operations)):
            operation = current(stage)
            if isinstance(operation, Forward | Backward):
                key = type(operation), operation.microbatch
                assert key in available[stage]
                done[stage].add(key)
                places[stage] += 1
            elif operation and operation.neighbour > stage:
                other, down, up = (
                    operation.neighbour,
                    operation.sent,
                    operation.received,
                )
                if current(other) == Exchange(stage, sent=up, received=down):
                    if down is not None:
                        assert (Forward, down) in done[stage]
                        available[other].add((Forward, down))
                    if up is not None:
                        assert (Backward, up) in done[other]
                        available[stage].add((Backward, up))
                    places[stage] += 1
                    places[other] += 1
        assert places != before, "deadlock"
    assert not any(map(current, range(len(operations))))


def test_an_unknown_schedule():
    with pytest.raises(ValueError, match="schedule='zero'; expected one of gpipe, 1f"):
        schedules.training("zero", 2, 2)
