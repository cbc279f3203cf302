"""What one rank measures between two reports of progress: one row of numbers.

The rows of all ranks are a matrix, in which `stragglers` finds the slow rank. Totals of
this process are read in reports only, so a step costs nothing.
"""

import functools
import gc
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from hvdtrain.environment import control_groups

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


def process_seconds(stat: str | os.PathLike = "/proc/self/stat") -> float:
    """Return the seconds since the start of this process."""
    # The name of the program is in parentheses, and may contain spaces.
    fields = pathlib.Path(stat).read_text().rpartition(")")[2].split()
    start = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start


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


def _throttled_seconds(
    groups: Callable[[], Iterable[pathlib.Path]] = control_groups,
) -> float:
    """Return the seconds in which the CPU quotas of its groups stopped this process."""
    return sum(_throttled(directory / "cpu.stat") for directory in groups())


# Version 2 of control groups, then version 1.
_UNITS = {"throttled_usec": 1e-6, "throttled_time": 1e-9}


def _throttled(path: pathlib.Path) -> float:
    try:
        lines = map(str.split, path.read_text().splitlines())
        return sum(_UNITS.get(name, 0.0) * int(value) for name, value in lines)
    except (OSError, ValueError):
        return 0.0


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
