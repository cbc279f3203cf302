"""The order of work in a pipeline. Pure functions of numbers.

Time is divided into ticks. In a tick, each stage takes its next operation, if what it
needs has been computed in an earlier tick. After the tick, neighbours exchange what
they have computed: an activation to the next stage and a gradient to the previous one
are one exchange. Exchanges follow one order on all ranks, by tick and then by stage:
each rank's are a part of it, so that ranks that block in an exchange cannot deadlock.
"""

import dataclasses

SCHEDULES = ("gpipe", "1f1b")


@dataclasses.dataclass(frozen=True)
class Forward:
    """The forward pass of a micro-batch. Its activations are kept for the backward."""

    microbatch: int


@dataclasses.dataclass(frozen=True)
class Backward:
    """The backward pass of a micro-batch, which releases its activations."""

    microbatch: int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One exchange with a neighbouring stage.

    Attributes:
        neighbour: its stage.
        sent: the micro-batch whose activation, or gradient, is sent; None for none.
        received: likewise.
    """

    neighbour: int
    sent: int | None
    received: int | None


def training(schedule, stages, microbatches):
    """Return the operations of a training step, a list for each stage.

    `gpipe` (Huang et al., 2019, arXiv:1811.06965) takes all forward passes, then all
    backward passes: a stage keeps the activations of all micro-batches. `1f1b`
    (Narayanan et al., 2021, arXiv:2104.04473, there PipeDream-Flush) starts a backward
    pass as soon as it can: stage s of S keeps those of S - s micro-batches at most.
    Both take the backward passes in the order of micro-batches, so that sums of
    gradients are equal bit for bit.

    Args:
        schedule: `gpipe` or `1f1b`.
        stages: number of stages.
        microbatches: number of micro-batches.

    Raises:
        ValueError: for another schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(
            f"Received schedule={schedule!r}; expected one of {', '.join(SCHEDULES)}."
        )
    orders = []
    for stage in range(stages):
        ahead = microbatches if schedule == "gpipe" else stages - stage
        orders.append(_order(microbatches, min(ahead, microbatches)))
    return _with_exchanges(orders)


def inference(stages, microbatches):
    """Return the operations of forward passes alone, a list for each stage."""
    forwards = [Forward(m) for m in range(microbatches)]
    return _with_exchanges([forwards] * stages)


def _order(microbatches, ahead):
    """Return passes of a stage whose forwards are `ahead` of its backwards."""
    order = [Forward(m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(Backward(m))
        if ahead + m < microbatches:
            order.append(Forward(ahead + m))
    return order


def _with_exchanges(orders):
    operations = [[] for _ in orders]
    for tick in _ticks(orders):
        for mine, operation in zip(operations, tick, strict=True):
            if operation:
                mine.append(operation)
        for stage in range(len(orders) - 1):
            down = tick[stage] if isinstance(tick[stage], Forward) else None
            up = tick[stage + 1] if isinstance(tick[stage + 1], Backward) else None
            if down or up:
                m, n = down and down.microbatch, up and up.microbatch
                operations[stage].append(Exchange(stage + 1, sent=m, received=n))
                operations[stage + 1].append(Exchange(stage, sent=n, received=m))
    return operations


def _ticks(orders):
    """Yield what each stage does in each tick: an operation, or None."""
    places, done = [0] * len(orders), set()
    while any(place < len(o) for place, o in zip(places, orders, strict=True)):
        tick = []
        for stage, order in enumerate(orders):
            place = places[stage]
            is_due = place < len(order) and _is_ready(order[place], stage, orders, done)
            tick.append(order[place] if is_due else None)
        for stage, operation in enumerate(tick):
            if operation:
                places[stage] += 1
                done.add((stage, operation))
        yield tick


def _is_ready(operation, stage, orders, done):
    source = stage - 1 if isinstance(operation, Forward) else stage + 1
    return not 0 <= source < len(orders) or (source, operation) in done
