"""Variants of a workload in alternating rounds."""

import dataclasses
import statistics
from collections.abc import Callable

from hvdtrain.job.agreement import fail_together, gather

# Enough for tracing in the first, and for a guess of the others' time.
_WARM_UP_EXECUTIONS = 3
# The first execution of `fit` is not counted: it includes the iterator's creation.
_MIN_EXECUTIONS = 2
_MAX_EXECUTIONS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to run a workload that is timed.

    Attributes:
        run: `run(executions)` returns the seconds of each execution.
        is_alone: only rank 0 runs it; the others are blocked in a collective.
    """

    run: Callable
    is_alone: bool = False


def warm_up(world, variants):
    """Trace each variant, and return how many executions take a second. A collective.

    Args:
        world: the `World`.
        variants: `Variant`s by name, the same names on all ranks.

    Returns:
        Executions per second by name, rank 0's on all ranks.
    """
    speeds = {}
    for name, variant in variants.items():
        seconds = _run(world, variant, _WARM_UP_EXECUTIONS)
        if seconds:
            speeds[name] = 1 / statistics.median(seconds[1:])
    return gather(world, speeds)[0]


def run_rounds(world, variants, speeds, *, rounds, seconds):
    """Run all variants in each round. A collective.

    The order is reversed in every other round: a drift of the machine's speed then
    cancels in differences of variants.

    Args:
        world: the `World`.
        variants: `Variant`s by name.
        speeds: executions per second by name.
        rounds: number of rounds.
        seconds: of each variant in each round, at least.

    Returns:
        By name, for each round, the list of the seconds of each execution on this
        rank; empty where it had none.
    """
    measured = {name: [] for name in variants}
    for number in range(rounds):
        names = list(variants)[:: -1 if number % 2 else 1]
        for name in names:
            count = _executions(speeds[name] * seconds)
            measured[name].append(_run(world, variants[name], count))
    return measured


def _executions(count):
    return min(_MAX_EXECUTIONS, max(_MIN_EXECUTIONS, round(count)))


def _run(world, variant, executions):
    """Run a variant, started on all ranks at once."""
    gather(world, None)
    with fail_together(world):
        if world.is_chief or not variant.is_alone:
            return variant.run(executions)
    return []
