"""Figures from measured times: pure functions of numbers."""

import dataclasses
import math
import statistics

PERCENTILES = (50, 90, 99)


def percentile(values, percent):
    """Return the smallest value that `percent` % of `values` do not exceed.

    The nearest rank: always one of the measured values, no interpolation.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The distribution of the time of a step, in seconds.

    Executions are timed, not steps: each value is the time of an execution divided by
    its steps, so that an outlier of one step is spread over those of its execution.

    Attributes:
        mean: of all executions.
        p50: median.
        p90: 90 % of the executions take no longer per step.
        p99: 99 % of them.
        executions: number of executions.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    executions: int

    @classmethod
    def of(cls, executions, *, steps_per_execution):
        """Return the distribution for a list of seconds of executions."""
        steps = [seconds / steps_per_execution for seconds in executions]
        p50, p90, p99 = (percentile(steps, percent) for percent in PERCENTILES)
        mean = statistics.fmean(steps)
        return cls(mean=mean, p50=p50, p90=p90, p99=p99, executions=len(steps))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The parts of the time of a step, in seconds; they add up to `step`.

    Attributes:
        compute: forward and backward pass, update, metrics.
        communication: what the reduction adds, waiting for the slowest rank included;
            what the backward pass hides is not in it.
        overhead: of `fit`, its callbacks and the loop in Python.
        input_wait: what the input pipeline adds over one batch in memory.
        step: all of it.
    """

    compute: float
    communication: float
    overhead: float
    input_wait: float
    step: float


def split(*, train, constant, function, local):
    """Return the `Split` of one round from the step times of its variants.

    Args:
        train: `fit` with the real input.
        constant: `fit` with one batch in memory; None if that is the real input.
        function: the compiled train function called in a loop, with that batch.
        local: the same of the model without reduction; None with one rank.
    """
    constant = train if constant is None else constant
    local = function if local is None else local
    return Split(
        compute=local,
        communication=function - local,
        overhead=constant - function,
        input_wait=train - constant,
        step=train,
    )


def median_split(rounds):
    """Return the `Split` of the medians of each part over rounds.

    A difference is formed in each round, between neighbours in time, and then the
    median is taken: a slow phase of the machine changes both sides of a difference.
    Medians need not add up: `step` is the median of the steps.
    """
    names = [field.name for field in dataclasses.fields(Split)]
    return Split(
        **{
            name: statistics.median(getattr(each, name) for each in rounds)
            for name in names
        }
    )


def median_ratio(numerators, denominators):
    """Return the median of the ratios of paired rounds."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(a / b for a, b in pairs)
