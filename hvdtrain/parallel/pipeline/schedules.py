"""Schedules: the order of forward and backward passes. Pure functions of numbers.

A schedule is a sequence of ticks. In a tick, each stage takes its next operation, if
its input has been computed in an earlier tick. After the tick, neighbours exchange
results: an activation to the next stage and a gradient to the previous stage are one
exchange. All exchanges have one global order, by tick and then by stage, and each rank
takes its own in this order: ranks that block in an exchange therefore cannot deadlock.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeAlias

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
        neighbour: number of the neighbouring stage.
        sent: micro-batch whose activation or gradient is sent; None if none is.
        received: micro-batch whose activation or gradient is received, or None.
    """

    neighbour: int
    sent: int | None
    received: int | None


Pass: TypeAlias = Forward | Backward
Operation: TypeAlias = Pass | Exchange


def training(schedule: str, stages: int, microbatches: int) -> list[list[Operation]]:
    """Return the operations of a training step, a list for each stage.

    `gpipe` (Huang et al., 2019, arXiv:1811.06965) takes all forward passes, then all
    backward passes: a stage keeps the activations of all micro-batches. `1f1b`
    (Narayanan et al., 2021, arXiv:2104.04473, there PipeDream-Flush) takes each
    backward pass as early as possible: stage s of S keeps the activations of at most
    S - s micro-batches. Both take the backward passes in the order of micro-batches, so
    that sums of gradients are equal bit for bit.

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


def inference(stages: int, microbatches: int) -> list[list[Operation]]:
    """Return the operations of forward passes alone, a list for each stage."""
    forwards: list[Pass] = [Forward(m) for m in range(microbatches)]
    return _with_exchanges([forwards] * stages)


def _order(microbatches: int, ahead: int) -> list[Pass]:
    """Return the passes of a stage that takes `ahead` forward passes first."""
    order: list[Pass] = [Forward(m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(Backward(m))
        if ahead + m < microbatches:
            order.append(Forward(ahead + m))
    return order


def _with_exchanges(orders: Sequence[Sequence[Pass]]) -> list[list[Operation]]:
    operations: list[list[Operation]] = [[] for _ in orders]
    for tick in _ticks(orders):
        for stage_operations, operation in zip(operations, tick, strict=True):
            if operation:
                stage_operations.append(operation)
        for stage in range(len(orders) - 1):
            down, up = tick[stage], tick[stage + 1]
            m = down.microbatch if isinstance(down, Forward) else None
            n = up.microbatch if isinstance(up, Backward) else None
            if m is not None or n is not None:
                operations[stage].append(Exchange(stage + 1, sent=m, received=n))
                operations[stage + 1].append(Exchange(stage, sent=n, received=m))
    return operations


def _ticks(orders: Sequence[Sequence[Pass]]) -> Iterator[list[Pass | None]]:
    """Yield the operations of all stages in each tick; None for an idle stage."""
    positions, done = [0] * len(orders), set[tuple[int, Pass]]()
    while any(i < len(order) for i, order in zip(positions, orders, strict=True)):
        tick = []
        for stage, order in enumerate(orders):
            i = positions[stage]
            is_due = i < len(order) and _is_ready(order[i], stage, len(orders), done)
            tick.append(order[i] if is_due else None)
        for stage, operation in enumerate(tick):
            if operation:
                positions[stage] += 1
                done.add((stage, operation))
        yield tick


def _is_ready(
    operation: Pass, stage: int, stages: int, done: set[tuple[int, Pass]]
) -> bool:
    source = stage - 1 if isinstance(operation, Forward) else stage + 1
    return not 0 <= source < stages or (source, operation) in done
