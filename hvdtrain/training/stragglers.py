"""Find the rank that delays the others, from the times of all ranks.

A collective ends on all ranks at the same moment. Its duration on each rank therefore
compares their arrivals, and no clocks are compared: the rank with the shortest wait has
arrived last, and it came by (median of the others' waits - its wait) later.

    waits of ranks 0 to 2     rank 2 arrived last, and 20 ms late:
    0.021  0.019  0.000       median(0.021, 0.019) - 0.000

Each rank measures one row of numbers between two reports of progress (`RankTimes`). It
reads totals of its process in reports only, so a step costs nothing.
"""

import collections
import functools
import gc
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from hvdtrain.environment import control_groups, cpu_statistics
from hvdtrain.events import OTHER, Straggler

THROTTLING, STOLEN, GARBAGE = "throttling", "stolen CPU time", "garbage collection"
# Phases of `native.recorder` that make a rank late.
PHASES = ("input", "callbacks", "compute", "evaluation", "saving")
# The first three happen within a phase. Threads of a throttled group wait in the run
# queue as well. So each cause precedes those that contain it.
CAUSES = (THROTTLING, STOLEN, GARBAGE, *PHASES)
# The columns before the waits. `newest` is the number of the newest collective.
COLUMNS = ("seconds", "collectives", "newest", *CAUSES)
# The waits of a row, the newest last. A report has the last ones if there are more.
WAITS = 64


def find_straggler(
    rows: np.ndarray, *, steps: int, hosts: Sequence[str]
) -> Straggler | None:
    """Return the rank that is late most; None where no arrivals were measured.

    Args:
        rows: of `RankTimes` of all ranks, by rank.
        steps: since the last report.
        hosts: names of the nodes, by rank.
    """
    waits = align_waits(rows)
    seconds = float(np.median(column(rows, "seconds")))
    if len(rows) < 2 or not waits.size or seconds <= 0:
        return None
    last, late = find_last(waits)
    # The waits may be of the last collectives only.
    scale = float(column(rows, "collectives").min()) / waits.shape[1]
    late_seconds = scale * np.bincount(last, weights=late, minlength=len(rows))
    rank = int(late_seconds.argmax())
    parts = split(float(late_seconds[rank]), _excess(rows, rank))
    cause = max(parts, key=parts.__getitem__)
    own, others = _own_and_others(rows, rank, cause)
    arrivals = scale / steps * (waits.max(axis=0) - waits).sum(axis=1)
    return Straggler(
        rank=rank,
        host=hosts[rank],
        last_share=float((last == rank).mean()),
        late_seconds=float(late_seconds[rank]) / steps,
        delay=float(late_seconds[rank]) / seconds,
        delay_by_cause={name: s / seconds for name, s in parts.items() if s},
        cause=cause,
        cause_seconds=own / steps,
        others_seconds=others / steps,
        waiting=scale * float((waits - waits.min(axis=0)).mean(axis=0).sum()) / seconds,
        late_seconds_by_rank=arrivals.tolist(),
    )


def align_waits(rows: np.ndarray) -> np.ndarray:
    """Return the waits of all ranks in the collectives that all rows have.

    One rank may have read its times a collective later than another.

    Returns:
        An array of (ranks, collectives), the newest collective last.
    """
    # A sum over ranks that was divided may be just below an integer.
    newest = np.rint(column(rows, "newest")).astype(int)
    all_waits = rows[:, len(COLUMNS) :]
    count = all_waits.shape[1] - int(newest.max() - newest.min())
    if count <= 0:
        return np.empty((len(rows), 0))
    ends = all_waits.shape[1] - (newest - newest.min())
    pairs = zip(all_waits, ends, strict=True)
    waits = np.stack([row[end - count : end] for row, end in pairs])
    return waits[:, np.isfinite(waits).all(axis=0)]


