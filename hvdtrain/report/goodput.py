"""What share of a run's wall time was productive, and what took the rest.

The time from the start of the first process to the last line of log.jsonl is divided at
its lines. Every second has one cause, so the causes add up to all of it:

    process start - start line - report - report - last line - kill - process start
    start-up        tracing      steps    steps    other       between kill and start

Old logs lack some fields: seconds of the process, which are then between kill and
start, or unknown before the first start; evaluation, saving and waits for the slowest
rank, which are then in productive time, or in other time after the last report.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from hvdtrain.log import Line
from hvdtrain.report.runs import duration_text, seconds_of_steps, split_at_starts

PRODUCTIVE = "productive"
START_UP = "start-up and tracing"
REPEATED = "repeated steps"
BETWEEN = "between kill and start"
SAVING = "saving"
EVALUATION = "evaluation"
INPUT = "input wait"
SLOWEST = "waiting for the slowest rank"
OTHER = "other"
CAUSES = (
    *(PRODUCTIVE, START_UP, REPEATED, BETWEEN, SAVING, EVALUATION),
    *(INPUT, SLOWEST, OTHER),
)
# A text has shares in units of a thousandth.
_UNITS = 1000


def compute_goodput(lines: Sequence[Line]) -> dict[str, float]:
    """Return the seconds of each of `CAUSES` in a run, superseded lines included."""
    totals = dict.fromkeys(CAUSES, 0.0)
    for part in _parts(lines):
        for cause, seconds in part.items():
            totals[cause] += seconds
    return totals


def goodput_text(seconds: Mapping[str, float]) -> str:
    """Return one line with the share of each cause; the shares add up to 100 %."""
    total = sum(seconds.values())
    if total <= 0:
        return "productive: no time is recorded yet"
    counts = round_shares([seconds[cause] / total for cause in CAUSES], _UNITS)
    shares = [
        f"{cause} {100 * count / _UNITS:.1f} %"
        for cause, count in zip(CAUSES, counts, strict=True)
        if count or cause == PRODUCTIVE
    ]
    shares[0] += f" of {duration_text(total)} wall time"
    return ", ".join(shares)


def round_shares(shares: Sequence[float], units: int) -> list[int]:
    """Return shares, which add up to 1, as numbers of units that add up to `units`.

    The units that rounding down leaves are given to the largest remainders.
    """
    exact = [share * units for share in shares]
    counts = [math.floor(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in order[: units - sum(counts)]:
        counts[i] += 1
    return counts


def _parts(lines: Sequence[Line]) -> Iterator[dict[str, float]]:
    """Yield the seconds by cause of stretches of time, one after the other."""
    end: float | None = None
    lines_by_start = split_at_starts(lines)
    for number, one_start in enumerate(lines_by_start):
        start, process = one_start[0], one_start[0].get("process_seconds") or 0.0
        if end is None:
            yield {START_UP: process}
        else:
            # An elastic job continues in processes that have started before.
            gap = max(0.0, start["seconds"] - end)
            start_up = min(process, gap)
            yield {START_UP: start_up, BETWEEN: gap - start_up}
        later = [lines[0]["step"] for lines in lines_by_start[number + 1 :]]
        yield from _parts_of_start(one_start, min(later, default=math.inf))
        end = one_start[-1]["seconds"]


def _parts_of_start(
    lines: Sequence[Line], lost_from: float
) -> Iterator[dict[str, float]]:
    """Yield the parts of one start, whose steps from `lost_from` on were repeated."""
    before = start = lines[0]
    for line in lines[1:]:
        if line["event"] not in ("progress", "end"):
            continue
        yield _Stretch(start, before, line, lost_from).parts()
        before = line
    # Of a checkpoint, for which a run waits that has ended its training.
    cause = SAVING if before["event"] == "end" else OTHER
    yield {cause: max(0.0, lines[-1]["seconds"] - before["seconds"])}


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """The time between two reports of a start, or around them."""

    start: Line
    before: Line
    line: Line
    lost_from: float

    def parts(self) -> dict[str, float]:
        """Return the seconds by cause, none of which takes more than is left."""
        left = seconds = max(0.0, self.line["seconds"] - self.before["seconds"])
        parts: dict[str, float] = {}
        for cause, wanted in self._wanted(seconds):
            parts[cause] = min(max(wanted, 0.0), left)
            left -= parts[cause]
        return parts | {PRODUCTIVE if self._steps else OTHER: left}

    @property
    def _steps(self) -> int:
        return max(0, self.line["step"] - self.before["step"])

    def _wanted(self, seconds: float) -> Iterator[tuple[str, float]]:
        evaluation = self.line.get("evaluation_seconds") or 0.0
        saving = self.line.get("saving_seconds") or 0.0
        yield EVALUATION, evaluation
        yield SAVING, saving
        if not self._steps:
            return
        rest = max(0.0, seconds - evaluation - saving)
        if self.before is self.start:
            with_speed = seconds_of_steps(self.start, self.before, self.line)
            tracing = max(0.0, rest - with_speed)
            yield START_UP, tracing
            rest -= tracing
        kept = min(max(self.lost_from - self.before["step"], 0), self._steps)
        yield REPEATED, rest * (1 - kept / self._steps)
        rest *= kept / self._steps
        yield INPUT, rest * (self.line.get("input_wait") or 0.0)
        straggler = self.line.get("straggler") or {}
        # A share of the whole time, evaluation and saving included.
        waiting = seconds * (straggler.get("waiting") or 0.0)
        yield SLOWEST, waiting * kept / self._steps
