"""The first step and variable in which two trajectories differ."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hvdtrain.job import JobError
from hvdtrain.verify.gradient_norms import zero_by_construction
from hvdtrain.verify.trajectory import Directory, State

# What a variable may differ by: this share of its change since the start, ...
_SHARE_OF_CHANGE = 1e-3
# ... or this many units of rounding of its largest value, for each step, ...
_ROUNDING_UNITS = 8
# ... or this share of the largest change of a variable of its kind, for each step. The
# gradient of some weights is zero by construction, such as that of a bias before a
# normalization: its rounding is a share of the other gradients.
_SHARE_OF_OTHERS = 1e-6
_METRIC_TOLERANCE = 1e-4
# Of float64: what one step of a deep model may lose, and what it cannot lose.
_ROUNDING, _GROWN_ROUNDING = 2e-11, 2e-10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between the ranks and the reference.

    Attributes:
        step: the step after which it was found.
        name: of a variable or a metric.
        size: the largest difference of its elements.
        scale: the largest value of the reference.
        ratio: the change since the start, as a multiple of the reference's; NaN if it
            is no multiple.
        floor: what is rounding whatever the scale.
    """

    step: int
    name: str
    size: float
    scale: float
    ratio: float
    floor: float = 0.0

    @property
    def relative(self) -> float:
        """The size in relation to the scale."""
        if self.size <= self.floor and self.scale <= self.floor / _SHARE_OF_OTHERS:
            # A weight that only rounding has changed.
            return self.size / self.floor * _SHARE_OF_OTHERS if self.floor else 0.0
        return self.size / self.scale if self.scale else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        steps: the steps that were compared.
        largest: the largest difference of a variable or metric, in relation to its
            largest value, over all steps.
        first: the first difference that is not rounding, or None.
        is_cut_short: whether rounding has grown too large for later steps.
    """

    steps: list[int]
    largest: float
    first: Difference | None
    is_cut_short: bool = False


def compare(ranks: Directory, reference: Directory) -> Comparison:
    """Compare the states of rank 0 after each step.

    Raises:
        JobError: a variable is missing in one of them, or has another shape.
    """
    steps = [
        step
        for step in ranks.last_numbers("state", 0)
        if reference.read("state", 0, step)
    ]
    start = dict(_start(reference))
    unmoved = _without_gradient(ranks) & _without_gradient(reference)
    largest_by_step: list[float] = []
    for number, step in enumerate(steps, start=1):
        found, state = (each.read("state", 0, step) for each in (ranks, reference))
        _check_comparable(found.variables, state.variables)
        differences = [
            *_variables(found, state, start, step=step, number=number),
            *_metrics(state, step=step),
        ]
        # Some optimizers make full steps of rounding, such as Lion, of its sign.
        differences = [each for each in differences if each[1].name not in unmoved]
        excessive = [each for excess, each in differences if excess > 1]
        largest = max(largest_by_step, default=0.0)
        if excessive and _has_grown(largest_by_step):
            compared = steps[: number - 1]
            return Comparison(
                steps=compared, largest=largest, first=None, is_cut_short=True
            )
        if excessive:
            # A weight says more than a slot of the optimizer.
            weights = [each for each in excessive if each.name in start]
            first = max(
                weights or excessive, key=lambda each: each.size / (each.scale or 1.0)
            )
            return Comparison(steps=steps, largest=largest, first=first)
        largest_by_step.append(
            max((each.relative for _, each in differences), default=0.0)
        )
    return Comparison(
        steps=steps, largest=max(largest_by_step, default=0.0), first=None
    )


def _without_gradient(files: Directory) -> set[str]:
    facts = files.read("facts", 0)
    if facts is None:
        return set()
    start = dict(_start(files))
    return {
        name
        for name in zero_by_construction(facts.gradients)
        if name in start and start[name].dtype == np.float64
    }


def _has_grown(largest_by_step: list[float]) -> bool:
    """Return whether the steps have multiplied rounding, in float64.

    A fault that begins at some step makes a difference at once. In some models, such as
    deep ones with a normalization over few values, each step amplifies rounding, until
    an activation such as ReLU switches.
    """
    if not largest_by_step:
        return False
    return largest_by_step[0] < _ROUNDING < _GROWN_ROUNDING < largest_by_step[-1]


def _check_comparable(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> None:
    for name in sorted({*found, *expected}):
        shapes = [each[name].shape for each in (found, expected) if name in each]
        if len(shapes) < 2:
            raise JobError(
                f"Received the variable {name} in one of two runs of the script; "
                "expected the same variables in both: give models and layers names "
                "that do not depend on the run."
            )
        if len(set(shapes)) > 1:
            raise JobError(
                f"Received {name} with the shape {shapes[0]} on two ranks and "
                f"{shapes[1]} in one process; expected shapes that do not depend on "
                "the size of the batch."
            )


def _start(files: Directory) -> Iterator[tuple[str, np.ndarray]]:
    for number in files.last_numbers("start", 0):
        yield from files.read("start", 0, number).items()


def _variables(
    found: State, expected: State, start: Mapping[str, Any], *, step: int, number: int
) -> Iterator[tuple[float, Difference]]:
    """Yield the difference of each variable, in relation to the allowed one."""
    values = {name: each for name, each in expected.variables.items() if each.size}
    largest_by_kind: dict[str, float] = collections.defaultdict(float)
    for name, value in values.items():
        change = _largest(value - _before(name, value, start))
        kind = _kind(name, value, start)
        largest_by_kind[kind] = max(largest_by_kind[kind], change)
    for name, value in values.items():
        other, before = found.variables[name], _before(name, value, start)
        change = _largest(value - before)
        scale = max(_largest(value), _largest(other))
        size = _largest_difference(other, value)
        others = largest_by_kind[_kind(name, value, start)]
        has_floor = _is_float(value) and np.isfinite(others)
        floor = _SHARE_OF_OTHERS * number * others if has_floor else 0.0
        allowed = _SHARE_OF_CHANGE * change + _rounding(value) * number * scale + floor
        yield (
            size / allowed if allowed else float(size > 0) * 2,
            Difference(
                step=step,
                name=name,
                size=size,
                scale=scale,
                ratio=_ratio(other - before, value - before),
                floor=floor,
            ),
        )


def _before(name: str, value: np.ndarray, start: Mapping[str, Any]) -> np.ndarray:
    before = start.get(name)
    # Slots start at zero. Weights that are made in the first step have no start.
    if before is None or before.shape != value.shape:
        return np.zeros_like(value)
    return before


def _kind(name: str, value: np.ndarray, start: Mapping[str, Any]) -> str:
    """Return what values a variable has: those of weights, or the name of its slot."""
    if not _is_float(value):
        return "integer"
    return "" if name in start else re.split("[/_]", name.partition(" #")[0])[-1]


def _is_float(value: np.ndarray) -> bool:
    return bool(np.issubdtype(value.dtype, np.floating))


def _rounding(value: np.ndarray) -> float:
    if not _is_float(value):
        return 0.0
    return _ROUNDING_UNITS * float(np.finfo(value.dtype).eps)


def _metrics(state: State, *, step: int) -> Iterator[tuple[float, Difference]]:
    for name, value in (state.metrics_of_ranks or {}).items():
        value, expected = np.asarray(value), np.asarray(state.metrics[name])
        scale = max(_largest(expected), _largest(value))
        size = _largest_difference(value, expected)
        yield (
            size / (_METRIC_TOLERANCE * scale) if scale else 0.0,
            Difference(
                step=step,
                name=f"metric {name}",
                size=size,
                scale=scale,
                ratio=float("nan"),
            ),
        )


def _largest(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0.0))


def _largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference; NaN and infinity equal themselves."""
    differ = ~((found == expected) | (np.isnan(found) & np.isnan(expected)))
    if not differ.any():
        return 0.0
    size = _largest(found[differ].astype(float) - expected[differ].astype(float))
    return size if np.isfinite(size) else float("inf")


def _ratio(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the factor by which `found` is most nearly `expected`."""
    found, expected = found.astype(float).ravel(), expected.astype(float).ravel()
    square = float(expected @ expected)
    if not square:
        return float("nan")
    ratio = float(found @ expected) / square
    # Not a multiple: a ratio would say nothing.
    rest = _largest(found - ratio * expected)
    return ratio if rest < 0.01 * _largest(found) else float("nan")
