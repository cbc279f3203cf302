"""The durations of a rank's steps, by which a step is slow."""

from collections import deque

from hvdtrain.flight import ring

# A step is slow if it takes this many times the median of the steps before.
_SLOW_FACTOR, _KNOWN_STEPS = 20, 5


class StepDurations:
    """The durations of the last steps.

    Args:
        least_seconds: that a slow step takes.
    """

    def __init__(self, least_seconds: float) -> None:
        self._least_seconds = least_seconds
        self._durations: deque[float] = deque(maxlen=64)
        self._last: ring.Moment | None = None

    def slow(self, moment: ring.Moment, now: float) -> float | None:
        """Return since when a step that is slow has run; None for any other step."""
        last = self._last
        if not last or moment.step != last.step:
            if last and moment.step > last.step > 0:
                seconds = moment.step_entered - last.step_entered
                self._durations.append(seconds / (moment.step - last.step))
            self._last = moment
        is_training = moment.phase in ("input", "compute", "callbacks")
        if not is_training or len(self._durations) < _KNOWN_STEPS:
            return None
        limit = _SLOW_FACTOR * sorted(self._durations)[len(self._durations) // 2]
        # The step may have had an evaluation in it.
        since = max(moment.step_entered, moment.phase_entered)
        is_slow = now - since >= max(limit, self._least_seconds)
        return since if is_slow else None