def find_last(waits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank that arrived last in each collective, and how late it came."""
    last = waits.argmin(axis=0)
    pairs = zip(waits.T, last, strict=True)
    late = [_median_of_others(one, rank) - one[rank] for one, rank in pairs]
    return last, np.array(late)


def split(late_seconds: float, excess: dict[str, float]) -> dict[str, float]:
    """Split lateness into causes, which add up to it.

    Each cause of `CAUSES` explains as much as its excess over the other ranks, as far
    as the causes before it have left.
    """
    parts, left = {}, late_seconds
    for cause in CAUSES:
        parts[cause] = min(max(excess[cause], 0.0), left)
        left -= parts[cause]
    return parts | {OTHER: left}


def _excess(rows: np.ndarray, rank: int) -> dict[str, float]:
    pairs = {cause: _own_and_others(rows, rank, cause) for cause in CAUSES}
    return {cause: own - others for cause, (own, others) in pairs.items()}


def _own_and_others(rows: np.ndarray, rank: int, cause: str) -> tuple[float, float]:
    if cause == OTHER:
        return np.nan, np.nan
    # What is not measured is no cause.
    values = np.nan_to_num(column(rows, cause))
    return float(values[rank]), _median_of_others(values, rank)


def _median_of_others(values: np.ndarray, rank: int) -> float:
    return float(np.median(np.delete(values, rank)))


class StragglerNotice:
    """Returns a text once one rank has delayed the others long enough.

    Args:
        delay: the mean share of the time that is too much.
        seconds: over which the mean is taken.
    """

    def __init__(
        self,
        *,
        delay: float = 0.1,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._delay = delay
        self._seconds = seconds
        self._clock = clock
        self._last: tuple[int, str] | None = None
        self._recent: collections.deque[tuple[float, Straggler]] = collections.deque()

    def __call__(self, straggler: Straggler) -> str:
        """Return the text of a rank and a cause once, then the empty text."""
        now, recent = self._clock(), self._recent
        recent.append((now, straggler))
        # Keep one report that is old enough, so that the others span the seconds.
        while len(recent) > 1 and recent[1][0] <= now - self._seconds:
            recent.popleft()
        found = (straggler.rank, straggler.cause)
        delays = [s.delay for _, s in recent if (s.rank, s.cause) == found]
        is_long = now - recent[0][0] >= self._seconds
        if not is_long or sum(delays) <= self._delay * len(recent):
            return ""
        is_new, self._last = found != self._last, found
        return str(straggler) if is_new else ""


class RankTimes:
    """The times of this rank since the last report.

    Args:
        seconds_by_phase: returns the seconds of this process in each phase, without the
            waits in collectives for other ranks, which are the slow ones then.
        recent_waits: `recent_waits(count)` returns the number of the newest collective
            of all ranks, and the seconds that this rank spent in each of the last ones.
        system_seconds: returns seconds of this process by the first three causes.
    """

    def __init__(
        self,
        seconds_by_phase: Callable[[], Mapping[str, float]],
        recent_waits: Callable[[int], tuple[int, np.ndarray]],
        *,
        system_seconds: Callable[[], Mapping[str, float]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._seconds_by_phase = seconds_by_phase
        self._recent_waits = recent_waits
        self._system_seconds = system_seconds or measure_system
        self._clock = clock
        self._totals, _ = self._read_totals()

    def read(self) -> np.ndarray:
        """Return the row since the last call, of a length that never changes.

        What is not measured is NaN.
        """
        before = self._totals
        self._totals, waits = self._read_totals()
        # The counters of a thread that has ended are gone.
        row = np.maximum(self._totals - before, 0)
        fresh = min(int(row[COLUMNS.index("collectives")]), len(waits), WAITS)
        row[COLUMNS.index("newest")] = self._totals[COLUMNS.index("newest")]
        missing = np.full(WAITS - fresh, np.nan)
        return np.concatenate([row, missing, waits[len(waits) - fresh :]])

    def _read_totals(self) -> tuple[np.ndarray, np.ndarray]:
        newest, waits = self._recent_waits(WAITS)
        totals = {**self._seconds_by_phase(), **self._system_seconds()}
        totals |= {"seconds": self._clock(), "newest": newest, "collectives": newest}
        row = [totals.get(name, math.nan) for name in COLUMNS]
        return np.array(row, "float64"), waits


def column(rows: np.ndarray, name: str) -> np.ndarray:
    """Return a column of a matrix of rows, or its number in one row."""
    return rows[..., COLUMNS.index(name)]


def measure_system() -> dict[str, float]:
    """Return seconds that the system and Python have taken from this process."""
    return {
        THROTTLING: _throttled_seconds(),
        STOLEN: _run_queue_seconds(),
        GARBAGE: _garbage_collection().total,
    }


def _run_queue_seconds(tasks: str | os.PathLike = "/proc/self/task") -> float:
    """Return the seconds in which threads of this process waited for a core.

    They wait at the same time, on as many cores as the process may use.
    """
    waits = [_field(p, 1) for p in pathlib.Path(tasks).glob("*/schedstat")]
    return 1e-9 * sum(waits) / len(os.sched_getaffinity(0))


def _field(path: pathlib.Path, number: int) -> int:
    try:
        return int(path.read_text().split()[number])
    except (OSError, IndexError):
        # The thread has ended.
        return 0


# Version 2 of control groups, then version 1.
_UNITS = {"throttled_usec": 1e-6, "throttled_time": 1e-9}


def _throttled_seconds(
    groups: Callable[[], Iterable[pathlib.Path]] = control_groups,
) -> float:
    """Return the seconds in which the CPU quotas of its groups stopped this process."""
    counts = (each for group in groups() for each in cpu_statistics(group).items())
    return sum(_UNITS.get(name, 0.0) * value for name, value in counts)


@functools.cache
def _garbage_collection() -> "_CollectionClock":
    # One for all trainings of this process: `gc.callbacks` keeps it.
    return _CollectionClock()


class _CollectionClock:
    """Adds up the seconds of Python's garbage collection, from its creation on."""

    def __init__(self) -> None:
        self.total = 0.0
        self._start = time.perf_counter()
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._start = now
        else:
            self.total += now - self._start
